"""What the programs of a piece of work have in common: words in, an exit code out, what went wrong as last line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.jobs.attempts.failures import is_out_of_memory
from gpuherd.options import Parser, add_options, build
from gpuherd.qa.working.loading import leave
from gpuherd.report.log import configure_console

OptionsT = TypeVar("OptionsT")


def run_worker(
    module: str,
    description: str,
    options: type[OptionsT],
    work: Callable[[OptionsT, Sequence[str]], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Runs a worker. Returns its exit code, which says whether another try can help.

    Args:
        module: by which it is started, ``gpuherd.qa.generation.worker``.
        options: a dataclass of options.
        work: does it; given the options, and the words that start the same again (the module and its arguments).
        argv: the words, those of the command line by default.
    """
    parser = Parser(prog=f"python -m {module}", description=description)
    add_options(parser, options)
    args, unknown = parser.parse_known_args(argv)
    parser.reject_unknown(unknown)
    try:
        configure_console()
        work(build(options, args), [module, *(sys.argv[1:] if argv is None else argv)])
        leave()
    except GpuherdError as problem:
        # The last line of a failed job's log is what people are shown as the reason.
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as problem:
        traceback.print_exc()
        return ExitCode.OUT_OF_MEMORY if is_out_of_memory(problem) else ExitCode.FAILED
    return ExitCode.OK


def unbuffered() -> None:
    """A log that is read while the worker runs, or after it was killed, must not wait in a buffer."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
