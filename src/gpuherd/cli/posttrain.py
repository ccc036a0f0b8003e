"""``gpuherd posttrain`` compares policies in rounds; ``gpuherd train`` trains one model on one GPU or many."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_command
from gpuherd.cli.job_start import about_engines, fill_from_yaml, key_of, load_for
from gpuherd.errors import ExitCode, UsageError
from gpuherd.options import Parser, add_options, build
from gpuherd.posttrain.learning.options import TrainOptions
from gpuherd.posttrain.rounds.options import RoundsOptions

if TYPE_CHECKING:
    from rich.console import Console

POSTTRAIN = """\
Post-training in rounds: every algorithm on every data set with every pair of models collects data, trains and is
evaluated, round after round, as jobs on GPUs that are free. The same command again goes on with its unfinished run;
what is done is not done twice.

examples:
  gpuherd posttrain experiment.name=first
  gpuherd posttrain experiment.name=sums 'algos=[GRPO,QSharp]' 'datasets=[arithmetic]' models=gpt2 rounds_of_training=1
  gpuherd posttrain experiment.name=mine --config mine.yaml algos.PITA.lr=1e-5 --max-gpus 8
  gpuherd posttrain experiment.name=first --dry-run       the jobs as a tree, with GPUs and memory
  gpuherd posttrain --resume outputs/first/2026-11-22_04-30-00
  gpuherd posttrain --test-setup                          are GPUs found, and do jobs get one each?
  gpuherd --simulate 4x80GB posttrain experiment.name=try models=gpt2 --dry-run

A word is an override in Hydra's grammar: key=value, +key=value, ~key, group=choice (algos, datasets, models).
docs/posttrain.md tells of every key. Then: gpuherd report DIR.
Exit codes: 0 all done, 1 some jobs failed (in a dry run: can never run), 2 wrong usage, 65 and 66 bad or missing data
or model, 130 stopped.
"""


def add_posttrain(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "posttrain", POSTTRAIN)
    parser.intermixed = True
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to set in the configuration")
    add_options(parser, RoundsOptions)
    parser.add_argument(
        "--test-setup",
        action="store_true",
        help="look for GPUs, collect a little data on two of them (pretended ones, where there are none), say which "
        "worker had which",
    )
    parser.add_argument("--json", action="store_true", help="print the plan or the outcome as JSON on standard output")
    parser.set_defaults(run=run_posttrain)


def run_posttrain(args: argparse.Namespace) -> int:
    """Runs it. Returns its exit code."""
    fill_from_yaml(args, RoundsOptions, _engine_key(args))
    load_for(args, RoundsOptions)
    options = build(RoundsOptions, args)

    from rich.console import Console

    # With --json standard output belongs to the JSON alone.
    console = Console(stderr=args.json)
    if args.test_setup:
        return _test_setup(args, options, console)
    from gpuherd.posttrain.rounds.experiment import as_json
    from gpuherd.posttrain.rounds.parallel import experiment_of

    simulate = args.simulate is not None
    experiment = experiment_of(args.overrides, options, console=console, simulate=simulate, engine_is_said=True)
    outcome = experiment.run()
    if args.json:
        print(as_json(experiment))
    return outcome.exit_code


def _engine_key(args: argparse.Namespace) -> Any:
    """What the configuration says of the engine; that of a run that goes on, where there is one."""
    if getattr(args, "resume", None) and getattr(args, "config", None):
        return None  # they are refused together
    said = [word.partition("=")[2] for word in args.overrides if word.startswith("resume_from=")]
    place = getattr(args, "resume", None) or (said[0] if said else None)
    words = about_engines(args.overrides)
    told = key_of(getattr(args, "config", None), _by_key(words) if words else {})
    if told is not None or place is None:
        return told
    from gpuherd.posttrain.rounds.folder import RoundsDirectory
    from gpuherd.posttrain.rounds.record import BadRun, read_record

    try:
        return read_record(RoundsDirectory(place)).settings.engine
    except BadRun:
        return None  # what else is wrong with the command line is told first


def _by_key(words: Sequence[str]) -> Mapping[str, Any]:
    from gpuherd.posttrain.config.composing import said

    return said(words)


def _test_setup(args: argparse.Namespace, options: RoundsOptions, console: Console) -> int:
    """The guide's tests of a set-up. Where there are no GPUs two are pretended, so that the ways of work are tried."""
    if args.overrides or options.resume or options.config or options.dry_run:
        raise UsageError("--test-setup has a small experiment of its own; leave all that speaks of another out")
    from gpuherd.gpus.query import machine
    from gpuherd.gpus.visible import visible_now
    from gpuherd.posttrain.rounds.setup_check import check_setup

    gpus, simulate = visible_now(machine(processes=False).gpus), args.simulate is not None
    if not gpus and not simulate:
        from gpuherd.standin import activate

        activate("2x40GB")
        gpus, simulate = visible_now(machine(processes=False).gpus), True
    checks = check_setup(options, gpus, console, simulate=simulate)
    if args.json:
        import json
        from dataclasses import asdict

        print(json.dumps({"simulated": simulate, "checks": [asdict(each) for each in checks]}, indent=2))
    else:
        for each in checks:
            print(f"{'ok    ' if each.passed else 'FAILED'}  {each.what}: {each.seen}")
    return ExitCode.OK if all(each.passed for each in checks) else ExitCode.FAILED


TRAIN = """\
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
  gpuherd train --config config.yaml --num-gpus 8 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500

The words behind are settings over the file's, key=value. docs/train.md tells of every key.
Exit codes: 0 trained, 1 it failed (in a dry run: can never run), 2 wrong usage or a plan that can't fit, 65 and 66 bad
or missing data or model, 71 out of memory, 75 no GPU in time or another one at work there, 130 and 143 stopped behind a
checkpoint.
"""


def add_train(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "train", TRAIN)
    parser.intermixed = True
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings over the configuration's")
    add_options(parser, TrainOptions)
    parser.add_argument("--json", action="store_true", help="print the plan or the summary as JSON on standard output")
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Runs it. Returns its exit code."""
    fill_from_yaml(args, TrainOptions, key_of(_file(args), _typed_by_key(about_engines(args.overrides))))
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


def _typed_by_key(words: Sequence[str]) -> Mapping[str, Any]:
    from gpuherd.posttrain.config.yaml_strict import parse_yaml

    pairs = [word.partition("=") for word in words]
    return {key: parse_yaml(f"value: {text}", f"{key}=...")["value"] for key, _, text in pairs}
