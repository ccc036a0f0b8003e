"""What kind of failure an attempt was, told from exit code, signal and log: pure functions over plain data.

A class says whether another try can help, and whether it should be elsewhere. Exit codes are those of
``gpuherd.errors.ExitCode`` first; a program that knows nothing of them is judged by its signal and its last words.
"""

from __future__ import annotations

import re
import signal as signals
from dataclasses import dataclass
from enum import StrEnum

from gpuherd.errors import ExitCode


class FailureClass(StrEnum):
    """Kinds of failure, as written to failures.jsonl."""

    BAD_INPUT = "bad input"
    MISSING = "missing"
    OUT_OF_MEMORY = "out of memory"
    GPU_FAULT = "GPU fault"
    DISK_FULL = "disk full"
    CANNOT_WRITE = "cannot write"
    KILLED = "killed"
    TIMEOUT = "timeout"
    NO_HEARTBEAT = "no heartbeat"
    NO_RESULT = "no result"
    NEVER_STARTED = "never started"
    CRASH = "crash"


# Another try of these would fail the same way.
_FOR_GOOD = frozenset({FailureClass.BAD_INPUT, FailureClass.MISSING, FailureClass.CANNOT_WRITE})
# A try on another GPU may go better than one on the same.
_ELSEWHERE = frozenset(
    {
        FailureClass.OUT_OF_MEMORY,
        FailureClass.GPU_FAULT,
        FailureClass.CRASH,
        FailureClass.TIMEOUT,
        FailureClass.NO_HEARTBEAT,
    }
)

_BY_CODE = {
    ExitCode.BAD_INPUT: FailureClass.BAD_INPUT,
    ExitCode.MISSING: FailureClass.MISSING,
    ExitCode.OUT_OF_MEMORY: FailureClass.OUT_OF_MEMORY,
    ExitCode.CANNOT_WRITE: FailureClass.CANNOT_WRITE,
}

# In order: a GPU that has fallen off the bus also says that memory could not be had. Every pattern is of bounded
# length, so that a hostile line costs linear time.
_BY_LOG = (
    (
        FailureClass.GPU_FAULT,
        re.compile(
            r"uncorrectable ECC|fallen off the bus|GPU is lost|GPU_IS_LOST|GpuIsLost|\bXid\b|CUDA error: unknown error"
            r"|CUDA-capable device\(s\) is/are busy or unavailable|hardware stack error|CUDA_ERROR_LAUNCH_FAILED"
            r"|no CUDA-capable device is detected",
            re.IGNORECASE,
        ),
    ),
    (
        FailureClass.OUT_OF_MEMORY,
        re.compile(
            r"OutOfMemoryError|CUDA(?: error:)? out of memory|_ALLOC_FAILED|cudaErrorMemoryAllocation"
            r"|\bMemoryError\b|Cannot allocate memory|std::bad_alloc|Unable to allocate \S{1,20} \S{1,20} for an array"
            r"|CUDA_ERROR_OUT_OF_MEMORY|RESOURCE_EXHAUSTED",
        ),
    ),
    (FailureClass.DISK_FULL, re.compile(r"No space left on device|Disk quota exceeded|ENOSPC|EDQUOT")),
)

# Of those that tell of memory: the machine's, not a GPU's.
_HOST_MEMORY = re.compile(
    r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc|Unable to allocate|DefaultCPUAllocator"
)

_ERROR_LINE = re.compile(r"^[\w.]{1,80}(?:Error|Exception|Interrupt|Exit)\b|\b(?:error|fatal)\b[: ]", re.IGNORECASE)
_SHELL_WORDS = re.compile(r"^(?:Killed|Terminated|Hangup|Aborted|Segmentation fault|Bus error)(?: \(core dumped\))?$")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")
# Surrogates stand for bytes that are no UTF-8 (in a file name, say); nothing can print them.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")
_LONGEST_REASON = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """What is known of an attempt that did not succeed.

    Attributes:
        started: whether the command itself ever ran.
        code, signal: as in ``engines.local.Exit``; both None when the end was not recorded.
        log_tail: the last part of its output.
        timeout_s, stage_timeout_s, heartbeat_s: the limit, when we ended it for that one.
        stage: the stage that it was in for too long, as it called it.
        gpu_problem: what the driver says is wrong with one of its GPUs ("Xid 79"), when it came up while it ran.
        missing_result: the file that should be there after a success, when the command ended well without it.
    """

    started: bool = True
    code: int | None = None
    signal: int | None = None
    log_tail: str = ""
    timeout_s: float | None = None
    stage_timeout_s: float | None = None
    stage: str | None = None
    heartbeat_s: float | None = None
    gpu_problem: str | None = None
    missing_result: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A failure's class, the reason as one clean line, and whether another try may help, and on another GPU.

    ``on_host``: what ran out is the machine's memory and not a GPU's.
    """

    failure: FailureClass
    reason: str
    retry: bool
    elsewhere: bool
    on_host: bool = False


def classify(ending: Ending) -> Diagnosis:
    """Diagnoses an attempt that did not succeed."""
    failure, reason = _judge(ending)
    retry = failure not in _FOR_GOOD
    on_host = failure is FailureClass.OUT_OF_MEMORY and _HOST_MEMORY.search(reason) is not None
    return Diagnosis(failure, clean(reason), retry, retry and failure in _ELSEWHERE, on_host)


def _judge(ending: Ending) -> tuple[FailureClass, str]:
    line = telling_line(ending.log_tail)
    if not ending.started and ending.timeout_s is None:
        return FailureClass.NEVER_STARTED, line or "it ended before it could be given the go-ahead"
    if ending.gpu_problem is not None and ending.code not in _BY_CODE:
        # Also for one that we had to stop: a job hangs when its GPU does.
        return FailureClass.GPU_FAULT, f"the driver reports {ending.gpu_problem}" + (f"; {line}" if line else "")
    stopped = _judge_stop(ending)
    if stopped is not None:
        return stopped
    if ending.missing_result is not None:
        return FailureClass.NO_RESULT, f"it ended well, but its result {ending.missing_result} is not there"
    if ending.code in _BY_CODE:
        return _BY_CODE[ExitCode(ending.code)], line or f"exit code {ending.code}"
    for failure, pattern in _BY_LOG:
        said = _last_match(pattern, ending.log_tail)
        if said is not None:
            return failure, said
    if ending.signal is not None:
        return _judge_signal(ending.signal, line)
    if ending.code is None:
        return FailureClass.KILLED, "it was gone without leaving an exit status: killed, with its shell"
    return FailureClass.CRASH, line or f"exit code {ending.code}, and nothing in its log"


def _judge_stop(ending: Ending) -> tuple[FailureClass, str] | None:
    """The class of an attempt that we ended for one of its limits."""
    if ending.timeout_s is not None:
        return FailureClass.TIMEOUT, f"stopped after its time limit of {ending.timeout_s:g} s"
    if ending.stage_timeout_s is not None:
        stage = f" in stage {ending.stage}" if ending.stage else ""
        return FailureClass.TIMEOUT, f"stopped{stage} after the time limit of {ending.stage_timeout_s:g} s for a stage"
    if ending.heartbeat_s is not None:
        return FailureClass.NO_HEARTBEAT, f"stopped after it had told no progress for {ending.heartbeat_s:g} s"
    return None


def _judge_signal(number: int, line: str | None) -> tuple[FailureClass, str]:
    try:
        name = signals.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    after = f" after: {line}" if line else ""
    if number == signals.SIGKILL:
        return FailureClass.KILLED, f"killed by SIGKILL, by someone or by the kernel for lack of memory{after}"
    if number in (signals.SIGTERM, signals.SIGINT, signals.SIGHUP, signals.SIGQUIT):
        return FailureClass.KILLED, f"ended by {name}, which someone sent{after}"
    return FailureClass.CRASH, f"ended by {name}{after}"


def telling_line(log_tail: str) -> str | None:
    """The last line of a log that names an error, else the last line that says anything; None for none.

    Cleaned, and without the "error: " that our own workers begin with: who reads a reason knows that it is one.

    >>> telling_line("error: the model has no weights\\n")
    'the model has no weights'
    """
    lines = [cleaned for line in log_tail.splitlines() if (cleaned := clean(line)) and not _SHELL_WORDS.match(cleaned)]
    for line in reversed(lines):
        if _ERROR_LINE.search(line):
            return line.removeprefix("error: ")
    return lines[-1] if lines else None


def clean(text: str) -> str:
    """One line that any terminal can show safely: no escape, control or direction characters, at most 300 long."""
    plain = " ".join(_CONTROLS.sub(" ", _ESCAPES.sub("", text)).split())
    return plain if len(plain) <= _LONGEST_REASON else plain[: _LONGEST_REASON - 1] + "…"


def back_off_s(tries: int) -> float:
    """Seconds to wait before the next try after this many failures: 1, 2, 4, … at most 60."""
    return float(min(60, 2 ** max(0, min(tries, 10) - 1)))


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    for line in reversed(text.splitlines()):
        if pattern.search(line):
            return clean(line).removeprefix("error: ")
    return None
