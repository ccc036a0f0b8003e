"""``gpuherd generate``, ``judge`` and ``runs``: answers of a model, which are right, and the runs in a folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_command
from gpuherd.cli.job_start import load_for
from gpuherd.columns import window
from gpuherd.errors import BadModel, ExitCode, MissingModel, UsageError, printable
from gpuherd.options import Parser, add_options, build, option_fields
from gpuherd.qa.generation.config import GenerateConfig
from gpuherd.qa.judging.config import JudgeConfig
from gpuherd.qa.working.options import DEFAULT_RUNS_DIR, RunsOptions

if TYPE_CHECKING:
    from rich.console import Console

    from gpuherd.qa.judging.auditing import Audited
    from gpuherd.qa.judging.made import Made
    from gpuherd.qa.runs import Run, RunLine

GENERATE = """\
Asks a model the questions of a data set, in batches, one job a shard on GPUs that are free, and keeps each answer's
tokens with their log-probs under the model itself. A run is a folder that never changes once it is complete: it is
judged, scored and evaluated as often as you like. The same command again goes on where it stopped.

examples:
  gpuherd generate --model meta-llama/Llama-3.2-1B --dataset trivia_qa --limit 400 --few-shot 5
  gpuherd generate --model ./small --dataset questions.jsonl --greedy --samples 10 --temperature 1.0
  gpuherd generate --model llama-3.1-70b-4bit --dataset squad_v2 --limit 200 --prompt sentence --max-gpus 4
  gpuherd generate --model ./small --dataset questions.csv --dry-run      what would run, and which rows are refused
  gpuherd generate --model ./small --dataset gsm8k --guide ./classifier --eta 0.1 --samples 8      guided answers
  gpuherd generate --resume small-questions-1f0a92c3      go on with a run that was stopped
  gpuherd --simulate 4x40GB generate --model ./small --dataset gsm8k      try it without GPUs

Then: gpuherd judge RUN_ID exact, gpuherd score RUN_ID, gpuherd evaluate RUN_ID --judge exact.
Exit codes: 0 all answered, 1 some jobs failed (in a dry run: can never run), 2 wrong usage, 65 and 66 bad or missing
data or model, 130 stopped.
"""


def add_generate(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "generate", GENERATE)
    add_options(parser, GenerateConfig)
    parser.add_argument(
        "--resume",
        metavar="RUN_ID",
        help="go on with a run that was stopped, with its own options; those that change no answer can be other ones",
    )
    parser.add_argument("--json", action="store_true", help="print the plan or the outcome as JSON on standard output")
    parser.set_defaults(run=run_generate)


def _config(args: argparse.Namespace) -> GenerateConfig:
    if args.resume is None:
        load_for(args, GenerateConfig)
        return build(GenerateConfig, args)
    from gpuherd.qa.folder import QADirectory
    from gpuherd.qa.generation.kept import begun_record
    from gpuherd.qa.generation.resuming import resumed
    from gpuherd.qa.runs import folder_of

    given = {field.name: getattr(args, field.name) for field, _ in option_fields(GenerateConfig) if field.name in args}
    if given.pop("run_id", args.resume) != args.resume:
        raise UsageError("--resume and --run-id name two runs; name one")
    path = folder_of(args.resume, given.pop("runs_dir", DEFAULT_RUNS_DIR))
    values = resumed(begun_record(QADirectory(path)), given, run_id=path.name, runs_dir=str(path.parent))
    for name, value in values.items():
        setattr(args, name, value)
    load_for(args, GenerateConfig)
    return build(GenerateConfig, args)


def run_generate(args: argparse.Namespace) -> int:
    """Runs it. Returns its exit code."""
    config = _config(args)

    from rich.console import Console

    from gpuherd.qa.generation.experiment import GenerateExperiment, as_json

    # With --json standard output belongs to the JSON alone.
    experiment = GenerateExperiment(config, console=Console(stderr=args.json), simulate=args.simulate is not None)
    outcome = experiment.run()
    if args.json:
        print(as_json(experiment))
    return outcome.exit_code


JUDGE = """\
Says of each answer of a run whether it is correct, incorrect, or not attempted; what a judge did not say clearly is
kept apart as unparsed. Writes one new file a judging, judgments/<judging>.jsonl in the run's folder, and changes
nothing that is there: a run can be judged as often as you like. Then the labels are audited: the share of correct
ones, agreement with lexical rules and with other judges beyond chance, disagreements, and what makes them doubtful.

Judges:
  exact, contains, squad (F1), rouge (ROUGE-L), math      rules; at once, without a GPU
  llm_llama-3.1-70b, llm_llama-3.1-8b-4bit, ...           a model by the guide's name for it (the Instruct model)
  Qwen/Qwen2.5-7B-Instruct, ./my-judge                    a model by its id or path, -8bit or -4bit behind it
  https://host/v1                                         a server that speaks the OpenAI API, with --judge-model

examples:
  gpuherd judge a-run squad
  gpuherd judge a-run llm_llama-3.1-70b --max-gpus 4
  gpuherd judge a-run Qwen/Qwen2.5-7B-Instruct --three-way --answers all
  gpuherd judge a-run Qwen/Qwen3-8B --mode text --reply-tokens 2000
  gpuherd judge a-run http://localhost:8000/v1 --judge-model my-model
  gpuherd judge a-run llm_llama-3.1-70b --dry-run         what would run, and on how many GPUs
  gpuherd judge a-run --audit                             the audit of all judgings again, from files alone

Exit codes: 0 judged, 1 a job failed (in a dry run: can never run) or a server gave up, 2 wrong usage, 66 no such run or
model, 130 stopped by Ctrl-C; the same command goes on where it stopped.
"""


def add_judge(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "judge", JUDGE)
    parser.add_argument("words", nargs="*", metavar="RUN_ID JUDGE", help="the run, and who judges it, see above")
    parser.add_argument("--run", dest="run_id", metavar="RUN_ID", help="the run: its name in --runs-dir, or its folder")
    add_options(parser, RunsOptions)
    add_options(parser, JudgeConfig)
    parser.add_argument(
        "--audit",
        nargs="*",
        metavar="JUDGING",
        help="only audit what was judged before: these judgings, all by default",
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON on standard output")
    parser.set_defaults(run=run_judge)


def _take_words(args: argparse.Namespace) -> None:
    """``args.run_id`` and ``args.judge``, by the order of the words where the run is not given by --run."""
    words = list(args.words)
    if args.run_id is None and words:
        args.run_id = words.pop(0)
    args.judge = words.pop(0) if words else None
    if args.run_id is None or words:
        raise UsageError(f"give one run and one judge, not also {words[0]}" if words else "name a run: its RUN_ID")


def run_judge(args: argparse.Namespace) -> int:
    """Judges or audits. Returns the exit code."""
    _take_words(args)
    if (args.judge is None) == (args.audit is None):
        raise UsageError("give a judge (gpuherd judge RUN_ID squad), or --audit; one of them")
    given = {field.name: getattr(args, field.name) for field, _ in option_fields(JudgeConfig) if field.name in args}
    if args.audit is not None and given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise UsageError(f"{flag} means nothing to --audit; leave it out")
    load_for(args, JudgeConfig)
    config, runs = build(JudgeConfig, args), build(RunsOptions, args)

    from rich.console import Console

    from gpuherd.qa.runs import open_run

    opened = open_run(args.run_id, runs.runs_dir)
    # With --json standard output belongs to the JSON alone.
    console = Console(stderr=args.json)
    if args.audit is not None:
        return _audit(args, opened, console)
    return _judge(args, opened, config, given, console)


def _audit(args: argparse.Namespace, opened: Run, console: Console) -> int:
    from gpuherd.qa.judging.auditing import audits
    from gpuherd.qa.judging.files import judging_named, judgings_of
    from gpuherd.qa.judging.telling import audit_lines
    from gpuherd.qa.numbers import rule_for

    named = [judging_named(opened.folder, name) for name in args.audit]
    if not judgings_of(opened.folder):
        rule = rule_for(each.question for each in opened.answers())
        raise UsageError(f"{opened.run_id} was not judged yet; 'gpuherd judge {opened.run_id} {rule}' is the quickest")
    found = audits(opened, named or None, console)
    if args.json:
        print(json.dumps([_audit_values(each) for each in found], indent=2, allow_nan=False))
        return ExitCode.OK
    for each in found:
        _say(console, audit_lines(each, window(console)))
    return ExitCode.OK


def _judge(
    args: argparse.Namespace, opened: Run, config: JudgeConfig, given: Mapping[str, Any], console: Console
) -> int:
    from gpuherd.qa.judging.auditing import audits
    from gpuherd.qa.judging.judges import judge_named
    from gpuherd.qa.judging.judging import judge_run, plan_judging
    from gpuherd.qa.judging.telling import audit_lines, made_lines, plan_lines

    judge = judge_named(args.judge, config.judge_model)
    if judge.told is not None:
        _say(console, [judge.told])
    if config.dry_run:
        planned = plan_judging(judge, opened, config, given=given)
        if args.json:
            print(json.dumps({"judge": judge.said, "model": judge.model, **planned.to_dict()}, indent=2))
        else:
            _say(console, plan_lines(judge, planned))
        return planned.exit_code
    made = judge_run(judge, opened, config, console, given=given, simulate=args.simulate is not None)
    audited = None if made.meta is None else audits(opened, [made.meta], console)[0]
    if args.json:
        print(json.dumps(_made_values(made, audited), indent=2, allow_nan=False))
    else:
        _say(console, made_lines(opened, made))
        if audited is not None:
            _say(console, audit_lines(audited, window(console)))
    return made.exit_code


def _say(console: Console, lines: Sequence[str]) -> None:
    """Prints lines as they are; names in them may be those of files that strangers made."""
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _made_values(made: Made, audited: Audited | None) -> dict[str, Any]:
    from gpuherd.qa.judging.meta import meta_values

    return {
        "exit_code": int(made.exit_code),
        "already": made.already,
        "asked": made.asked,
        "judging": None if made.meta is None else meta_values(made.meta),
        "audit": None if audited is None else audited.audit.as_dict(),
        "unparsed": None if audited is None else _reasons(audited),
        "failures": [{"job": job, "reason": reason} for job, reason in made.failures],
    }


def _audit_values(audited: Audited) -> dict[str, Any]:
    from gpuherd.qa.judging.meta import meta_values

    return {
        "judging": meta_values(audited.meta),
        "audit": audited.audit.as_dict(),
        "unparsed": _reasons(audited),
    }


def _reasons(audited: Audited) -> list[dict[str, Any]]:
    return [{"count": count, "like": note} for count, note in audited.reasons]


RUNS = """\
Lists the runs of answers that gpuherd generate has made, the latest first: the model, the questions, how many are
answered, and which judgings and scores there are.

examples:
  gpuherd runs
  gpuherd runs --runs-dir /data/runs --json
"""


def add_runs(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "runs", RUNS)
    add_options(parser, RunsOptions)
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run_runs)


def run_runs(args: argparse.Namespace) -> int:
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
