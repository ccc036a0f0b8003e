"""How a command module makes its parser. The flags themselves come from dataclasses through ``gpuherd.flags``."""

from __future__ import annotations

import argparse

from gpuherd.flags import Parser


def add_command(subparsers: argparse._SubParsersAction[Parser], name: str, summary: str, description: str) -> Parser:
    """A command's own parser: ``summary`` in the list of commands, ``description`` with examples in its --help."""
    parser = subparsers.add_parser(name, help=summary, description=description)
    parser.set_defaults(parser=parser)
    # Also accepted after the command, where people put it; it must not reset a value given before the command.
    parser.add_argument("--simulate", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser
