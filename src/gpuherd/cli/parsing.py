"""How a command module makes its parser. The flags themselves come from dataclasses through ``gpuherd.flags``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gpuherd.cli.commands import SUMMARIES
from gpuherd.errors import UsageError
from gpuherd.flags import Parser

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


def load_for(args: argparse.Namespace, config_type: type) -> Settings:
    """The user's and the machine's settings; what they say of this dataclass's options goes into ``args`` where the
    command line has said nothing.

    Raises UsageError for a file that is wrong, and for a --node-gpus that makes no sense.
    """
    from gpuherd.jobs.settings import load

    settings = load()
    keep_simulation_here(args)
    settings.fill(args, config_type)
    check_node_gpus(getattr(args, "node_gpus", None))
    return settings


def check_node_gpus(words: str | None) -> None:
    """Raises UsageError for words of ``--node-gpus`` that make no sense, whether a model will be planned or not."""
    if words is not None:
        from gpuherd.models.plan.cluster import said_cards

        said_cards(words)
