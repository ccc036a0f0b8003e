"""``gpuherd score`` and ``evaluate``: uncertainty measures of answers, and which of them tell wrong from right."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.cli.common import add_command, add_run, print_table
from gpuherd.cli.job_start import load_for
from gpuherd.errors import CannotWrite, ExitCode, MissingExtra, UsageError, naming_extras, printable
from gpuherd.options import Parser, add_options, build
from gpuherd.qa.evaluation.config import EvaluateOptions
from gpuherd.qa.scoring.options import ScoreOptions
from gpuherd.report.pictures import check_format, picture_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from gpuherd.qa.evaluation.experiment import Evaluated
    from gpuherd.qa.evaluation.result import ByJudge, Evaluation
    from gpuherd.qa.scoring.experiment import ScoreOutcome, Scoring

SCORE = """\
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


def add_score(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "score", SCORE)
    add_run(parser, "run_id", metavar="RUN_ID", help_text="the run: its name in --runs-dir, or its path")
    add_options(parser, ScoreOptions)
    parser.add_argument("--list", action="store_true", help="list all measures and do nothing else")
    parser.add_argument("--csv", metavar="FILE", help="write the table into this file too")
    parser.add_argument("--json", action="store_true", help="print the plan or the outcome as JSON on standard output")
    parser.set_defaults(run=run_score)


def run_score(args: argparse.Namespace) -> int:
    """Scores and prints. Returns the exit code."""
    from rich.console import Console

    # With --json standard output belongs to the JSON alone.
    console = Console(stderr=args.json)
    if args.list:
        _list_measures(console, as_json=args.json)
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


def _list_measures(console: Console, *, as_json: bool) -> None:
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


EVALUATE = """\
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


def add_evaluate(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "evaluate", EVALUATE)
    add_run(
        parser, "run_id", metavar="RUN_ID", help_text="the run, by its name in --runs-dir, or a path", required=True
    )
    add_options(parser, EvaluateOptions)
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.set_defaults(run=run_evaluate)


def run_evaluate(args: argparse.Namespace) -> int:
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
