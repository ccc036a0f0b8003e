"""``gpuherd generate``: a model's answers to the questions of a data set, with the log-prob of every token."""

from __future__ import annotations

import argparse

from gpuherd.cli.parsing import add_command, load_for
from gpuherd.errors import UsageError
from gpuherd.options import Parser, add_options, build, option_fields
from gpuherd.qa.generation.config import GenerateConfig
from gpuherd.qa.working.options import DEFAULT_RUNS_DIR

DESCRIPTION = """\
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


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "generate", DESCRIPTION)
    add_options(parser, GenerateConfig)
    parser.add_argument(
        "--resume",
        metavar="RUN_ID",
        help="go on with a run that was stopped, with its own options; those that change no answer can be other ones",
    )
    parser.add_argument("--json", action="store_true", help="print the plan or the outcome as JSON on standard output")
    parser.set_defaults(run=run)


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


def run(args: argparse.Namespace) -> int:
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
