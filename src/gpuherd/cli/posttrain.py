"""``gpuherd posttrain`` compares policies in rounds; ``gpuherd train`` trains one model on one GPU or many."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_json, console_for, print_json
from gpuherd.cli.job_start import engine_key, engine_overrides, fill_from_yaml, load_for
from gpuherd.errors import ExitCode, UsageError
from gpuherd.options import Parser, add_options, build
from gpuherd.posttrain.runs.options import RoundsOptions, TrainOptions

if TYPE_CHECKING:
    from rich.console import Console

POSTTRAIN = """\
Post-trains models in rounds. In each round every combination of algorithm, data set and pair of models collects data,
trains and is evaluated, as jobs on free GPUs. The same command again continues its unfinished run; jobs that are done
are not run twice.

examples:
  gpuherd posttrain experiment.name=first
  gpuherd posttrain experiment.name=sums 'algos=[GRPO,QSharp]' 'datasets=[arithmetic]' models=gpt2 rounds_of_training=1
  gpuherd posttrain experiment.name=mine --config mine.yaml algos.PITA.lr=1e-5 --max-gpus 8
  gpuherd posttrain experiment.name=first --dry-run       the jobs as a tree, with GPUs and memory
  gpuherd posttrain --resume outputs/first/2026-11-22_04-30-00
  gpuherd posttrain --test-setup                          test that GPUs are found, and that jobs get one each
  gpuherd --simulate 4x80GB posttrain experiment.name=try models=gpt2 --dry-run

KEY=VALUE is an override in Hydra's grammar: key=value, +key=value, ~key, group=choice (algos, datasets, models).
docs/posttrain.md describes every key. Next: gpuherd report DIR.
Exit codes: 0 all done, 1 some jobs failed (with --dry-run: can never run), 2 wrong usage, 65 and 66 bad or missing data
or model, 130 stopped.
"""


def add_posttrain(parser: Parser) -> None:
    parser.intermixed = True
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings that override the configuration's")
    add_options(parser, RoundsOptions)
    parser.add_argument(
        "--test-setup",
        action="store_true",
        help="find GPUs, collect a little data on two of them (simulated ones if there are none), and show which "
        "worker used which GPU",
    )
    add_json(parser, "the plan or the outcome")


def run_posttrain(args: argparse.Namespace) -> int:
    """Runs the experiment. Returns its exit code."""
    fill_from_yaml(args, RoundsOptions, _engine_of_rounds(args))
    load_for(args, RoundsOptions)
    options = build(RoundsOptions, args)
    console = console_for(args)
    if args.test_setup:
        return _test_setup(args, options, console)
    from gpuherd.posttrain.runs.experiment import as_json, experiment_of

    simulate = args.simulate is not None
    experiment = experiment_of(args.overrides, options, console=console, simulate=simulate, engine_is_said=True)
    outcome = experiment.run()
    if args.json:
        print(as_json(experiment))
    return outcome.exit_code


def _engine_of_rounds(args: argparse.Namespace) -> Any:
    """The key ``engine`` of the configuration; without one that of the run to continue, if there is one."""
    if getattr(args, "resume", None) and getattr(args, "config", None):
        return None  # they are refused together, later
    resumed = [word.partition("=")[2] for word in args.overrides if word.startswith("resume_from=")]
    folder = getattr(args, "resume", None) or (resumed[0] if resumed else None)
    overrides: Mapping[str, Any] = {}
    words = engine_overrides(args.overrides)
    if words:
        from gpuherd.posttrain.config.composing import said

        overrides = said(words)
    value = engine_key(getattr(args, "config", None), overrides)
    if value is not None or folder is None:
        return value
    from gpuherd.posttrain.runs.folder import BadRun, RoundsDirectory, read_record

    try:
        return read_record(RoundsDirectory(folder)).settings.engine
    except BadRun:
        return None  # other errors of the command line are reported first


def _test_setup(args: argparse.Namespace, options: RoundsOptions, console: Console) -> int:
    """Runs the guide's tests of a set-up. Without GPUs two are simulated, so that the jobs are tested nevertheless."""
    if args.overrides or options.resume or options.config or options.dry_run:
        raise UsageError("--test-setup has a small experiment of its own; leave out all options of another one")
    from gpuherd.gpus.query import machine
    from gpuherd.gpus.visible import visible_now
    from gpuherd.posttrain.runs.guide_names import check_setup

    gpus, simulate = visible_now(machine(processes=False).gpus), args.simulate is not None
    if not gpus and not simulate:
        from gpuherd.standin import activate

        activate("2x40GB")
        gpus, simulate = visible_now(machine(processes=False).gpus), True
    checks = check_setup(options, gpus, console, simulate=simulate)
    if args.json:
        print_json({"simulated": simulate, "checks": [asdict(each) for each in checks]})
    else:
        for each in checks:
            print(f"{'ok    ' if each.passed else 'FAILED'}  {each.what}: {each.seen}")
    return ExitCode.OK if all(each.passed for each in checks) else ExitCode.FAILED


TRAIN = """\
Trains a model as a YAML file describes: PPO, GRPO, RLOO, RLCR, REINFORCE or distillation on an environment, DPO on
preferences, SFT on answers. Waits for free GPUs, takes them and gives them back, like any job; on more than one,
torchrun's processes share the work by DDP or FSDP. A training that was killed continues exactly with --resume. On a
cluster it is one job, over several machines with the options for that.

examples:
  gpuherd train --config config.yaml
  gpuherd train --config config.yaml --num-gpus 2 training.batch_size=64
  gpuherd train --config config.yaml --gpu-ids 0 2 3          GPUs by the driver's numbers
  gpuherd train --config config.yaml --device cpu --output outputs/try
  gpuherd train --config config.yaml --num-gpus 8 --dry-run   what would run, and whether it fits
  gpuherd train --resume --output outputs/try                 continue a stopped training
  gpuherd train --config config.yaml --num-gpus 8 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500

KEY=VALUE overrides a setting of the file. docs/train.md describes every key.
Exit codes: 0 trained, 1 it failed (with --dry-run: can never run), 2 wrong usage or a plan that can't fit, 65 and 66
bad or missing data or model, 71 out of memory, 75 no GPU in time or another training is active in the folder, 130 and
143 stopped after a checkpoint.
"""


def add_train(parser: Parser) -> None:
    parser.intermixed = True
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings that override the configuration's")
    add_options(parser, TrainOptions)
    add_json(parser, "the plan or the summary")


def run_train(args: argparse.Namespace) -> int:
    """Runs the training. Returns its exit code."""
    fill_from_yaml(args, TrainOptions, engine_key(_config_file(args), _engine_values(args.overrides)))
    settings = load_for(args, TrainOptions)
    options = build(TrainOptions, args)

    from gpuherd.posttrain.learning.run import TrainRun

    simulate = args.simulate is not None
    training = TrainRun(options, args.overrides, console=console_for(args), settings=settings, simulate=simulate)
    code = training.run()
    if args.json:
        plan = None if training.plan is None else training.plan.to_dict()
        print_json({"exit_code": int(code), "plan": plan, "summary": training.summary}, allow_nan=True)
    return code


def _config_file(args: argparse.Namespace) -> str | None:
    """The configuration to read: the one of the command line, or that of the training to continue."""
    if hasattr(args, "config") or not hasattr(args, "output"):
        return getattr(args, "config", None)
    from gpuherd.posttrain.runs.folder import TrainDirectory

    kept = TrainDirectory(args.output).config
    return str(kept) if kept.exists() else None


def _engine_values(overrides: Sequence[str]) -> Mapping[str, Any]:
    """The overrides of the key ``engine``, parsed as YAML, by key."""
    from gpuherd.posttrain.config.yaml_strict import parse_yaml

    pairs = [word.partition("=") for word in engine_overrides(overrides)]
    return {key: parse_yaml(f"value: {text}", f"{key}=...")["value"] for key, _, text in pairs}
