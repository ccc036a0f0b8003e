"""``gpuherd esd export``: per-layer learning-rate factors and sparsities from the alphas of a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.cli.parsing import add_command
from gpuherd.cli.run_folder import add_run
from gpuherd.cli.tables import print_table
from gpuherd.columns import Column
from gpuherd.errors import ExitCode, UsageError, printable
from gpuherd.options import Parser

if TYPE_CHECKING:
    from gpuherd.esd.tables.alphapruning import By
    from gpuherd.esd.tables.results import StoredModel
    from gpuherd.esd.tables.tempbalance import Curve

DESCRIPTION = """\
Turns the alphas of an analysed model into what training and pruning need, a line a matrix.

--tempbalance   a factor on the learning rate, 0.5 to 1.5 (arXiv 2312.00359); with --lr the learning rate itself
--alphapruning  a sparsity, whose mean over their weights is --sparsity (arXiv 2410.10912)

examples:
  gpuherd esd export results --model org/name --tempbalance --lr 3e-4 --csv > rates.csv
  gpuherd esd export results:org/name --alphapruning --sparsity 0.7 --json
  gpuherd esd export results/stats/gpt2.csv --tempbalance --mapping step
"""
DEFAULT_SPARSITY = 0.7


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "esd export", DESCRIPTION)
    add_run(parser, "run_words", metavar="RUN", help_text="a run's folder, RUN:model or a stats file", required=True)
    method = parser.add_mutually_exclusive_group(required=True)
    method.add_argument("--tempbalance", action="store_true", help="learning-rate factors of TempBalance")
    method.add_argument("--alphapruning", action="store_true", help="sparsities of AlphaPruning")
    parser.add_argument("--model", metavar="MODEL", help="which model of the run; needed where it has several")
    parser.add_argument("--lr", type=float, metavar="X", help="with --tempbalance: the learning rate to multiply")
    parser.add_argument(
        "--mapping",
        choices=("linear", "sqrt", "log2", "step"),
        help="with --tempbalance: from alpha to factor (default: linear)",
    )
    parser.add_argument(
        "--sparsity",
        type=float,
        metavar="S",
        help=f"with --alphapruning: the share of weights to prune (default: {DEFAULT_SPARSITY})",
    )
    parser.add_argument(
        "--by", choices=("block", "layer"), help="with --alphapruning: the alpha of a block, or of each matrix alone"
    )
    parser.add_argument(
        "--epsilon", type=float, metavar="X", help="with --alphapruning: how unlike layers are pruned (default: 0.3)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON in place of a table")
    form.add_argument("--csv", action="store_true", help="print CSV in place of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    _refuse_options_of_the_other(args)
    model = _model(args)
    about, rows = _tempbalance(args, model) if args.tempbalance else _alphapruning(args, model)
    if args.json:
        record = {"model": model.model_id, "convention": dict(model.convention)} | about | {"layers": rows}
        print(json.dumps(record, indent=2, allow_nan=False))
    elif args.csv:
        from gpuherd.esd.tables.stats import table_text

        print(table_text(rows), end="")
    else:
        _print_table(model, about, rows)
    return ExitCode.OK


def _refuse_options_of_the_other(args: argparse.Namespace) -> None:
    others = ("sparsity", "by", "epsilon") if args.tempbalance else ("lr", "mapping")
    mine = "--tempbalance" if args.tempbalance else "--alphapruning"
    for name in others:
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} does not go with {mine}")
    if args.lr is not None and not 0 < args.lr < float("inf"):
        raise UsageError(f"--lr {args.lr:g} must be a positive number")


def _model(args: argparse.Namespace) -> StoredModel:
    from gpuherd.esd.folder import ESDDirectory
    from gpuherd.esd.tables.results import find, model_in, read_model

    if Path(args.run_words).is_dir():
        return read_model(model_in(ESDDirectory(args.run_words), args.model))
    if args.model is not None:
        raise UsageError(f"--model goes with the folder of a run, and {args.run_words!r} is none")
    return read_model(find(args.run_words)[0])


def _tempbalance(args: argparse.Namespace, model: StoredModel) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from gpuherd.esd.tables.tempbalance import factors

    mapping: Curve = args.mapping or "linear"
    rows: list[dict[str, Any]] = []
    for each in factors(model.layers, mapping):
        row: dict[str, Any] = {"longname": each.longname, "alpha": each.alpha, "factor": each.factor}
        if args.lr is not None:
            row["lr"] = each.factor * args.lr
        rows.append(row | {"excluded": each.excluded})
    return {"method": "tempbalance", "mapping": mapping, "lr": args.lr}, rows


def _alphapruning(args: argparse.Namespace, model: StoredModel) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from gpuherd.esd.tables.alphapruning import EPSILON, sparsities

    target = DEFAULT_SPARSITY if args.sparsity is None else args.sparsity
    epsilon = EPSILON if args.epsilon is None else args.epsilon
    by: By = args.by or "block"
    rows = [
        {"longname": each.longname, "params": each.params, "alpha": each.score, "sparsity": each.sparsity}
        for each in sparsities(model.layers, target, by=by, epsilon=epsilon)
    ]
    return {"method": "alphapruning", "sparsity": target, "by": by, "epsilon": epsilon}, rows


def _print_table(model: StoredModel, about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    names = [name for name in rows[0] if name != "longname"] if rows else []
    words = ", ".join(f"{name} {value}" for name, value in about.items() if value is not None and name != "method")
    print(printable(f"{model.model_id}: {about['method']}, {words}"))
    columns = [Column("matrix", 0, least=12, middle=True)]
    columns += [Column(name, index + 1, right=name != "excluded") for index, name in enumerate(names)]
    lines = [[printable(row["longname"]), *(_cell(row[name]) for name in names)] for row in rows]
    print_table(columns, lines)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else printable(str(value))
