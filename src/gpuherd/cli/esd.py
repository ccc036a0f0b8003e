"""``gpuherd esd``: ESD analysis of a list of models, or of one, on free GPUs."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.cli.parsing import add_command, load_for
from gpuherd.errors import UsageError
from gpuherd.esd.config import ExperimentConfig
from gpuherd.options import Parser, add_options, build

if TYPE_CHECKING:
    from gpuherd.esd import ESDExperiment

DESCRIPTION = """\
Computes the spectra of the weight matrices of models and fits power laws to their tails, one job a model, on GPUs
that are free. The same command again goes on where it stopped; what is done is not done twice.

examples:
  gpuherd esd --model-list models.csv --max-gpus 4 --output-dir results
  gpuherd esd --model-list models.csv --gpu-list 4 5 6 7 --gpu-mem-threshold 1000 --max-checks 15
  gpuherd esd --single-model openai-community/gpt2 --max-gpus 1
  gpuherd esd --model-list models.csv --dry-run           what would run, and which rows are refused
  gpuherd esd --resume results                            the list and the options of an earlier run again
  gpuherd --simulate 4x40GB esd --model-list models.csv   try it without GPUs

The list is a CSV file with the columns model_id (or full_name), source_model and base_model_relation.
Exit codes: 0 all done, 1 some failed or were refused (in a dry run: can never run), 2 wrong usage, 130 stopped by
Ctrl-C.
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "esd", DESCRIPTION)
    add_options(parser, ExperimentConfig)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="go on with the run in DIR (default: --output-dir) with its own list and options; options that change no "
        "figure can be other ones",
    )
    parser.add_argument("--json", action="store_true", help="print the plan or the outcome as JSON on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the experiment. Returns its exit code."""
    experiment = _experiment(args)
    outcome = experiment.run()
    if args.json:
        print(json.dumps(experiment.to_dict(), indent=2, allow_nan=False))
    return outcome.exit_code


def _take_over(args: argparse.Namespace) -> None:
    """Puts the options of the run that goes on into ``args``, and goes to the folder where it was started, to which
    the paths in its list are relative."""
    from gpuherd.esd.folder import ESDDirectory
    from gpuherd.esd.resuming import earlier_run, resumed
    from gpuherd.options import option_fields

    names = [field.name for field, _ in option_fields(ExperimentConfig)]
    given = {name: getattr(args, name) for name in names if name in args}
    named = given.pop("output_dir", None)
    if args.resume and named is not None and Path(args.resume).absolute() != Path(named).absolute():
        raise UsageError(f"--resume {args.resume} and --output-dir {named} are two folders; name one")
    earlier = earlier_run(ESDDirectory(args.resume or named or str(ExperimentConfig.output_dir)))
    for name in ("log_dir", "model_list"):
        if name in given:
            given[name] = str(Path(given[name]).absolute())
    for name, value in resumed(earlier, given).items():
        setattr(args, name, value)
    try:
        os.chdir(earlier.cwd)
    except OSError as problem:
        raise UsageError(
            f"the run in {earlier.root} was started in {earlier.cwd}, which can't be entered: {problem.strerror}; "
            "give its list and options again, with paths as seen from here"
        ) from None


def _experiment(args: argparse.Namespace) -> ESDExperiment:
    if args.resume is not None:
        _take_over(args)
    load_for(args, ExperimentConfig)
    config = build(ExperimentConfig, args)

    from rich.console import Console

    from gpuherd.esd import ESDExperiment

    # With --json standard output belongs to the JSON alone.
    return ESDExperiment(config, console=Console(stderr=args.json))
