"""``gpuherd``: reads the words, finds the command's module, and turns our errors into one line and an exit code."""

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
from gpuherd.report.log import configure_console

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

DESCRIPTION = """\
Runs LLM experiments on GPUs that people share.

examples:
  gpuherd gpus                                             who uses which GPU, and which are free
  gpuherd doctor                                           is this machine ready?
  gpuherd esd --model-list models.csv --max-gpus 4         analyse a list of models on free GPUs
  gpuherd plan llama-3.1-70b --gpus 4x40GB                 will this model fit, and where?
  gpuherd batch commands.txt                               run commands, each on free GPUs
  gpuherd run -- python train.py                           wait for a free GPU and become the command
  gpuherd submit -- python train.py                        put a command into your own queue
  gpuherd up                                               work that queue off in the background
  gpuherd batch commands.txt --engine slurm                on a cluster: any command that starts jobs takes --engine
  gpuherd --simulate 4x40GB esd --model-list models.csv    try the same on simulated GPUs
"""


def build_parser(commands: Sequence[str] = tuple(COMMANDS)) -> Parser:
    """The command line with these commands. Their modules are light: what is heavy they import when they run."""
    parser, subparsers = _program()
    nested: dict[str, argparse._SubParsersAction[Parser]] = {}
    for name in commands:
        group, _, tool = name.partition(" ")
        if tool and group not in nested:
            owner = subparsers.choices.get(group) or subparsers.add_parser(group)
            nested[group] = owner.add_subparsers(title="commands on results", dest="tool", parser_class=Parser)
        module = importlib.import_module(f"gpuherd.cli.{COMMANDS[name].module}")
        getattr(module, f"add_{name.replace(' ', '_')}")(nested[group] if tool else subparsers)
    return parser


def _outline() -> Parser:
    """The program with the names of its commands alone, for words that name none: no module of theirs is loaded."""
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
        help="pretend to have GPUs, for example 8x40GB, or a state file; jobs then run on the CPU",
    )
    return parser, parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", parser_class=Parser)


def _command(words: Sequence[str]) -> str | None:
    """The word that names the command, or the two, behind our own options; None when these words begin with no such
    word."""
    rest = iter(words)
    for word in rest:
        if word == "--simulate":
            next(rest, None)
        elif not word.startswith("--simulate="):
            two = f"{word} {next(rest, '')}"
            return None if word.startswith("-") else two if two in COMMANDS else word
    return None


def _needed(command: str, words: Sequence[str]) -> list[str]:
    """The commands whose parsers are needed: this one; for its help, those that it has too."""
    helped = "-h" in words or "--help" in words
    return [name for name in COMMANDS if name == command or (helped and name.startswith(f"{command} "))]


def run(argv: Sequence[str] | None = None) -> int:
    """Parses ``argv`` and runs the command. Returns its exit code. With --json an error is told as JSON too."""
    words = sys.argv[1:] if argv is None else list(argv)
    # Only the parser that is needed: making all of them would take longer than many a command.
    command = _command(words)
    parser = build_parser(_needed(command, words)) if command and command in COMMANDS else _outline()
    if command is not None and command not in COMMANDS:
        parser.words = words
        parser.error(f"unknown command {command!r}{did_you_mean(command, COMMANDS)}")
    args, unknown = parser.parse_known_args(words)
    command_parser: Parser = getattr(args, "parser", parser)
    _reject_unknown_tool(command, unknown, command_parser)
    command_parser.reject_unknown(unknown)
    wrong = args.check_words(args) if hasattr(args, "check_words") else None
    if wrong is not None:
        command_parser.error(wrong)
    if args.command is None:
        parser.print_help()
        return ExitCode.USAGE
    try:
        configure_console()
        if args.simulate is not None:
            from gpuherd.standin import activate

            activate(args.simulate)
        return int(args.run(args))
    except Enqueued as told:
        _tell_enqueued(told, as_json=getattr(args, "json", False))
        return ExitCode.OK
    except GpuherdError as problem:
        _print_error_json(args, problem)
        raise
    except Exception as problem:
        if isinstance(problem, BrokenPipeError) or _is_environmental(problem):
            raise  # ``main`` knows them
        unforeseen = _unexpected_error(problem)
        _print_error_json(args, unforeseen)
        raise unforeseen from problem


def _print_error_json(args: argparse.Namespace, problem: GpuherdError) -> None:
    if getattr(args, "json", False):
        import json

        print(json.dumps({"error": str(problem), "exit_code": int(problem.exit_code)}), flush=True)


def _unexpected_error(problem: BaseException) -> GpuherdError:
    """Turns an unexpected exception into a GpuherdError, and writes its traceback to a file."""
    import tempfile
    import time
    import traceback

    words = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
    text = (
        f"gpuherd {__version__}, Python {sys.version}\n{time.strftime('%Y-%m-%d %H:%M:%S %z')}, in {_here()}\n"
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
        where = f"the traceback is above (no file could be written for it: {full.strerror})"
    return GpuherdError(
        f"an error that gpuherd did not foresee: {words}; {where}: please report it with that. What was recorded is not"
        " lost: jobs that run go on, and the same command goes on from here"
    )


def _here() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - asked for its error
    except OSError:
        return "a folder that was removed"


def _tell_enqueued(told: Enqueued, *, as_json: bool) -> None:
    if as_json:
        import json

        content = {"enqueued": told.waiting, "folder": str(told.folder), "remarks": list(told.remarks)}
        print(json.dumps(content), flush=True)
        return
    for remark in told.remarks:
        print(printable(remark))
    folder = shlex.quote(str(told.folder))
    jobs = "1 job waits" if told.waiting == 1 else f"{told.waiting} jobs wait"
    print(
        printable(
            f"{jobs} in {folder}, and nothing was started; the same command without --enqueue-only runs them, and"
            f" gpuherd export --to slurm {folder} --output DIR writes them as files"
        )
    )


def _reject_unknown_tool(command: str | None, unknown: Sequence[str], parser: Parser) -> None:
    """Exits with the nearest command of this command, where a word that is no flag was not understood."""
    tools = [tool for group, _, tool in (name.partition(" ") for name in COMMANDS) if tool and group == command]
    if tools and unknown and not unknown[0].startswith("-"):
        hint = did_you_mean(unknown[0], tools, f"there are {', '.join(tools)}")
        parser.error(f"unknown command {unknown[0]!r}{hint}")


def main() -> None:
    """Console entry point."""
    _have_standard_streams()
    try:
        code = run()
        sys.stdout.flush()
    except GpuherdError as error:
        _say(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        code = _unread()
    except SystemExit as end:
        # This is how rich tells it.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        code = _unread()
    except OSError as problem:
        if not _is_environmental(problem):
            code = _report_unexpected(problem)
        elif problem.errno not in _NO_SPACE:
            _say("the folder that you are in has been removed; go to another: cd")
            code = ExitCode.USAGE
        else:
            _unread()
            _say(f"can't write what there is to tell: {problem.strerror}")
            code = ExitCode.CANNOT_WRITE
    except Exception as problem:  # before the command began, or while the interpreter ends
        code = _report_unexpected(problem)
    sys.exit(code)


def _report_unexpected(problem: BaseException) -> ExitCode:
    error = _unexpected_error(problem)
    _say(str(error))
    return error.exit_code


def _say(text: str) -> None:
    # Where standard error is full too, the exit code says it.
    with suppress(OSError):
        print(f"gpuherd: {text}", file=sys.stderr, flush=True)


def _have_standard_streams() -> None:
    """Opens what was closed (``gpuherd status >&-``): a file of ours would else get its number and be written into.

    Characters that the encoding of standard output lacks are printed as escapes.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.dup(0), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.dup(1), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.dup(2), "w")
    escape_unencodable(sys.stdout)


def _is_environmental(problem: Exception) -> bool:
    """Whether the cause is the environment: no space for our output, or the current folder was removed."""
    return isinstance(problem, OSError) and (problem.errno in _NO_SPACE or _folder_is_gone())


def _folder_is_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - asked for its error
    except FileNotFoundError:
        return True
    return False


def _unread() -> ExitCode:
    """The reader of our output has gone (``gpuherd gpus | head``): nothing is wrong. Keeps the interpreter from
    complaining when it flushes at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.OK
