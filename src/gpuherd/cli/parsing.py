"""How a command module makes its parser. The flags themselves come from dataclasses through ``gpuherd.options``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from gpuherd.cli.commands import SUMMARIES
from gpuherd.errors import UsageError
from gpuherd.options import Parser

# What says how jobs wait in SLURM's queue and how long they may run: SLURM has settled it for its job that we are in.
_OF_THE_QUEUE = frozenset({"partition", "account", "qos", "array_limit", "at_most", "time_limit", "notice"})

if TYPE_CHECKING:
    from gpuherd.jobs.settings import Settings


def add_command(subparsers: argparse._SubParsersAction[Parser], name: str, description: str) -> Parser:
    """The parser of a command of ``SUMMARIES``, with ``description`` and its examples in its --help."""
    parser = subparsers.add_parser(name.rpartition(" ")[2], help=SUMMARIES[name], description=description)
    parser.set_defaults(parser=parser)
    # Also accepted after the command, where people put it; it must not reset a value given before the command.
    parser.add_argument("--simulate", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def command_words(args: argparse.Namespace) -> list[str]:
    """The command behind ``--``, from a REMAINDER argument named ``words``. Raises UsageError when there is none."""
    words: list[str] = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise UsageError("no command; write it behind --, like: -- python train.py")
    return words


def keep_simulation_here(args: argparse.Namespace) -> None:
    """With ``--simulate`` jobs run here, whatever the settings say. Raises UsageError where a cluster was named."""
    if args.simulate is None:
        return
    if getattr(args, "engine", None) not in (None, "local"):
        raise UsageError(
            f"--simulate pretends GPUs of this machine, and --engine {args.engine} would hand the jobs to a cluster, "
            "which knows nothing of them; leave one of both out"
        )
    args.engine = "local"


def stay_in_allocation(args: argparse.Namespace, settings: Settings) -> None:
    """With ``--in-allocation`` the engine is this machine's, and what says how jobs wait in SLURM's queue is left out.
    On another machine than the SLURM job's node this process becomes a step of that job with the same command.

    Raises UsageError where that can't be, or an option is given that nothing would follow here, and what asking SLURM
    raises.
    """
    from gpuherd.engines.options import LOCAL, EngineOptions, foreign, said_in

    engine = getattr(args, "engine", settings.engine)
    if not getattr(args, "in_allocation", settings.defaults.get("in_allocation")) or engine != "slurm":
        return
    if hasattr(args, "node_gpus"):
        raise UsageError("--node-gpus: with --in-allocation models are planned for the GPUs of this node; leave it out")
    from gpuherd.engines.base import Placement
    from gpuherd.engines.slurm.foreground import is_on, only_node, place_for

    there = only_node(os.environ)
    if not isinstance(there, str) and not is_on(there.nodes[0], os.environ):
        from gpuherd.batch.run_remote import become_step

        become_step(there, [sys.executable, "-m", "gpuherd", *sys.argv[1:]])
    said = {name: value for name, value in said_in(args).items() if name not in _OF_THE_QUEUE}
    asked = EngineOptions(**said | {"engine": engine})
    least = Placement(gpus=1 if asked.gpu_type else 0, cpus=asked.cpus_per_job, memory_mb=asked.host_mem)
    found = place_for([least], asked, os.environ)
    if isinstance(found, str):
        raise UsageError(f"--in-allocation: {found}; leave --in-allocation out to submit jobs of their own")
    most = [
        getattr(args, "array_limit", None),
        getattr(args, "max_concurrent", settings.defaults.get("max_concurrent")),
    ]
    at_once = [each for each in (*most, found.at_once([least])) if each is not None]
    if at_once:
        args.max_concurrent = min(at_once)
    for name in foreign(LOCAL) & vars(args).keys():
        delattr(args, name)
    args.engine = LOCAL
    # Where SLURM has given this shell no GPU, those that the machine has are others'.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    sys.stderr.write(f"gpuherd: the jobs run in SLURM job {found.job}, on {found.nodes[0].name}\n")


def load_for(args: argparse.Namespace, config_type: type, *, stays: bool = True) -> Settings:
    """The user's and the machine's settings; what they say of this dataclass's options goes into ``args`` where the
    command line has said nothing.

    Args:
        stays: with ``--in-allocation`` the command starts jobs on this machine (``stay_in_allocation``).

    Raises UsageError for a file that is wrong, and for a --node-gpus that makes no sense; and as
    ``stay_in_allocation``.
    """
    from gpuherd.jobs.settings import load

    settings = load()
    keep_simulation_here(args)
    if stays:
        stay_in_allocation(args, settings)
    settings.fill(args, config_type)
    check_node_gpus(getattr(args, "node_gpus", None))
    return settings


def check_node_gpus(words: str | None) -> None:
    """Raises UsageError for words of ``--node-gpus`` that make no sense, whether a model will be planned or not."""
    if words is not None:
        from gpuherd.models.plan.cluster import said_cards

        said_cards(words)
