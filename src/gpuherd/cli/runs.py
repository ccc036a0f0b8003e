"""``gpuherd runs``: the runs of answers in a folder, how each stands, and what has been made of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.cli.parsing import add_command
from gpuherd.errors import BadModel, ExitCode, MissingModel, printable
from gpuherd.options import Parser, add_options, build
from gpuherd.qa.working.options import RunsOptions

if TYPE_CHECKING:
    from gpuherd.qa.runs import RunLine

DESCRIPTION = """\
Lists the runs of answers that gpuherd generate has made, the latest first: the model, the questions, how many are
answered, and which judgings and scores there are.

examples:
  gpuherd runs
  gpuherd runs --runs-dir /data/runs --json
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "runs", DESCRIPTION)
    add_options(parser, RunsOptions)
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the list. Exit code 66 where there is no such folder."""
    from gpuherd.qa.runs import list_runs

    options = build(RunsOptions, args)
    lines = list_runs(options.runs_dir, _digest)
    if args.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    elif lines:
        _print(lines)
    else:
        print(f"no run of answers in {options.runs_dir}; gpuherd generate makes one")
    return ExitCode.OK


def _digest(path: Path) -> str:
    """The SHA-256 of a run's file, kept while the file looks the same. Raises DamagedRun."""
    from gpuherd.qa.runs import DamagedRun
    from gpuherd.qa.working.file_hash import hashes_of

    try:
        return hashes_of([path], f"reading {printable(str(path))}")[path]
    except (BadModel, MissingModel) as problem:
        raise DamagedRun(f"{problem}; generate the run anew") from None


def _print(lines: Sequence[RunLine]) -> None:
    from rich.console import Console
    from rich.text import Text

    from gpuherd.columns import Column, fitted, window

    columns = (
        Column("run", 0, middle=True),
        Column("state", 1),
        Column("answers", 2, right=True),
        Column("judgings", 3, least=10),
        Column("scores", 5),
        Column("model", 4, least=12, middle=True),
        Column("data set", 4, least=8, middle=True),
    )
    console = Console()
    table = fitted(columns, [_words(line) for line in lines], window(console))
    console.print(Text(table.lines[0], style="bold"), soft_wrap=True)
    console.print(Text("\n".join(table.lines[1:])), soft_wrap=True)
    for line in lines:
        if line.problem is not None:
            console.print(Text.assemble((f"{line.state}  ", "red"), line.problem), soft_wrap=True)
    if table.left_out:
        console.print(Text(f"no room for {', '.join(table.left_out)}: a wider window or --json shows them"))


def _words(line: RunLine) -> tuple[str, ...]:
    def told(value: str | None) -> str:
        return "-" if value is None else printable(value)

    answered = "-" if line.answered is None else str(line.answered)
    if line.questions is not None and line.answered != line.questions:
        answered += f"/{line.questions}"
    judgings = ", ".join(map(printable, line.judgings)) or "-"
    scorings = str(len(line.scorings)) if line.scorings else "-"
    return printable(line.run_id), str(line.state), answered, judgings, scorings, told(line.model), told(line.dataset)
