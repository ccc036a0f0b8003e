"""``gpuherd score``: uncertainty measures of a run's answers, as a table."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from gpuherd.cli.parsing import add_command, load_for
from gpuherd.cli.run_folder import add_run
from gpuherd.errors import CannotWrite, UsageError, printable
from gpuherd.options import Parser, add_options, build
from gpuherd.qa.scoring.options import ScoreOptions

if TYPE_CHECKING:
    from rich.console import Console

    from gpuherd.qa.scoring.experiment import ScoreOutcome, Scoring

DESCRIPTION = """\
Computes uncertainty measures of the answers of a run: a column a measure, a row a question, higher is more uncertain.
What they need beyond the answers (relevance, similarity, entailment, P(True), hidden states) is measured once, by jobs
on free GPUs, and kept with the run. Nothing of the run changes; it can be scored as often as you like.

examples:
  gpuherd score RUN_ID                                   all that the answers alone allow
  gpuherd score RUN_ID --measures log-probs --eos exclude
  gpuherd score RUN_ID --measures nll token-sar sar --relevance-model cross-encoder/stsb-roberta-large
  gpuherd score RUN_ID --equivalence nli --equivalence-model microsoft/deberta-large-mnli
  gpuherd score RUN_ID --measures p-true p-ik --judge exact --dry-run
  gpuherd score --list                                   every measure, what it needs and where it is from

Then: gpuherd evaluate RUN_ID --judge J.
Exit codes: 0 done, 1 a job failed (in a dry run: can never run), 2 wrong usage, 65 and 66 bad or missing run or model,
130 stopped.
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "score", DESCRIPTION)
    add_run(parser, "run_id", metavar="RUN_ID", help_text="the run: its name in --runs-dir, or its path")
    add_options(parser, ScoreOptions)
    parser.add_argument("--list", action="store_true", help="list all measures and do nothing else")
    parser.add_argument("--csv", metavar="FILE", help="write the table into this file too")
    parser.add_argument("--json", action="store_true", help="print the plan or the outcome as JSON on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Scores and prints. Returns the exit code."""
    from rich.console import Console

    # With --json standard output belongs to the JSON alone.
    console = Console(stderr=args.json)
    if args.list:
        _print_measures(console, as_json=args.json)
        return 0
    if args.run_id is None:
        raise UsageError("which run? gpuherd score RUN_ID; gpuherd runs lists them")
    load_for(args, ScoreOptions)
    options = build(ScoreOptions, args)

    from gpuherd.qa.scoring.experiment import Scoring

    scoring = Scoring(args.run_id, options, console=console, simulate=args.simulate is not None)
    outcome = scoring.run()
    if args.csv is not None and outcome.scores is not None:
        _write_csv(args.csv, outcome)
    if args.json:
        print(json.dumps(scoring.to_dict(outcome), indent=2, allow_nan=False))
    else:
        _print_outcome(console, scoring, outcome)
    return outcome.exit_code


def _print_outcome(console: Console, scoring: Scoring, outcome: ScoreOutcome) -> None:
    from gpuherd.qa.scoring.telling import left_out_lines, plan_lines, score_lines
    from gpuherd.qa.working.running import failure_lines

    if scoring.options.dry_run:
        lines = plan_lines(scoring.choice, scoring.missing, scoring.outlook)
    elif outcome.stopped is not None:
        lines = [f"failed  {job}: {why}" for job, why in failure_lines(outcome.stopped)]
        if not outcome.stopped.unsolvable:
            lines.append("not all is measured; the same command goes on from here")
    else:
        lines = score_lines(console, scoring.source, outcome)
    for line in [*lines, *left_out_lines(outcome.left_out)]:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _print_measures(console: Console, *, as_json: bool) -> None:
    from gpuherd.columns import Column, fitted, window
    from gpuherd.qa.measures.registry import measures

    if as_json:
        values = [
            {
                "name": each.name,
                "aliases": list(each.aliases),
                "needs": sorted(each.needs),
                "summary": each.summary,
                "source": each.source,
            }
            for each in measures()
        ]
        print(json.dumps(values, indent=2))
        return
    columns = (
        Column("measure", 0),
        Column("needs", 1),
        Column("what it is", 2, least=20),
        Column("source", 3, least=20),
    )
    rows = [(each.name, ", ".join(sorted(each.needs)), each.summary, each.source) for each in measures()]
    for line in fitted(columns, rows, window(console)).lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _write_csv(path: str, outcome: ScoreOutcome) -> None:
    from pathlib import Path

    from gpuherd.atomic import atomic_write
    from gpuherd.qa.scoring.files import csv_text

    if outcome.scores is None:
        return
    try:
        atomic_write(Path(path), csv_text(outcome.scores).encode("utf-8"))
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}") from None
