"""``gpuherd completion``: prints a completion script for the user's shell."""

from __future__ import annotations

import argparse

from gpuherd.cli.parsing import add_command
from gpuherd.errors import ExitCode
from gpuherd.flags import Parser

DESCRIPTION = """\
Prints a completion script.

example:
  gpuherd completion bash > ~/.local/share/bash-completion/completions/gpuherd
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "completion", DESCRIPTION)
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which shell the script is for")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the script for ``args.shell``."""
    import shtab

    from gpuherd.cli.main import build_parser

    print(shtab.complete(build_parser(), shell=args.shell))
    return ExitCode.OK
