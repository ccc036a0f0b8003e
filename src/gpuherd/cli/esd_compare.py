"""``gpuherd esd compare``: alpha by layer of two models, or of all models of two runs."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from gpuherd.cli.parsing import add_command
from gpuherd.cli.tables import print_table
from gpuherd.columns import Column
from gpuherd.errors import ExitCode, UsageError, printable
from gpuherd.options import Parser

if TYPE_CHECKING:
    from gpuherd.esd.tables.comparison import Comparison, Match

DESCRIPTION = """\
Compares alpha layer by layer. A and B are each a stats file, RUN:model, or RUN, the folder of a run: of two runs with
several models those of the same id are compared, a line each.

examples:
  gpuherd esd compare results:org/base results:org/finetune
  gpuherd esd compare results/stats/gpt2.csv published/stats/gpt2.csv --across-conventions
  gpuherd esd compare last-week this-week --json

Exit codes: 0 compared, 1 no matrix with a fit in both, 2 wrong usage: no model in common too, and two conventions;
66 no such model.
"""
MOST_ROWS = 400
_OF_ONE = (
    Column("matrix", 0, least=12, middle=True),
    Column("alpha A", 2, right=True),
    Column("alpha B", 3, right=True),
    Column("delta", 1, right=True),
)
_OF_MANY = (
    Column("model", 0, least=12, middle=True),
    Column("matrices", 3, right=True),
    Column("median |delta|", 1, right=True),
    Column("largest", 2, right=True),
)


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "esd compare", DESCRIPTION)
    parser.add_argument("a", metavar="A", help="a stats file, RUN:model or RUN")
    parser.add_argument("b", metavar="B", help="the same, to compare with it")
    parser.add_argument(
        "--across-conventions",
        "--across_conventions",
        action="store_true",
        help="compare also where alpha was found in two ways (another --fix-fingers, --ks, …), and say so",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compares. Returns 0, or 1 when no matrix has a valid fit in both."""
    from gpuherd.esd.tables.comparison import compare, matched
    from gpuherd.esd.tables.results import find, read_model

    match = matched([read_model(path) for path in find(args.a)], [read_model(path) for path in find(args.b)])
    done = [compare(one, other, across_conventions=args.across_conventions) for one, other in match.pairs]
    if not done:
        raise UsageError(f"{args.a} and {args.b} have no model in common; compare two by name: RUN:model")
    if args.json:
        print(json.dumps(_as_json(done, match), indent=2, allow_nan=False))
    elif len(done) == 1 and not match.only_a and not match.only_b:
        _print_one(done[0])
    else:
        _print_many(done, match)
    return ExitCode.OK if any(each.deltas for each in done) else ExitCode.FAILED


def _as_json(done: list[Comparison], match: Match) -> dict[str, object]:
    return {
        "models": [each.as_dict() for each in done],
        "only_a": list(match.only_a),
        "only_b": list(match.only_b),
    }


def _print_one(comparison: Comparison) -> None:
    print(f"A  {printable(comparison.a)}")
    print(f"B  {printable(comparison.b)}")
    _print_conventions([comparison])
    rows = [
        [printable(pair.longname), _figure(pair.a), _figure(pair.b), _figure(pair.delta, sign=True)]
        for pair in comparison.pairs
    ]
    print_table(_OF_ONE, rows[:MOST_ROWS])
    if len(rows) > MOST_ROWS:
        print(f"… and {len(rows) - MOST_ROWS} more matrices; --json has all")
    for side, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            shown = ", ".join(printable(name) for name in names[:5])
            print(f"only in {side}: {len(names)} ({shown}{', …' if len(names) > 5 else ''})")
    print(_verdict(comparison))


def _print_many(done: list[Comparison], match: Match) -> None:
    _print_conventions(done)
    rows = [
        [
            printable(each.a),
            str(len(each.deltas)),
            _figure(each.median),
            _figure(None if each.largest is None else each.largest.delta, sign=True),
        ]
        for each in done
    ]
    print_table(_OF_MANY, rows)
    print(f"{len(done)} models in both, {len(match.only_a)} only in A, {len(match.only_b)} only in B")


def _print_conventions(done: list[Comparison]) -> None:
    for a, b in dict.fromkeys(each.conventions for each in done if each.conventions is not None):
        print(f"two conventions, so that a difference is not of the models alone: A {printable(a)}; B {printable(b)}")


def _verdict(comparison: Comparison) -> str:
    largest = comparison.largest
    if largest is None or comparison.median is None:
        return "no matrix with a valid fit in both"
    return (
        f"{len(comparison.deltas)} matrices with a fit in both: median |delta| {comparison.median:.4g}, "
        f"largest {_figure(largest.delta, sign=True)} at {printable(largest.longname)}"
    )


def _figure(value: float | None, *, sign: bool = False) -> str:
    return "-" if value is None else f"{value:+.4f}" if sign else f"{value:.4f}"
