"""``gpuherd score`` computes uncertainty measures of answers; ``evaluate`` how well they detect wrong answers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.cli.common import add_json, add_run_name
from gpuherd.cli.job_start import load_for
from gpuherd.cli.output import console_for, print_json, print_note, print_table, print_verbatim, write_file
from gpuherd.columns import Column, fitted, window
from gpuherd.errors import ExitCode, MissingExtra, UsageError, naming_extras
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
Computes uncertainty measures for the answers of a run: one column per measure, one row per question; higher is more
uncertain. What measures need beyond the answers (relevance, similarity, entailment, P(True), hidden states) is computed
once, by jobs on free GPUs, and stored with the run. The answers never change: score a run as often as you like.

examples:
  gpuherd score RUN_ID                                   all measures that need only the answers
  gpuherd score RUN_ID --measures log-probs --eos exclude
  gpuherd score RUN_ID --measures nll token-sar sar --relevance-model cross-encoder/stsb-roberta-large
  gpuherd score RUN_ID --equivalence nli --equivalence-model microsoft/deberta-large-mnli
  gpuherd score RUN_ID --measures p-true p-ik --judge exact --dry-run
  gpuherd score --list                                   every measure, what it needs, and its source

Next: gpuherd evaluate RUN_ID --judge J.
Exit codes: 0 done, 1 a job failed (with --dry-run: can never run), 2 wrong usage, 65 and 66 bad or missing run or
model, 130 stopped.
"""


def add_score(parser: Parser) -> None:
    add_run_name(parser, "run_id", metavar="RUN_ID", help_text="the run: its name in --runs-dir, or its path")
    add_options(parser, ScoreOptions)
    parser.add_argument("--list", action="store_true", help="list all measures and exit")
    parser.add_argument("--csv", metavar="FILE", help="also write the table to this file")
    add_json(parser, "the plan or the outcome")


def run_score(args: argparse.Namespace) -> int:
    """Scores and prints. Returns the exit code."""
    console = console_for(args)
    if args.list:
        _list_measures(console, as_json=args.json)
        return ExitCode.OK
    if args.run_id is None:
        raise UsageError("which run? gpuherd score RUN_ID; gpuherd runs lists them")
    load_for(args, ScoreOptions)
    options = build(ScoreOptions, args)

    from gpuherd.qa.scoring.experiment import Scoring

    scoring = Scoring(args.run_id, options, console=console, simulate=args.simulate is not None)
    outcome = scoring.run()
    if args.csv is not None and outcome.scores is not None:
        from gpuherd.qa.scoring.files import csv_text

        write_file(Path(args.csv), csv_text(outcome.scores).encode("utf-8"), "--csv")
    if args.json:
        print_json(scoring.to_dict(outcome))
    else:
        _print_scores(console, scoring, outcome)
    return outcome.exit_code


def _print_scores(console: Console, scoring: Scoring, outcome: ScoreOutcome) -> None:
    from gpuherd.qa.scoring.telling import left_out_lines, plan_lines, score_lines
    from gpuherd.qa.working.running import failure_lines

    if scoring.options.dry_run:
        lines = plan_lines(scoring.choice, scoring.missing, scoring.outlook)
    elif outcome.stopped is not None:
        lines = [f"failed  {job}: {why}" for job, why in failure_lines(outcome.stopped)]
        if not outcome.stopped.unsolvable:
            lines.append("not all measurements are done; the same command continues from here")
    else:
        lines = score_lines(console, scoring.source, outcome)
    print_verbatim(console, [*lines, *left_out_lines(outcome.left_out)])


def _list_measures(console: Console, *, as_json: bool) -> None:
    from gpuherd.qa.measures.registry import measures

    if as_json:
        print_json(
            [
                {
                    "name": each.name,
                    "aliases": list(each.aliases),
                    "needs": sorted(each.needs),
                    "summary": each.summary,
                    "source": each.source,
                }
                for each in measures()
            ]
        )
        return
    columns = (
        Column("measure", 0),
        Column("needs", 1),
        Column("what it is", 2, least=20),
        Column("source", 3, least=20),
    )
    rows = [(each.name, ", ".join(sorted(each.needs)), each.summary, each.source) for each in measures()]
    print_verbatim(console, fitted(columns, rows, window(console)).lines)


EVALUATE = """\
Compares the scores of a run (gpuherd score) with the labels of its judgings (gpuherd judge): AUROC, AUPRC, PRR, AURAC,
accuracy at coverage and calibration of every measure, each with its confidence interval, and the difference of every
measure from a baseline. Nothing is generated, judged or scored again. The results are written to evaluations/ in the
run's folder, with an HTML page.

examples:
  gpuherd evaluate my-run
  gpuherd evaluate my-run --judge exact llm_llama-3.1-70b
  gpuherd evaluate my-run --judge exact --measures nll ln-nll token-sar --against ln-nll --csv table.csv
  gpuherd evaluate my-run --judge exact --json

Exit codes: 0 evaluated, 1 no judging has both right and wrong answers, 2 wrong usage, or no such judging,
scoring or measure, 65 a file of the run is damaged, 66 no such run.
"""


def add_evaluate(parser: Parser) -> None:
    help_text = "the run: its name in --runs-dir, or its path"
    add_run_name(parser, "run_id", metavar="RUN_ID", help_text=help_text, required=True)
    add_options(parser, EvaluateOptions)
    add_json(parser, "the evaluation")


def run_evaluate(args: argparse.Namespace) -> int:
    """Evaluates and writes the files. Returns 0, or 1 if no judging has both right and wrong answers."""
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

        print_json(values_of(evaluation.result))
    else:
        _print(evaluation.result)
        for each in (path, table, page, plot):
            if each is not None:
                print(each)
    return ExitCode.OK if any(judge.both_classes for judge in evaluation.result.judges) else ExitCode.FAILED


def _page(evaluation: Evaluated, options: EvaluateOptions) -> Path | None:
    """Writes the page; None with ``--no-page``, or if its libraries are missing and ``--page`` does not require it."""
    if options.no_page:
        return None
    path = evaluation.folder.evaluation(evaluation.result.name, ".html")
    from gpuherd.qa.look.page import write_page

    try:
        write_page(evaluation.run, evaluation.result, path)
    except MissingExtra as missing:
        if options.page:
            raise
        print_note(f"no page: {missing}")
        return None
    return path


def _plot(evaluation: Evaluated, options: EvaluateOptions) -> Path | None:
    """Draws the figure of ``--plot``. Raises MissingExtra, CannotWrite, and UsageError if there is nothing to draw."""
    if options.plot is None:
        return None
    from gpuherd.qa.look.plot import evaluation_figure

    data = picture_bytes(evaluation_figure(evaluation.result), check_format(options.plot.name))
    write_file(options.plot.absolute(), data, "--plot")
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
    by_judging = telling.by_judging(evaluation.judges)
    if by_judging is not None:
        print()
        print_table(*by_judging)


def _print_measures(judge: ByJudge, against: str) -> None:
    from gpuherd.qa.evaluation import telling

    others = [each for each in judge.measures if each.weighting is None]
    for first, measures in (("measure", others), ("weighting of NLL", judge.weightings)):
        if measures:
            print()
            print_table(telling.columns(against, first=first), telling.rows(judge, measures))
    print()
    for line in (telling.accuracy(judge, against), telling.by_prefix(judge)):
        if line is not None:
            print(line)
