"""The exceptions that gpuherd raises on purpose, and the exit codes that its commands and workers end with.

Every message says what was wrong, where, and what to do: the command line prints it as one line and nothing else.
The bottom layer: this module imports nothing of gpuherd.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from io import TextIOWrapper
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# No path, name or setting that somebody wrote by hand is so long.
_ENDLESS = r"\S{1000,}"
_BEGINNING = 60
# Patterns of what acts on a terminal; compiled when first used, since every command imports this module. Surrogates
# stand for bytes that are not UTF-8 (in a file name, say); they can't be printed.
_ESCAPES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)"
_CONTROLS = r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+"
_LONGEST_LINE = 300


class ExitCode(IntEnum):
    """How a gpuherd command or worker ends, for scripts and for the dispatcher's failure classes.

    The values from 65 on follow sysexits.h where it has a fitting name.
    """

    OK = 0
    FAILED = 1  # some job failed, or a worker crashed: another try on another GPU may help
    USAGE = 2  # the command line is wrong: nothing was started
    BAD_INPUT = 65  # EX_DATAERR: the model, list or queue is at fault; another try can't help
    MISSING = 66  # EX_NOINPUT: a file, model or adapter base is not there (or is gated)
    OUT_OF_MEMORY = 71  # EX_OSERR: GPU or host memory ran out; a larger or emptier GPU may help
    CANNOT_WRITE = 73  # EX_CANTCREAT: the output folder can't be written
    BUSY = 75  # EX_TEMPFAIL: another gpuherd works on the same output folder
    INTERRUPTED = 130  # 128 + SIGINT: stopped by Ctrl-C; the same command goes on from there
    TERMINATED = 143  # 128 + SIGTERM


def printable(text: str) -> str:
    """The text with all that is not printable written as Python escapes: one line, no terminal codes.

    >>> printable("evil\\x1b[31m\\nname")
    'evil\\\\x1b[31m\\\\nname'
    """
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


def one_line(text: str) -> str:
    """The text as a message: one printable line; of very long words only the beginning.

    >>> one_line("'" + "9" * 10_000 + "' is not a whole number").partition("99…")[2]
    ' (10002 characters) is not a whole number'
    """
    return re.sub(_ENDLESS, lambda word: f"{word[0][:_BEGINNING]}… ({len(word[0])} characters)", printable(text))


def clean(text: str) -> str:
    """One line that any terminal can show safely: no escape, control or direction characters, at most 300 long."""
    plain = " ".join(harmless(text).split())
    return plain if len(plain) <= _LONGEST_LINE else plain[: _LONGEST_LINE - 1] + "…"


def harmless(text: str) -> str:
    """The text without escape, control or direction characters (a blank in place of each run of them)."""
    if text.isprintable():
        return text
    return re.sub(_CONTROLS, " ", re.sub(_ESCAPES, "", text))


def escape_unencodable(stream: object) -> None:
    """Makes a text stream write a character that its encoding lacks (an arrow in Latin-1) as an escape.

    By default Python raises UnicodeEncodeError: one line of one job's log would end a run.
    """
    if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="backslashreplace")


class GpuherdError(Exception):
    """Base of all errors that gpuherd raises on purpose. ``exit_code`` is what the command line exits with.

    Its text is always one printable line: messages quote names and settings out of files that strangers made.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __str__(self) -> str:
        return one_line(super().__str__())


class Enqueued(Exception):
    """No error: the jobs are in the queue of their folder, as was asked, and nothing is started: the command ends here.

    Attributes:
        folder: the run folder.
        waiting: how many jobs wait there now.
        remarks: what people should know of jobs that were there before.
    """

    def __init__(self, folder: Path, waiting: int, remarks: tuple[str, ...] = ()):
        super().__init__(f"{waiting} jobs wait in {folder}")
        self.folder = folder
        self.waiting = waiting
        self.remarks = remarks


class UsageError(GpuherdError):
    """An option or argument is wrong; nothing has been started."""

    exit_code = ExitCode.USAGE


class NoSuchGpu(UsageError, ValueError):
    """A GPU index, UUID or count was asked for that this machine does not have (or does not show to us)."""


class JobCannotFit(UsageError, ValueError):
    """A job asks for more than the machine has, so that it could never start."""


class CudaAlreadyStarted(GpuherdError, RuntimeError):
    """The GPUs that this process sees were to change after it had started CUDA, when that has no effect any more."""


class MissingExtra(UsageError, ImportError):
    """A part of gpuherd is used whose libraries were not installed with it."""


@contextmanager
def usage_named(prefix: str) -> Iterator[None]:
    """Puts the place of a UsageError before what it says: ``policy_env: `` or ``algos.GRPO.``."""
    try:
        yield
    except UsageError as problem:
        raise UsageError(f"{prefix}{problem}") from None


@contextmanager
def naming_extras(extras: Mapping[str, str], purpose: str = "it needs") -> Iterator[None]:
    """Tells an import that fails in this block for want of one of these libraries as MissingExtra.

    Args:
        extras: module, as the import names it -> the extra of gpuherd that brings it.
        purpose: what the extra brings, as the end of the sentence.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name not in extras:
            raise
        library, extra = missing.name.partition(".")[0], extras[missing.name]
        raise MissingExtra(
            f"{library} is not installed; pip install 'gpuherd[{extra}]' brings what {purpose}"
        ) from None


class BadModel(GpuherdError):
    """A model or adapter can't be analysed: bad id, damaged or unsupported weights. Another try can't help."""

    exit_code = ExitCode.BAD_INPUT


class MissingModel(BadModel):
    """A model, shard or adapter base is not there, or the Hub does not give it out (gated, private)."""

    exit_code = ExitCode.MISSING


class BadModelList(GpuherdError):
    """The model list itself can't be used: missing, empty, or without a needed column."""

    exit_code = ExitCode.BAD_INPUT


class CannotWrite(GpuherdError):
    """The output folder can't be created or written."""

    exit_code = ExitCode.CANNOT_WRITE


class QueueBusy(GpuherdError):
    """Another dispatcher works on this queue."""

    exit_code = ExitCode.BUSY


class QueueUnreadable(GpuherdError):
    """The queue file is damaged, no queue, or of a newer version; it is never overwritten."""

    exit_code = ExitCode.BAD_INPUT


class CannotOpenQueue(QueueUnreadable):
    """The queue file can't be opened now: locked, not readable for this user, no space. It need not be damaged."""

    exit_code = ExitCode.FAILED
