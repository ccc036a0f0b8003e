"""How a command module makes its parser. The flags themselves come from dataclasses through ``gpuherd.flags``."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from gpuherd.cli.commands import SUMMARIES
from gpuherd.errors import UsageError
from gpuherd.flags import Parser

# What says how jobs wait in SLURM's queue and how long they may run: it is settled for jobs inside an allocation.
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


def add_in_allocation(parser: argparse.ArgumentParser) -> None:
    """``--in-allocation`` of a command that starts many jobs."""
    # run has another option of this name, which can also be a step on several nodes.
    parser.add_argument(
        "--in-allocation",
        dest="jobs_in_allocation",
        action="store_true",
        help="with --engine slurm, inside of a SLURM job of one node: run the jobs there, on the GPUs of that job, "
        "instead of submitting jobs of their own",
    )


def stay_in_allocation(args: argparse.Namespace, settings: Settings) -> None:
    """With ``--in-allocation`` the jobs run on this node. Without it a line tells that new ones will be submitted.

    Raises UsageError where that can't be, or an option is given that nothing would follow here, and what asking SLURM
    raises.
    """
    from gpuherd.engines.options import LOCAL, EngineOptions, foreign

    engine, inside = getattr(args, "engine", settings.engine), os.environ.get("SLURM_JOB_ID")
    if not args.jobs_in_allocation:
        if engine == "slurm" and inside is not None and args.simulate is None:
            sys.stderr.write(
                f"gpuherd: inside of SLURM job {inside}: new jobs are submitted, and wait in SLURM's queue; "
                "with --in-allocation they run in this one\n"
            )
        return
    if engine != "slurm":
        raise UsageError(f"--in-allocation is for --engine slurm, and this is {engine}")
    from gpuherd.engines.slurm.foreground import only_node

    try:
        found = only_node(os.environ)
    except UsageError as problem:
        raise UsageError(f"--in-allocation: {problem}") from None
    for each in fields(EngineOptions):
        if each.name not in foreign(LOCAL) or not hasattr(args, each.name):
            continue
        if each.name not in _OF_THE_QUEUE and getattr(args, each.name) != each.default:
            flag = each.name.replace("_", "-")
            raise UsageError(f"--{flag}: with --in-allocation jobs run on this node as it is; leave it out")
        delattr(args, each.name)
    args.engine = LOCAL
    # Where SLURM has given this shell no GPU, those that the machine has are others'.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    sys.stderr.write(f"gpuherd: the jobs run in SLURM job {found.job}, on {found.nodes[0].name}\n")


def load_for(args: argparse.Namespace, config_type: type) -> Settings:
    """The user's and the machine's settings; what they say of this dataclass's options goes into ``args`` where the
    command line has said nothing.

    Raises UsageError for a file that is wrong, and for a --node-gpus that makes no sense; and as
    ``stay_in_allocation``.
    """
    from gpuherd.jobs.settings import load

    settings = load()
    if hasattr(args, "jobs_in_allocation"):
        stay_in_allocation(args, settings)
    keep_simulation_here(args)
    settings.fill(args, config_type)
    check_node_gpus(getattr(args, "node_gpus", None))
    return settings


def check_node_gpus(words: str | None) -> None:
    """Raises UsageError for words of ``--node-gpus`` that make no sense, whether a model will be planned or not."""
    if words is not None:
        from gpuherd.models.plan.cluster import said_cards

        said_cards(words)
