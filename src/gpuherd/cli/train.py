"""``gpuherd train``: one model, one algorithm, one YAML file, on one GPU or many."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpuherd.cli.engine_key import about_engines, fill_from_yaml, key_of
from gpuherd.cli.parsing import add_command, load_for
from gpuherd.options import Parser, add_options, build
from gpuherd.posttrain.learning.options import TrainOptions

DESCRIPTION = """\
Trains a model as a YAML file says: PPO or GRPO on an environment, DPO on preferences, SFT on answers. GPUs are waited
for, taken and given back as those of any job; with more than one, torchrun's processes share the work by DDP or FSDP.
Whatever was killed goes on exactly with --resume. On a cluster it is one job, over several machines where you say so.

examples:
  gpuherd train --config config.yaml
  gpuherd train --config config.yaml --num-gpus 2 training.batch_size=64
  gpuherd train --config config.yaml --gpu-ids 0 2 3          the GPUs that the driver calls so
  gpuherd train --config config.yaml --device cpu --output outputs/try
  gpuherd train --config config.yaml --num-gpus 8 --dry-run   what would run, and will it fit
  gpuherd train --resume --output outputs/try                 go on with what was stopped
  gpuherd train --config config.yaml --num-gpus 8 --nnodes 2 --engine slurm --partition gpu --time-limit 4h
  gpuherd train --config config.yaml --num-gpus 8 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500

The words behind are settings over the file's, key=value. docs/train.md tells of every key.
Exit codes: 0 trained, 1 it failed (in a dry run: can never run), 2 wrong usage or a plan that can't fit, 65 and 66 bad
or missing data or model, 71 out of memory, 75 no GPU in time or another one at work there, 130 and 143 stopped behind a
checkpoint.
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "train", DESCRIPTION)
    parser.intermixed = True
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings over the configuration's")
    add_options(parser, TrainOptions)
    parser.add_argument("--json", action="store_true", help="print the plan or the summary as JSON on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs it. Returns its exit code."""
    fill_from_yaml(args, TrainOptions, key_of(_file(args), _by_key(about_engines(args.overrides))))
    settings = load_for(args, TrainOptions)
    options = build(TrainOptions, args)

    from rich.console import Console

    from gpuherd.posttrain.learning.running import TrainRun

    # With --json standard output belongs to the JSON alone.
    training = TrainRun(
        options,
        args.overrides,
        console=Console(stderr=args.json),
        settings=settings,
        simulate=args.simulate is not None,
    )
    code = training.run()
    if args.json:
        plan = None if training.plan is None else training.plan.to_dict()
        print(json.dumps({"exit_code": int(code), "plan": plan, "summary": training.summary}, indent=2))
    return code


def _file(args: argparse.Namespace) -> str | None:
    """The configuration that will be read: the one that is named, or that of the training that goes on."""
    if hasattr(args, "config") or not hasattr(args, "output"):
        return getattr(args, "config", None)
    from gpuherd.posttrain.learning.folder import TrainDirectory

    kept = TrainDirectory(args.output).config
    return str(kept) if kept.exists() else None


def _by_key(words: Sequence[str]) -> Mapping[str, Any]:
    from gpuherd.posttrain.config.yaml_strict import parse_yaml

    pairs = [word.partition("=") for word in words]
    return {key: parse_yaml(f"value: {text}", f"{key}=...")["value"] for key, _, text in pairs}
