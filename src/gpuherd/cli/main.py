"""``gpuherd``: parses the command line, runs the command's module, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress

from gpuherd import __version__
from gpuherd.cli import COMMANDS
from gpuherd.errors import Enqueued, ExitCode, GpuherdError, escape_unencodable, printable
from gpuherd.options import Parser, did_you_mean

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

DESCRIPTION = """\
Runs LLM experiments on shared GPUs.

examples:
  gpuherd gpus                                             who uses which GPU, and which are free
  gpuherd doctor                                           is this machine ready?
  gpuherd esd --model-list models.csv --max-gpus 4         analyse a list of models on free GPUs
  gpuherd plan llama-3.1-70b --gpus 4x40GB                 will this model fit, and where?
  gpuherd batch commands.txt                               run commands, each on free GPUs
  gpuherd run -- python train.py                           wait for a free GPU and run a command on it
  gpuherd submit -- python train.py                        put a command into your own queue
  gpuherd up                                               work off that queue in the background
  gpuherd batch commands.txt --engine slurm                on a cluster: any command that starts jobs takes --engine
  gpuherd --simulate 4x40GB esd --model-list models.csv    try the same on simulated GPUs
"""


def build_parser(commands: Sequence[str] = tuple(COMMANDS)) -> Parser:
    """The command line with these commands. Loads their modules, which import what is heavy only while they run."""
    parser, subparsers = _program()
    nested: dict[str, argparse._SubParsersAction[Parser]] = {}
    apart: dict[str, list[str]] = {}
    for name in commands:
        group, _, tool = name.partition(" ")
        if COMMANDS[name].is_apart and group in commands:
            apart.setdefault(group, []).append(f"  {tool:<18}{COMMANDS[name].summary}")
            continue
        if tool and group not in nested:
            owner = subparsers.choices.get(group) or subparsers.add_parser(group)
            nested[group] = owner.add_subparsers(title="commands on results", dest="tool", parser_class=Parser)
        _add_command(nested[group] if tool else subparsers, name)
    for group, lines in apart.items():
        subparsers.choices[group].add_argument_group("further commands", "\n".join(lines))
    return parser


def _add_command(subparsers: argparse._SubParsersAction[Parser], name: str) -> None:
    """Adds the command as its module defines it (see ``gpuherd.cli``), with the engines' examples behind its own."""
    from gpuherd.engines.registry import specs

    module = importlib.import_module(f"gpuherd.cli.{COMMANDS[name].module}")
    word = name.replace(" ", "_").replace("-", "_")
    before, heading, rest = getattr(module, word.upper()).partition("examples:\n")
    end = rest.find("\n\n") + 1 or len(rest)
    examples = rest[:end] + "".join(spec.examples.get(name, "") for spec in specs())
    parser = subparsers.add_parser(
        name.rpartition(" ")[2], help=COMMANDS[name].summary, description=before + heading + examples + rest[end:]
    )
    parser.set_defaults(parser=parser, run=getattr(module, f"run_{word}"))
    # Also accepted behind the command, where people write it; it must not reset a value given before the command.
    parser.add_argument("--simulate", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    getattr(module, f"add_{word}")(parser)


def _outline() -> Parser:
    """The program with only the names of its commands, for a command line that names none: loads no command module."""
    parser, subparsers = _program()
    for name, command in COMMANDS.items():
        if " " not in name:
            subparsers.add_parser(name, help=command.summary)
    return parser


def _program() -> tuple[Parser, argparse._SubParsersAction[Parser]]:
    parser = Parser(prog="gpuherd", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"gpuherd {__version__}")
    parser.add_argument(
        "--simulate",
        metavar="SPEC",
        help="simulate GPUs, for example 8x40GB, or those of a state file; jobs then run on the CPU",
    )
    return parser, parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", parser_class=Parser)


def _command(words: Sequence[str]) -> str | None:
    """The name of the command, of one or two words, behind the options of the program; None if there is none."""
    rest = iter(words)
    for word in rest:
        if word == "--simulate":
            next(rest, None)
        elif not word.startswith("--simulate="):
            two = f"{word} {next(rest, '')}"
            return None if word.startswith("-") else two if two in COMMANDS else word
    return None


def _needed(command: str, words: Sequence[str]) -> list[str]:
    """The commands whose parsers are needed: this one, and for its --help also its subcommands."""
    is_help = "-h" in words or "--help" in words
    return [name for name in COMMANDS if name == command or (is_help and name.startswith(f"{command} "))]


def run(argv: Sequence[str] | None = None) -> int:
    """Parses ``argv`` and runs the command. Returns its exit code. With --json an error is printed as JSON too."""
    words = sys.argv[1:] if argv is None else list(argv)
    # Only the needed parser: building all of them would take longer than many a command.
    command = _command(words)
    parser = build_parser(_needed(command, words)) if command and command in COMMANDS else _outline()
    if command is not None and command not in COMMANDS:
        parser.words = words
        parser.error(f"unknown command {command!r}{did_you_mean(command, COMMANDS)}")
    args, unknown = parser.parse_known_args(words)
    command_parser: Parser = getattr(args, "parser", parser)
    _reject_unknown_tool(command, unknown, command_parser)
    command_parser.reject_unknown(unknown)
    mistake = args.check_words(args) if hasattr(args, "check_words") else None
    if mistake is not None:
        command_parser.error(mistake)
    if args.command is None:
        parser.print_help()
        return ExitCode.USAGE
    from gpuherd.runs.console import configure_console

    try:
        configure_console()
        if args.simulate is not None:
            from gpuherd.standin import activate

            activate(args.simulate)
        return int(args.run(args))
    except Enqueued as enqueued:
        _print_enqueued(enqueued, as_json=getattr(args, "json", False))
        return ExitCode.OK
    except GpuherdError as problem:
        _print_error_json(args, problem)
        raise
    except Exception as problem:
        if isinstance(problem, BrokenPipeError) or _is_environmental(problem):
            raise  # ``main`` handles these
        error = _unexpected_error(problem)
        _print_error_json(args, error)
        raise error from problem


def _print_error_json(args: argparse.Namespace, problem: GpuherdError) -> None:
    if getattr(args, "json", False):
        import json

        print(json.dumps({"error": str(problem), "exit_code": int(problem.exit_code)}), flush=True)


def _unexpected_error(problem: BaseException) -> GpuherdError:
    """Turns an unexpected exception into a GpuherdError, and writes its traceback to a file."""
    import tempfile
    import time
    import traceback

    try:
        cwd = os.getcwd()  # noqa: PTH109 - as text
    except OSError:
        cwd = "a folder that was removed"
    summary = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
    text = (
        f"gpuherd {__version__}, Python {sys.version}\n{time.strftime('%Y-%m-%d %H:%M:%S %z')}, in {cwd}\n"
        f"{shlex.join(sys.argv)}\n\n{''.join(traceback.format_exception(problem))}"
    )
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="gpuherd-error-", suffix=".txt", encoding="utf-8", errors="backslashreplace", delete=False
        ) as file:
            file.write(text)
        where = f"the traceback is in {file.name}"
    except OSError as full:
        print(text, file=sys.stderr, flush=True)
        where = f"the traceback is above (it could not be written to a file: {full.strerror})"
    return GpuherdError(
        f"unexpected error in gpuherd: {summary}; {where}: please report the error with it. Nothing recorded is lost: "
        "running jobs go on, and the same command goes on from here"
    )


def _print_enqueued(enqueued: Enqueued, *, as_json: bool) -> None:
    if as_json:
        import json

        content = {"enqueued": enqueued.waiting, "folder": str(enqueued.folder), "remarks": list(enqueued.remarks)}
        print(json.dumps(content), flush=True)
        return
    for remark in enqueued.remarks:
        print(printable(remark))
    folder = shlex.quote(str(enqueued.folder))
    jobs = "1 job waits" if enqueued.waiting == 1 else f"{enqueued.waiting} jobs wait"
    print(
        printable(
            f"{jobs} in {folder}, and nothing was started; the same command without --enqueue-only runs them, and"
            f" gpuherd export --to slurm {folder} --output DIR writes them as files"
        )
    )


def _reject_unknown_tool(command: str | None, unknown: Sequence[str], parser: Parser) -> None:
    """Exits with an error that names the nearest subcommand, if a word that is no flag was not understood."""
    tools = [tool for group, _, tool in (name.partition(" ") for name in COMMANDS) if tool and group == command]
    if tools and unknown and not unknown[0].startswith("-"):
        hint = did_you_mean(unknown[0], tools, f"there are {', '.join(tools)}")
        parser.error(f"unknown command {unknown[0]!r}{hint}")


def main() -> None:
    """Console entry point."""
    _open_standard_streams()
    try:
        code = run()
        sys.stdout.flush()
    except GpuherdError as error:
        _print_error(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        code = _discard_output()
    except SystemExit as end:
        # rich turns a BrokenPipeError into this.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        code = _discard_output()
    except OSError as problem:
        if not _is_environmental(problem):
            code = _report_unexpected(problem)
        elif problem.errno not in _NO_SPACE:
            _print_error("the current folder was removed; go to another one with cd")
            code = ExitCode.USAGE
        else:
            _discard_output()
            _print_error(f"can't write the output: {problem.strerror}")
            code = ExitCode.CANNOT_WRITE
    except Exception as problem:  # before the command started, or while the interpreter exits
        code = _report_unexpected(problem)
    sys.exit(code)


def _report_unexpected(problem: BaseException) -> ExitCode:
    error = _unexpected_error(problem)
    _print_error(str(error))
    return error.exit_code


def _print_error(text: str) -> None:
    # If standard error can't be written either, the exit code is all that is left.
    with suppress(OSError):
        print(f"gpuherd: {text}", file=sys.stderr, flush=True)


def _open_standard_streams() -> None:
    """Opens standard streams that are closed (``gpuherd status >&-``). Otherwise the next file that is opened would get
    their number, and output would go into it.

    Characters that the encoding of standard output lacks are printed as escapes.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.dup(0), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.dup(1), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.dup(2), "w")
    escape_unencodable(sys.stdout)


def _is_environmental(problem: Exception) -> bool:
    """Whether the environment is the cause: no space for the output, or the current folder was removed."""
    if not isinstance(problem, OSError):
        return False
    try:
        os.getcwd()  # noqa: PTH109 - whether it is there
    except FileNotFoundError:
        return True
    return problem.errno in _NO_SPACE


def _discard_output() -> ExitCode:
    """Sends further output nowhere, because its reader is gone (``gpuherd gpus | head``), which is no error. Keeps the
    interpreter from complaining when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.OK
