"""``gpuherd set``: other options for a run that goes on."""

from __future__ import annotations

import argparse

from gpuherd.cli.steering import add_steering_command, ask
from gpuherd.errors import UsageError
from gpuherd.jobs.options import SETTABLE, DispatchOptions
from gpuherd.options import Option, Parser, option_fields, spellings

DESCRIPTION = """\
Gives a run that goes on other options. Running jobs keep what they have; what is started from now on follows the new
ones. They hold until the run ends.

examples:
  gpuherd set --gpus 4,5 --max-checks 3        your own queue
  gpuherd set --run results --max-gpus 2
  gpuherd set --run results --gpus all --max-concurrent none
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_steering_command(subparsers, "set", DESCRIPTION, of_jobs=False)
    group = parser.add_argument_group("what to set")
    for field, spec in option_fields(DispatchOptions):
        if field.name not in SETTABLE:
            continue
        shown, quiet = spellings(field.name, spec)
        # The words go to the dispatcher as they are; it reads them as it read its own.
        taken = {"dest": field.name, "default": argparse.SUPPRESS, "nargs": "+" if spec.many else None}
        group.add_argument(*shown, help=spec.help.replace("%", "%%"), metavar=_metavar(spec), **taken)  # type: ignore[arg-type]
        if quiet:
            group.add_argument(*quiet, help=argparse.SUPPRESS, **taken)  # type: ignore[arg-type]
    parser.set_defaults(run=run)


def _metavar(spec: Option) -> str:
    if spec.choices is not None:
        return "|".join(spec.choices)
    return spec.metavar or "yes|no"


def run(args: argparse.Namespace) -> int:
    """Asks for it."""
    settings = {}
    for name in SETTABLE:
        if hasattr(args, name):
            words = getattr(args, name)
            settings[name] = words if isinstance(words, str) else ",".join(words)
    if not settings:
        raise UsageError("set: say what to set, for example --max-gpus 2")
    return ask(args, "set", settings=settings)
