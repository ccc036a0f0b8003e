"""Classifies the failure of an attempt by exit code, signal and log: pure functions over plain data.

The class says whether another try can help, and whether it should be on another GPU. The exit codes of
``gpuherd.errors.ExitCode`` come first; other programs are judged by their signal and the end of their log (``tail``).
"""

from __future__ import annotations

import os
import re
import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.errors import ExitCode, clean, harmless
from gpuherd.jobs.attempts import MOST_IDLE_ENDS
from gpuherd.jobs.attempts.time_limits import LimitKind, Passed

if TYPE_CHECKING:
    from gpuherd.engines.local.process import Exit


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
    IDLE = "idle"
    NO_RESULT = "no result"
    NEVER_STARTED = "never started"
    CRASH = "crash"


# Another try of these would fail the same way.
_FOR_GOOD = frozenset({FailureClass.BAD_INPUT, FailureClass.MISSING, FailureClass.CANNOT_WRITE, FailureClass.IDLE})
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

# Exit codes of a shell that could not run the command; another try would fail the same way.
_SHELL_CODES = {126: "the command is no program, or may not be run", 127: "there is no such command"}

_BY_CODE = {
    ExitCode.BAD_INPUT: FailureClass.BAD_INPUT,
    ExitCode.MISSING: FailureClass.MISSING,
    ExitCode.OUT_OF_MEMORY: FailureClass.OUT_OF_MEMORY,
    ExitCode.CANNOT_WRITE: FailureClass.CANNOT_WRITE,
}

# Messages of libraries when a GPU's or the machine's memory is full. cuBLAS, cuSOLVER and cuDNN report another error
# when there is no memory for their handles.
NO_MEMORY = re.compile(
    r"OutOfMemoryError|\b(?:CUDA|HIP|XPU|cudaMalloc failed)(?: driver)?(?: error)?:? out of memory|_ALLOC_FAILED"
    r"|Triton Error \[CUDA\]: out of memory|MPS backend out of memory"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY|RESOURCE_EXHAUSTED"
    r"|ResourceExhaustedError|Cuda failure 2\b|when calling .(?:cublas|cusolverDn|cusparse|cudnn)Create"
    r"|CUDNN_STATUS_NOT_INITIALIZED"
    r"|memory for the cache blocks|KV cache is needed, which is larger|less than desired GPU memory utilization"
    r"|larger than the maximum number of tokens that can be stored in KV cache|enough GPU RAM"
    r"|enough GPU memory to fit|failed to allocate [\w.]{1,20} (?:\(\d{1,20} bytes\) )?from device"
    r"|\bMemoryError\b|Cannot allocate memory|std::bad_alloc|Unable to allocate \S{1,20} \S{1,20} for an array"
    r"|memory allocation of \d{1,20} bytes failed|runtime: out of memory|DefaultCPUAllocator"
    r"|out of shared memory|unable to write to file </torch_|oom.kill event|Out of memory: Killed process",
)
# Recognised in any line of the log's tail, in this order: a GPU that has fallen off the bus also reports failed
# allocations. Every pattern is of bounded length, so that a hostile line costs linear time.
_ANYWHERE: tuple[tuple[FailureClass, re.Pattern[str]], ...] = (
    (
        FailureClass.GPU_FAULT,
        re.compile(
            r"uncorrectable (?:ECC|NVLink)|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|fallen off the bus|GPU is lost"
            r"|GPU_IS_LOST|GpuIsLost|\bXid\b|CUDA error: unknown error|CUDA_ERROR_UNKNOWN|hardware stack error"
            r"|CUDA-capable device\(s\) is/are busy or unavailable|CUDA_ERROR_LAUNCH_FAILED|unspecified launch failure"
            r"|no CUDA-capable device is detected|CUDA_ERROR_NO_DEVICE|No CUDA GPUs are available"
            r"|Unable to determine the device handle for GPU|Driver/library version mismatch|row remapper"
            r"|over nvlink or a hardware error|system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY"
            r"|GPU requires reset|HW Exception by GPU|HSA_STATUS_ERROR_EXCEPTION",
            re.IGNORECASE,
        ),
    ),
    (FailureClass.OUT_OF_MEMORY, NO_MEMORY),
    (
        FailureClass.DISK_FULL,
        re.compile(
            r"No space left on device|Disk quota exceeded|ENOSPC|EDQUOT|database or disk is full"
            r"|Not enough free disk space|PytorchStreamWriter failed writing|out of disk space",
            re.IGNORECASE,
        ),
    ),
    (
        FailureClass.KILLED,
        re.compile(
            r"Signal (?:9|15) \(SIG(?:KILL|TERM)\) received|died with <Signals\.SIG(?:KILL|TERM): \d{1,2}>"
            r"|DataLoader worker \(pid.{0,40}\) is killed by signal: (?:Killed|Terminated)|^KeyboardInterrupt\b"
            r"|DUE TO TIME LIMIT|DUE TO PREEMPTION|got signal: 15|^Job cancelled by",
        ),
    ),
)
# Recognised only in the line that names the error: programs also print such messages about optional files.
_IN_ERROR_LINE = (
    (
        FailureClass.MISSING,
        re.compile(
            r"FileNotFoundError|ModuleNotFoundError|No such file or directory|command not found|: not found$"
            r"|GatedRepoError|gated repo|RepositoryNotFoundError|EntryNotFoundError|RevisionNotFoundError"
            r"|is not a local folder and is not a valid model identifier|does not appear to have a file named"
            r"|is restricted and you are not in the authorized list|DatasetNotFoundError"
            r"|no file named (?:pytorch_model|model)|PackageNotFoundError|failed to open GGUF file",
            re.IGNORECASE,
        ),
    ),
    (
        FailureClass.CANNOT_WRITE,
        re.compile(r"PermissionError|Permission denied|Read-only file system|IsADirectoryError|PermissionDeniedError"),
    ),
    (
        FailureClass.BAD_INPUT,
        re.compile(
            r"^\S{1,200}: error: |SyntaxError|IndentationError|TabError|Error while deserializing header|HeaderTooLarge"
            r"|failed finding central directory|BadZipFile|JSONDecodeError|yaml\.\w{1,30}\.\w{1,30}Error"
            r"|TOMLDecodeError|ConfigAttributeError|ConfigKeyError|ConfigCompositionException|OverrideParseException|MissingMandatoryValue"
            r"|Error\(s\) in loading state_dict|UnpicklingError|Weights only load failed|EOFError: Ran out of input"
            r"|Unrecognized configuration class|ArrowInvalid|does not recognize this architecture"
            r"|invalid magic|Unrecognized model in|trust_remote_code=True|unrecognized arguments|No such option"
        ),
    ),
)

# Messages about the machine's memory, among those about memory.
_HOST_MEMORY = re.compile(
    r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc|Unable to allocate|DefaultCPUAllocator|out of shared memory"
    r"|memory allocation of|runtime: out of memory|java\.lang|ray\.exceptions|</torch_|oom.kill event|Killed process"
)

_ERROR_LINE = re.compile(
    r"^[\w.]{1,80}(?:Error|Exception|Interrupt|Exit|OutOfMemory)\b|\b(?:error|fatal)\b[: ]|\bwhat\(\):"
    r"|(?:No such file or directory|command not found|: not found|Permission denied)$",
    re.IGNORECASE,
)
# Printed by launchers about a worker that has printed its own error before.
_WRAPPERS = re.compile(
    r"ChildFailedError|CalledProcessError|ProcessRaisedException|ProcessExitedException|RemoteTraceback"
    r"|Engine ?[cC]ore (?:initialization )?(?:failed|encountered)|EngineDeadError|subprocess-exited-with-error"
    r"|^srun: error|Set the environment variable HYDRA_FULL_ERROR"
)
# Prefixes that name the process, of several, which printed the line.
_SPEAKER = re.compile(r"^(?:(?:\[rank\d{1,5}\]|\(\w{1,40} (?:pid|rank)=\d{1,9}\)|\d{1,5}):?\s{1,4}){1,3}(?=\S)")
_SHELL_WORDS = re.compile(r"^(?:Killed|Terminated|Hangup|Aborted|Segmentation fault|Bus error)(?: \(core dumped\))?$")
_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A failure's class, the reason as one clean line, and whether another try may help, and on another GPU.

    ``on_host``: what ran out is the machine's memory and not a GPU's. ``exit_code``: the process's own, None where it
    left none.
    """

    failure: FailureClass
    reason: str
    retry: bool
    elsewhere: bool
    on_host: bool = False
    exit_code: int | None = None


def classify(
    end: Exit,
    log_tail: str = "",
    *,
    passed: Passed | None = None,
    gpu_problem: str | None = None,
    missing_result: str | None = None,
) -> Diagnosis:
    """Diagnoses an attempt that did not succeed.

    Args:
        end: what its main process did; neither code nor signal when the end was not recorded.
        log_tail: the last part of its output.
        passed: the time limit for which we ended it.
        gpu_problem: what the driver says is wrong with one of its GPUs ("Xid 79"), when it came up while it ran.
        missing_result: the file that should be there after a success, when the command ended well without it.
    """
    failure, reason = _judge(end, log_tail, passed, gpu_problem, missing_result)
    retry = failure not in _FOR_GOOD
    out_of_memory = failure is FailureClass.OUT_OF_MEMORY and "cuda" not in reason.lower()
    on_host = out_of_memory and _HOST_MEMORY.search(reason) is not None
    return Diagnosis(failure, clean(reason), retry, retry and failure in _ELSEWHERE, on_host, end.code)


def _judge(
    end: Exit, log_tail: str, passed: Passed | None, gpu_problem: str | None, missing_result: str | None
) -> tuple[FailureClass, str]:
    line = error_line(log_tail)
    if not end.started and (passed is None or passed.kind is not LimitKind.WHOLE):
        return FailureClass.NEVER_STARTED, line or "it ended before it could be given the go-ahead"
    if gpu_problem is not None and end.code not in _BY_CODE:
        # Also for an attempt that we ended: a job hangs when its GPU does.
        return FailureClass.GPU_FAULT, f"the driver reports {gpu_problem}" + (f"; {line}" if line else "")
    if passed is not None:
        return _judge_limit(passed)
    if missing_result is not None:
        return FailureClass.NO_RESULT, f"it ended well, but its result {missing_result} is not there"
    if end.code in _BY_CODE:
        return _BY_CODE[ExitCode(end.code)], line or f"exit code {end.code}"
    return _judge_log(log_tail.splitlines(), line) or _judge_exit(end, line)


def _judge_log(lines: Sequence[str], line: str | None) -> tuple[FailureClass, str] | None:
    """The class that the log shows, None when it shows none."""
    # Long lines are searched whole, and cut only for display.
    whole = [_words(each) for each in reversed(lines)]
    for failure, pattern in _ANYWHERE:
        said = next((words for words in whole if pattern.search(words)), None)
        if said is not None:
            return failure, said
    return next(((failure, line) for failure, pattern in _IN_ERROR_LINE if line and pattern.search(line)), None)


def _judge_exit(end: Exit, line: str | None) -> tuple[FailureClass, str]:
    if end.signal is not None:
        return _judge_signal(end.signal, line)
    if end.code is None:
        return FailureClass.KILLED, "it was gone without leaving an exit status: killed, with its shell"
    if end.code in _SHELL_CODES:
        return FailureClass.MISSING, line or f"exit code {end.code}: {_SHELL_CODES[end.code]}"
    return FailureClass.CRASH, line or f"exit code {end.code}, and nothing in its log"


def _judge_limit(passed: Passed) -> tuple[FailureClass, str]:
    """The class of an attempt that we ended for one of its time limits."""
    if passed.kind is LimitKind.WHOLE:
        return FailureClass.TIMEOUT, f"stopped after its time limit of {passed.limit_s:g} s"
    if passed.kind is LimitKind.STAGE:
        stage = f" in stage {passed.stage}" if passed.stage else ""
        return FailureClass.TIMEOUT, f"stopped{stage} after the time limit of {passed.limit_s:g} s for a stage"
    if passed.kind is LimitKind.IDLE:
        again = f"as in {MOST_IDLE_ENDS} attempts before (--idle-after)"
        return FailureClass.IDLE, f"stopped after it had not used its GPUs for {passed.limit_s:.0f} s, {again}"
    return FailureClass.NO_HEARTBEAT, f"stopped after it had reported no progress for {passed.limit_s:g} s"


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


def in_words(failure: str, exit_code: int | None, reason: str) -> str:
    """A failure as text: its class, the exit code if the process left one, and the reason.

    >>> in_words("crash", 3, "ValueError: no"), in_words("crash", 3, "exit code 3, and nothing in its log")
    ('crash, exit code 3: ValueError: no', 'crash: exit code 3, and nothing in its log')
    """
    code = _code(exit_code, reason)
    return f"{failure}, {code}: {reason}" if code else f"{failure}: {reason}"


def with_code(exit_code: int | None, reason: str) -> str:
    """The reason, after the exit code if the process left one and the reason does not contain it."""
    code = _code(exit_code, reason)
    return f"{code}: {reason}" if code else reason


def _code(exit_code: int | None, reason: str) -> str:
    return f"exit code {exit_code}" if exit_code and not reason.startswith("exit code ") else ""


def error_line(log_tail: str) -> str | None:
    """The last line of a log that names an error, else the last line that is not blank; None for an empty log.

    Cleaned, and without the "error: " of our own workers, which is redundant in a reason.

    >>> error_line("error: the model has no weights\\n")
    'the model has no weights'
    """
    lines = [said for line in log_tail.splitlines() if (said := _words(line)) and not _SHELL_WORDS.match(said)]
    errors = [line for line in lines if _ERROR_LINE.search(line)]
    own = [line for line in errors if not _WRAPPERS.search(line)]
    telling = next(iter([*own[-1:], *errors[-1:], *lines[-1:]]), None)
    return None if telling is None else clean(telling)


def _words(line: str) -> str:
    """A line of a log, plain, without the prefix that names its process and without our own workers' "error: "."""
    return _SPEAKER.sub("", " ".join(harmless(line).split()), count=1).removeprefix("error: ")


def tail(path: Path, most_bytes: int = _TAIL_BYTES) -> str:
    """The last bytes of the log as text; "" when it can't be read. Undecodable bytes become replacement characters."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            return file.read(most_bytes).decode("utf-8", "replace")
    except OSError:
        return ""


def size(path: Path) -> int:
    """Bytes in the log; 0 when it can't be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def back_off_s(tries: int, first_s: float = 1.0, longest_s: float = 60.0) -> float:
    """Seconds to wait before the next try after this many failures: the first, twice that, ... at most the longest."""
    return min(longest_s, first_s * 2.0 ** max(0, min(tries, 20) - 1))
