"""``gpuherd esd``: ESD analysis of a list of models, or of one, on free GPUs."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from gpuherd.cli.parsing import add_command, load_for
from gpuherd.esd.config import ExperimentConfig
from gpuherd.flags import Parser, add_options, build

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
  gpuherd --simulate 4x40GB esd --model-list models.csv   try it without GPUs

The list is a CSV file with the columns model_id (or full_name), source_model and base_model_relation.
Exit codes: 0 all done, 1 some failed or were refused, 2 wrong usage, 130 stopped by Ctrl-C.
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "esd", "analyse the weight spectra of a list of models", DESCRIPTION)
    add_options(parser, ExperimentConfig)
    parser.add_argument("--json", action="store_true", help="print the plan or the outcome as JSON on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the experiment. Returns its exit code."""
    experiment = _experiment(args)
    outcome = experiment.run()
    if args.json:
        print(json.dumps(experiment.to_dict(), indent=2, allow_nan=False))
    return outcome.exit_code


def _experiment(args: argparse.Namespace) -> ESDExperiment:
    load_for(args, ExperimentConfig)
    config = build(ExperimentConfig, args)

    from rich.console import Console

    from gpuherd.esd import ESDExperiment

    # With --json standard output belongs to the JSON alone.
    return ESDExperiment(config, console=Console(stderr=args.json))
