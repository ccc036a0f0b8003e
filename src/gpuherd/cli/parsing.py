"""How a command module makes its parser. The flags themselves come from dataclasses through ``gpuherd.options``."""

from __future__ import annotations

import argparse
import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

from gpuherd.cli.commands import SUMMARIES
from gpuherd.errors import UsageError
from gpuherd.options import Parser

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
    from gpuherd.engines.registry import LOCAL

    if args.simulate is None:
        return
    if getattr(args, "engine", None) not in (None, LOCAL):
        raise UsageError(
            f"--simulate pretends GPUs of this machine, and --engine {args.engine} would hand the jobs to a cluster, "
            "which knows nothing of them; leave one of both out"
        )
    args.engine = LOCAL


def stay_inside(args: argparse.Namespace, settings: Settings) -> None:
    """Where the options want the command to run inside of the engine's job that it is typed in (``--in-allocation``),
    the engine becomes this machine's. Elsewhere than on that job's node this process becomes the same command there.

    Raises as ``EngineSpec.take_over``.
    """
    from gpuherd.engines.base import Replacement
    from gpuherd.engines.options import EngineOptions, engine_values
    from gpuherd.engines.registry import LOCAL, foreign

    name = getattr(args, "engine", settings.engine)
    if name == LOCAL:
        return
    given = engine_values(args) | {"engine": name}
    defaults = {
        key: value
        for key, value in engine_values(SimpleNamespace(**settings.defaults)).items()
        if key not in foreign(name)
    }
    found = EngineOptions(**given).spec.take_over(
        EngineOptions(**given), EngineOptions(**(defaults | given)), [sys.executable, "-m", "gpuherd", *sys.argv[1:]]
    )
    if found is None:
        return
    if isinstance(found, Replacement):
        from gpuherd.batch.run_remote import become

        become(found, inherited=(0, 1, 2))
    most = [getattr(args, "max_concurrent", settings.defaults.get("max_concurrent")), found.at_once]
    at_once = [each for each in most if each is not None]
    if at_once:
        args.max_concurrent = min(at_once)
    for option in foreign(LOCAL) & vars(args).keys():
        delattr(args, option)
    args.engine = LOCAL
    # Where the engine has given this shell no GPU, those that the machine has are others'.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    sys.stderr.write(f"gpuherd: the jobs run in {found.title}, on {found.node}\n")


def load_for(args: argparse.Namespace, config_type: type, *, stays: bool = True) -> Settings:
    """The user's and the machine's settings; what they say of this dataclass's options goes into ``args`` where the
    command line has said nothing.

    Args:
        stays: with ``--in-allocation`` the command starts jobs on this machine (``stay_inside``).

    Raises UsageError for a file that is wrong, and for a --node-gpus that makes no sense; and as
    ``stay_inside``.
    """
    from gpuherd.jobs.settings import load

    settings = load()
    keep_simulation_here(args)
    if stays:
        stay_inside(args, settings)
    settings.fill(args, config_type)
    check_node_gpus(getattr(args, "node_gpus", None))
    return settings


def check_node_gpus(words: str | None) -> None:
    """Raises UsageError for words of ``--node-gpus`` that make no sense, whether a model will be planned or not."""
    if words is not None:
        from gpuherd.models.plan.cluster import said_cards

        said_cards(words)
