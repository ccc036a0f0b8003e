"""A job's main program: words in, an exit code out that says whether another try can help, the reason as last line.

Also the only test for memory that ran out, and the sign of life of a worker that fetches a model.
"""

from __future__ import annotations

import errno
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.jobs.attempts.failures import NO_MEMORY
from gpuherd.options import Parser, add_options, build
from gpuherd.runs.console import configure_console

OptionsT = TypeVar("OptionsT")

HEARTBEAT_EVERY_S = 20.0
_MB = 2**20


def run_worker(
    module: str,
    description: str,
    options: type[OptionsT],
    work: Callable[[OptionsT, Sequence[str]], object],
    argv: Sequence[str] | None = None,
    *,
    overrides: str | None = None,
) -> int:
    """Runs a worker. Returns its exit code, which says whether another try can help.

    Args:
        module: by which it is started, ``gpuherd.qa.generate.worker``.
        options: a dataclass of options.
        work: does it; given the options, and the words that start the same again (the module and its arguments).
        argv: the words, those of the command line by default.
        overrides: what ``KEY=VALUE`` words between the flags do, for ``--help``; the field ``overrides`` of the options
            holds them. None: such words are refused.
    """
    parser = Parser(prog=f"python -m {module}", description=description)
    add_options(parser, options)
    if overrides is not None:
        parser.intermixed = True
        parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=overrides)
    args, unknown = parser.parse_known_args(argv)
    parser.reject_unknown(unknown)

    def start() -> None:
        configure_console()
        given = build(options, args)
        if overrides is not None:
            given = replace(given, overrides=tuple(args.overrides))  # type: ignore[type-var]
        work(given, [module, *(sys.argv[1:] if argv is None else argv)])

    return exit_code_of(start)


def exit_code_of(
    work: Callable[[], object],
    *,
    log: Callable[[str], object] = lambda text: print(text, file=sys.stderr),
) -> int:
    """Does a worker's work, and returns its exit code. The reason of a failure is the last line that is logged: people
    are shown that line of a failed job's log.

    Args:
        log: writes an error, or a traceback.
    """
    try:
        work()
    except GpuherdError as problem:
        log(f"error: {problem}")
        return problem.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as problem:
        log(traceback.format_exc().rstrip("\n"))
        return ExitCode.OUT_OF_MEMORY if is_out_of_memory(problem) else ExitCode.FAILED
    return ExitCode.OK


def unbuffered() -> None:
    """A log that is read while the worker runs, or after it was killed, must not wait in a buffer."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception means that memory ran out, a GPU's or the machine's. Imports no library.

    Libraries below torch have no exception class for it: their messages are matched as in a log. An exception's text
    is about the failure alone, so the bare words "out of memory" count in it too.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(problem, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(problem).__mro__):
        return True
    if isinstance(problem, OSError):
        return problem.errno == errno.ENOMEM
    words = str(problem)
    return isinstance(problem, RuntimeError) and ("out of memory" in words or NO_MEMORY.search(words) is not None)


@contextmanager
def while_bytes_arrive(tell: Callable[[int], None], every_s: float = HEARTBEAT_EVERY_S) -> Iterator[None]:
    """Sign of life while a worker fetches a model: calls ``tell`` with the MB written so far, when there are more.

    Between two matrices or batches a worker reports progress anyhow. A download of hours would look like a worker that
    hangs, and one that hangs must not look like a download: so what counts is what this process has really written, by
    the kernel's account. ``tell`` is called from a thread.
    """
    over = threading.Event()
    before = written_bytes()

    def watch() -> None:
        last = before
        while not over.wait(every_s):
            now = written_bytes()
            if now > last:
                last = now
                tell((now - before) // _MB)

    thread = threading.Thread(target=watch, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def written_bytes() -> int:
    """Bytes that this process has written by system calls; 0 where the kernel does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
            if line.startswith("wchar:"):
                return int(line.split()[1])
    return 0
