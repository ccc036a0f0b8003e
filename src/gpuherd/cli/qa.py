"""Answers: ``gpuherd generate``, ``judge``, ``score`` and ``evaluate`` a run of them; ``runs`` lists the runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import (
    add_json,
    add_run_name,
    console_for,
    print_json,
    print_note,
    print_table,
    print_verbatim,
    write_file,
)
from gpuherd.cli.job_start import load_for
from gpuherd.columns import Column, fitted, window
from gpuherd.errors import BadModel, ExitCode, MissingExtra, MissingModel, UsageError, naming_extras, printable
from gpuherd.options import Parser, add_options, build, option_fields
from gpuherd.qa.evaluation.config import EvaluateOptions
from gpuherd.qa.folder import DEFAULT_RUNS_DIR, RunsOptions
from gpuherd.qa.generate.config import GenerateConfig
from gpuherd.qa.grading.config import JudgeConfig
from gpuherd.qa.scoring.options import ScoreOptions
from gpuherd.report.charts import check_format, picture_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from gpuherd.qa.evaluation.result import ByJudge, RunEvaluation
    from gpuherd.qa.grading.audit import Audited
    from gpuherd.qa.runs import Run, RunLine
    from gpuherd.qa.scoring.score import ScoreOutcome, ScoringStage


GENERATE = """\
Generates a model's answers to the questions of a data set, in batches, one job per shard on free GPUs. Stores each
answer's tokens with their log-probs under the model. A run is a folder that does not change once it is complete; it can
be judged, scored and evaluated any number of times. The same command again continues where it stopped.

examples:
  gpuherd generate --model meta-llama/Llama-3.2-1B --dataset trivia_qa --limit 400 --few-shot 5
  gpuherd generate --model ./small --dataset questions.jsonl --greedy --samples 10 --temperature 1.0
  gpuherd generate --model llama-3.1-70b-4bit --dataset squad_v2 --limit 200 --prompt sentence --max-gpus 4
  gpuherd generate --model ./small --dataset questions.csv --dry-run      what would run, and which rows are refused
  gpuherd generate --model ./small --dataset gsm8k --guide ./classifier --eta 0.1 --samples 8      guided answers
  gpuherd generate --resume small-questions-1f0a92c3      continue a run that was stopped
  gpuherd --simulate 4x40GB generate --model ./small --dataset gsm8k      try it without GPUs

Next: gpuherd judge RUN_ID exact, gpuherd score RUN_ID, gpuherd evaluate RUN_ID --judge exact.
Exit codes: 0 all answered, 1 some jobs failed (with --dry-run: can never run), 2 wrong usage, 65 and 66 bad or missing
data or model, 130 stopped.
"""


def add_generate(parser: Parser) -> None:
    add_options(parser, GenerateConfig)
    parser.add_argument(
        "--resume",
        metavar="RUN_ID",
        help="continue a run that was stopped, with its own options; options that do not affect the answers may be "
        "changed",
    )
    add_json(parser, "the plan or the outcome")


def run_generate(args: argparse.Namespace) -> int:
    """Runs the experiment. Returns its exit code."""
    if args.resume is not None:
        _load_resumed(args)
    load_for(args, GenerateConfig)
    config = build(GenerateConfig, args)

    from gpuherd.qa.generate.experiment import GenerateExperiment, as_json

    experiment = GenerateExperiment(config, console=console_for(args), simulate=args.simulate is not None)
    outcome = experiment.run()
    if args.json:
        print(as_json(experiment))
    return outcome.exit_code


def _load_resumed(args: argparse.Namespace) -> None:
    """Puts the options of the run to continue into ``args``."""
    from gpuherd.qa.folder import QADirectory
    from gpuherd.qa.generate.prepared import begun_record, resumed
    from gpuherd.qa.runs import folder_of

    given = _given(GenerateConfig, args)
    if given.pop("run_id", args.resume) != args.resume:
        raise UsageError("--resume and --run-id name two runs; name one")
    path = folder_of(args.resume, given.pop("runs_dir", DEFAULT_RUNS_DIR))
    values = resumed(begun_record(QADirectory(path)), given, run_id=path.name, runs_dir=str(path.parent))
    for name, value in values.items():
        setattr(args, name, value)


def _given(config_type: type, args: argparse.Namespace) -> dict[str, Any]:
    """The options of the command line, by field name."""
    return {field.name: getattr(args, field.name) for field, _ in option_fields(config_type) if field.name in args}


JUDGE = """\
Labels each answer of a run as correct, incorrect or not attempted; an answer without a clear verdict of the judge is
unparsed. Writes one new file per judging, judgments/<judging>.jsonl in the run's folder, and changes nothing else, so
that a run can be judged any number of times. Then the labels are audited: the share of correct ones, the agreement with
lexical rules and with other judges beyond chance, disagreements, and what makes labels unreliable.

Judges:
  exact, contains, squad (F1), rouge (ROUGE-L), math      rules; at once, without a GPU
  llm_llama-3.1-70b, llm_llama-3.1-8b-4bit, ...           a model by its name in the guide (the Instruct model)
  Qwen/Qwen2.5-7B-Instruct, ./my-judge                    a model by its id or path; append -8bit or -4bit to quantize
  https://host/v1                                         a server with the OpenAI API, with --judge-model

examples:
  gpuherd judge a-run squad
  gpuherd judge a-run llm_llama-3.1-70b --max-gpus 4
  gpuherd judge a-run Qwen/Qwen2.5-7B-Instruct --three-way --answers all
  gpuherd judge a-run Qwen/Qwen3-8B --mode text --reply-tokens 2000
  gpuherd judge a-run http://localhost:8000/v1 --judge-model my-model
  gpuherd judge a-run llm_llama-3.1-70b --dry-run         what would run, and on how many GPUs
  gpuherd judge a-run --audit                             audit all judgings again, from files alone

Exit codes: 0 judged, 1 a job failed (with --dry-run: can never run) or a server gave up, 2 wrong usage, 66 no such run
or model, 130 stopped by Ctrl-C; the same command continues where it stopped.
"""


def add_judge(parser: Parser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN_ID JUDGE", help="the run, and its judge (see above)")
    parser.add_argument("--run", dest="run_id", metavar="RUN_ID", help="the run: its name in --runs-dir, or its path")
    add_options(parser, RunsOptions)
    add_options(parser, JudgeConfig)
    parser.add_argument(
        "--audit", nargs="*", metavar="JUDGING", help="only audit existing judgings: these, or all if none is named"
    )
    add_json(parser, "the outcome")


def _split_words(args: argparse.Namespace) -> None:
    """Sets ``args.run_id`` and ``args.judge`` by the order of the words; ``--run`` leaves all words to the judge."""
    words = list(args.words)
    if args.run_id is None and words:
        args.run_id = words.pop(0)
    args.judge = words.pop(0) if words else None
    if args.run_id is None or words:
        raise UsageError(f"give one run and one judge, not also {words[0]}" if words else "name a run: its RUN_ID")


def run_judge(args: argparse.Namespace) -> int:
    """Judges or audits. Returns the exit code."""
    _split_words(args)
    if (args.judge is None) == (args.audit is None):
        raise UsageError("give a judge (gpuherd judge RUN_ID squad), or --audit; one of them")
    given = _given(JudgeConfig, args)
    if args.audit is not None and given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise UsageError(f"{flag} has no effect with --audit; leave it out")
    load_for(args, JudgeConfig)
    config, runs = build(JudgeConfig, args), build(RunsOptions, args)

    from gpuherd.qa.runs import open_run

    opened = open_run(args.run_id, runs.runs_dir)
    console = console_for(args)
    if args.audit is not None:
        return _audit(args, opened, console)
    return _judge(args, opened, config, given, console)


def _audit(args: argparse.Namespace, opened: Run, console: Console) -> int:
    from gpuherd.qa.grading.audit import audit_lines, audits
    from gpuherd.qa.grading.files import judging_named, judgings_of
    from gpuherd.qa.numbers import rule_for

    named = [judging_named(opened.folder, name) for name in args.audit]
    if not judgings_of(opened.folder):
        rule = rule_for(each.question for each in opened.answers())
        raise UsageError(f"{opened.run_id} was not judged yet; 'gpuherd judge {opened.run_id} {rule}' is the quickest")
    found = audits(opened, named or None, console)
    if args.json:
        print_json([_audit_values(each) for each in found])
        return ExitCode.OK
    for each in found:
        print_verbatim(console, audit_lines(each, window(console)))
    return ExitCode.OK


def _judge(
    args: argparse.Namespace, opened: Run, config: JudgeConfig, given: Mapping[str, Any], console: Console
) -> int:
    from gpuherd.qa.grading.audit import audit_lines, audits
    from gpuherd.qa.grading.config import judge_named
    from gpuherd.qa.grading.judge import judge_run, outcome_lines, plan_judging, plan_lines

    judge = judge_named(args.judge, config.judge_model)
    if judge.notice is not None:
        print_verbatim(console, [judge.notice])
    if config.dry_run:
        planned = plan_judging(judge, opened, config, given=given)
        if args.json:
            print_json({"judge": judge.said, "model": judge.model, **planned.to_dict()})
        else:
            print_verbatim(console, plan_lines(judge, planned))
        return planned.exit_code
    made = judge_run(judge, opened, config, console, given=given, simulate=args.simulate is not None)
    audited = None if made.meta is None else audits(opened, [made.meta], console)[0]
    if args.json:
        print_json(
            {
                "exit_code": int(made.exit_code),
                "already": made.already,
                "asked": made.judged_cases,
                **_audit_values(audited),
                "failures": [{"job": job, "reason": reason} for job, reason in made.failures],
            }
        )
    else:
        print_verbatim(console, outcome_lines(opened, made))
        if audited is not None:
            print_verbatim(console, audit_lines(audited, window(console)))
    return made.exit_code


def _audit_values(audited: Audited | None) -> dict[str, Any]:
    """A judging and its audit for ``--json``; None for each without a judging."""
    from gpuherd.qa.grading.files import JUDGINGS

    if audited is None:
        return {"judging": None, "audit": None, "unparsed": None}
    return {
        "judging": JUDGINGS.values(audited.meta),
        "audit": audited.audit.as_dict(),
        "unparsed": [{"count": count, "like": note} for count, note in audited.reasons],
    }


RUNS = """\
Lists the runs of gpuherd generate, the latest first: the model, the data set, how many questions are answered, and
which judgings and scores exist.

examples:
  gpuherd runs
  gpuherd runs --runs-dir /data/runs --json
"""


def add_runs(parser: Parser) -> None:
    add_options(parser, RunsOptions)
    add_json(parser, "the list")


def run_runs(args: argparse.Namespace) -> int:
    """Prints the list. Raises MissingModel if there is no such folder."""
    from gpuherd.qa.runs import list_runs

    options = build(RunsOptions, args)
    lines = list_runs(options.runs_dir, _digest)
    if args.json:
        print_json([asdict(line) for line in lines])
    elif lines:
        _print_runs(lines)
    else:
        print(f"no run of answers in {options.runs_dir}; gpuherd generate makes one")
    return ExitCode.OK


def _digest(path: Path) -> str:
    """The SHA-256 of a run's file, cached while its size and times stay the same. Raises DamagedRun."""
    from gpuherd.models.load.identity import hashes_of
    from gpuherd.qa.runs import DamagedRun

    try:
        return hashes_of([path], f"reading {printable(str(path))}")[path]
    except (BadModel, MissingModel) as problem:
        raise DamagedRun(f"{problem}; generate the run again") from None


def _print_runs(lines: Sequence[RunLine]) -> None:
    from rich.console import Console
    from rich.text import Text

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
    table = fitted(columns, [_cells(line) for line in lines], window(console))
    table.show(console)
    for line in lines:
        if line.problem is not None:
            console.print(Text.assemble((f"{line.state}  ", "red"), line.problem), soft_wrap=True)
    table.show_left_out(console)


def _cells(line: RunLine) -> tuple[str, ...]:
    answered = "-" if line.answered is None else str(line.answered)
    if line.questions is not None and line.answered != line.questions:
        answered += f"/{line.questions}"
    judgings = ", ".join(map(printable, line.judgings)) or "-"
    scorings = str(len(line.scorings)) if line.scorings else "-"
    model, dataset = ("-" if each is None else printable(each) for each in (line.model, line.dataset))
    return printable(line.run_id), str(line.state), answered, judgings, scorings, model, dataset


# ---- gpuherd score and evaluate --------------------------------------------------------------------------------------

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

    from gpuherd.qa.scoring.score import ScoringStage

    scoring = ScoringStage(args.run_id, options, console=console, simulate=args.simulate is not None)
    outcome = scoring.run()
    if args.csv is not None and outcome.scores is not None:
        from gpuherd.qa.scoring.files import csv_text

        write_file(Path(args.csv), csv_text(outcome.scores).encode("utf-8"), "--csv")
    if args.json:
        print_json(scoring.to_dict(outcome))
    else:
        _print_scores(console, scoring, outcome)
    return outcome.exit_code


def _print_scores(console: Console, scoring: ScoringStage, outcome: ScoreOutcome) -> None:
    from gpuherd.qa.scoring.score import left_out_lines, score_lines

    if scoring.outlook is not None:
        lines = scoring.plan_lines()
    elif outcome.jobs is not None:
        lines = [f"failed  {job}: {why}" for job, why in outcome.failures]
        if not outcome.jobs.unsolvable:
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
        from rich.console import Console

        from gpuherd.qa.evaluation.result import values_of, write_csv
        from gpuherd.qa.evaluation.stage import EvaluationStage

        stage = EvaluationStage(args.run_id, options, Console(stderr=True))
        outcome = stage.run()
    if options.csv is not None:
        write_csv(options.csv, outcome.evaluation)
    page = _page(stage.source, outcome.evaluation, options)
    plot = _plot(outcome.evaluation, options)
    if args.json:
        print_json(values_of(outcome.evaluation))
    else:
        _print(outcome.evaluation)
        for each in (outcome.file, outcome.table, page, plot):
            if each is not None:
                print(each)
    return outcome.exit_code


def _page(run: Run, evaluation: RunEvaluation, options: EvaluateOptions) -> Path | None:
    """Writes the page; None with ``--no-page``, or if its libraries are missing and ``--page`` does not require it."""
    if options.no_page:
        return None
    path = run.folder.evaluation(evaluation.name, ".html")
    from gpuherd.qa.report.page import write_page

    try:
        write_page(run, evaluation, path)
    except MissingExtra as missing:
        if options.page:
            raise
        print_note(f"no page: {missing}")
        return None
    return path


def _plot(evaluation: RunEvaluation, options: EvaluateOptions) -> Path | None:
    """Draws the figure of ``--plot``. Raises MissingExtra, CannotWrite, and UsageError if there is nothing to draw."""
    if options.plot is None:
        return None
    from gpuherd.qa.report.plot import evaluation_figure

    data = picture_bytes(evaluation_figure(evaluation), check_format(options.plot.name))
    write_file(options.plot.absolute(), data, "--plot")
    return options.plot


def _print(evaluation: RunEvaluation) -> None:
    from gpuherd.qa.evaluation import report

    for line in report.heading(evaluation):
        print(line)
    for judge in evaluation.judges:
        print()
        for line in report.labels(judge, evaluation.settings):
            print(line)
        if judge.both_classes:
            _print_measures(judge, evaluation.settings.against)
        for line in report.notes(judge, evaluation.settings.against):
            print(line)
    by_judging = report.by_judging(evaluation.judges)
    if by_judging is not None:
        print()
        print_table(*by_judging)


def _print_measures(judge: ByJudge, against: str) -> None:
    from gpuherd.qa.evaluation import report

    others = [each for each in judge.measures if each.weighting is None]
    for first, measures in (("measure", others), ("weighting of NLL", judge.weightings)):
        if measures:
            print()
            print_table(report.columns(against, first=first), report.rows(judge, measures))
    print()
    for line in (report.accuracy(judge, against), report.by_prefix(judge)):
        if line is not None:
            print(line)
