"""What a simulated failure looks like to the code that judges real ones: exit code, signal and log, by class."""

from __future__ import annotations

from functools import cache

from gpuherd.errors import ExitCode
from gpuherd.jobs.failures import Diagnosis, Ending, FailureClass, classify

_SIGNS = {
    FailureClass.BAD_INPUT: Ending(code=ExitCode.BAD_INPUT),
    FailureClass.MISSING: Ending(code=ExitCode.MISSING),
    FailureClass.OUT_OF_MEMORY: Ending(code=1, log_tail="torch.OutOfMemoryError: CUDA out of memory."),
    FailureClass.GPU_FAULT: Ending(code=1, log_tail="RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    FailureClass.DISK_FULL: Ending(code=1, log_tail="OSError: [Errno 28] No space left on device"),
    FailureClass.CANNOT_WRITE: Ending(code=ExitCode.CANNOT_WRITE),
    FailureClass.KILLED: Ending(signal=9),
    FailureClass.TIMEOUT: Ending(signal=15, timeout_s=1.0),
    FailureClass.NO_HEARTBEAT: Ending(signal=15, heartbeat_s=1.0),
    FailureClass.NO_RESULT: Ending(code=0, missing_result="result"),
    FailureClass.NEVER_STARTED: Ending(started=False),
    FailureClass.CRASH: Ending(code=1, log_tail="RuntimeError: simulated"),
}


@cache
def diagnosis(failure: FailureClass) -> Diagnosis:
    """What is said of an attempt that failed so."""
    return classify(_SIGNS[failure])
