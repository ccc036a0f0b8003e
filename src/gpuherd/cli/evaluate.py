"""``gpuherd evaluate``: which measure of uncertainty tells wrong answers from right ones, and how surely."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.cli.parsing import add_command
from gpuherd.cli.run_folder import add_run
from gpuherd.cli.tables import print_table
from gpuherd.errors import CannotWrite, ExitCode, MissingExtra, naming_extras
from gpuherd.options import Parser, add_options, build
from gpuherd.qa.evaluation.config import EvaluateOptions
from gpuherd.report.pictures import check_format, picture_bytes

if TYPE_CHECKING:
    from gpuherd.qa.evaluation.experiment import Evaluated
    from gpuherd.qa.evaluation.result import ByJudge, Evaluation

DESCRIPTION = """\
Holds the scores of a run (gpuherd score) against the labels of its judgings (gpuherd judge): AUROC, AUPRC, PRR, AURAC,
accuracy at coverage and calibration of every measure, each with its interval, and every measure against one of them.
Nothing is generated, judged or scored anew. Everything is written to the run's evaluations/, with a page that shows it.

examples:
  gpuherd evaluate my-run
  gpuherd evaluate my-run --judge exact llm_llama-3.1-70b
  gpuherd evaluate my-run --judge exact --measures nll ln-nll token-sar --against ln-nll --csv table.csv
  gpuherd evaluate my-run --judge exact --json

Exit codes: 0 evaluated, 1 no judging has both right and wrong answers, 2 wrong usage: no such judging, scoring or
measure too; 65 a file of the run is damaged; 66 no such run.
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "evaluate", DESCRIPTION)
    add_run(
        parser, "run_id", metavar="RUN_ID", help_text="the run, by its name in --runs-dir, or a path", required=True
    )
    add_options(parser, EvaluateOptions)
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluates and writes the files. Returns 0, or 1 where no judging has both classes."""
    options = build(EvaluateOptions, args)
    if options.plot is not None:
        check_format(options.plot.name)
    with naming_extras({"numpy": "qa", "scipy": "qa"}, "the figures of an evaluation take"):
        from gpuherd.qa.evaluation.experiment import evaluated
        from gpuherd.qa.evaluation.files import write_csv, write_evaluation

        evaluation = evaluated(args.run_id, options)
    path, table = write_evaluation(evaluation.folder, evaluation.result)
    if options.csv is not None:
        write_csv(options.csv, evaluation.result)
    page = _page(evaluation, options)
    plot = _plot(evaluation, options)
    if args.json:
        from gpuherd.qa.evaluation.result_json import values_of

        print(json.dumps(values_of(evaluation.result), indent=2, allow_nan=False))
    else:
        _print(evaluation.result)
        for each in (path, table, page, plot):
            if each is not None:
                print(each)
    return ExitCode.OK if any(judge.both_classes for judge in evaluation.result.judges) else ExitCode.FAILED


def _page(evaluation: Evaluated, options: EvaluateOptions) -> Path | None:
    """Writes the page; None where none is wanted, or what it takes is not installed and it was not insisted on."""
    if options.no_page:
        return None
    path = evaluation.folder.evaluation(evaluation.result.name, ".html")
    from gpuherd.qa.look.page import write_page

    try:
        write_page(evaluation.run, evaluation.result, path)
    except MissingExtra as missing:
        if options.page:
            raise
        print(f"no page: {missing}", file=sys.stderr)
        return None
    return path


def _plot(evaluation: Evaluated, options: EvaluateOptions) -> Path | None:
    """Draws the picture that was asked for. Raises MissingExtra, CannotWrite, and UsageError for nothing to draw."""
    if options.plot is None:
        return None
    from gpuherd.atomic import atomic_write
    from gpuherd.qa.look.plot import evaluation_figure

    data = picture_bytes(evaluation_figure(evaluation.result), check_format(options.plot.name))
    try:
        atomic_write(options.plot.absolute(), data)
    except OSError as problem:
        raise CannotWrite(f"can't write {options.plot}: {problem.strerror}; name another file with --plot") from None
    return options.plot


def _print(evaluation: Evaluation) -> None:
    from gpuherd.qa.evaluation import telling

    for line in telling.heading(evaluation):
        print(line)
    for judge in evaluation.judges:
        print()
        for line in telling.labels(judge, evaluation.settings):
            print(line)
        if judge.both_classes:
            _print_measures(judge, evaluation.settings.against)
        for line in telling.notes(judge, evaluation.settings.against):
            print(line)
    beside = telling.by_judging(evaluation.judges)
    if beside is not None:
        print()
        print_table(*beside)


def _print_measures(judge: ByJudge, against: str) -> None:
    from gpuherd.qa.evaluation import telling

    weightings = judge.weightings
    others = [each for each in judge.measures if each.weighting is None]
    for first, measures in (("measure", others), ("weighting of NLL", weightings)):
        if measures:
            print()
            print_table(telling.columns(against, first=first), telling.rows(judge, measures))
    print()
    for line in (telling.accuracy(judge, against), telling.by_prefix(judge)):
        if line is not None:
            print(line)
