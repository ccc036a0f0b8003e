"""How a simulated attempt ends, told to the same ``jobs.settle`` that judges real ends: by exit code, signal and log."""

from __future__ import annotations

from dataclasses import replace

from gpuherd.engines.local import Exit
from gpuherd.errors import ExitCode
from gpuherd.jobs.failures import FailureClass
from gpuherd.jobs.records import QueuedJob
from gpuherd.jobs.settle import Blameless, Facts, Settlement, settle

_SUCCESS = Facts(exit=Exit(True, 0))
# What the dispatcher would see of each class of failure.
_SIGNS: dict[FailureClass, Facts] = {
    FailureClass.BAD_INPUT: Facts(exit=Exit(True, ExitCode.BAD_INPUT)),
    FailureClass.MISSING: Facts(exit=Exit(True, ExitCode.MISSING)),
    FailureClass.OUT_OF_MEMORY: Facts(exit=Exit(True, ExitCode.OUT_OF_MEMORY)),
    FailureClass.GPU_FAULT: Facts(exit=Exit(True, 1), log_tail="RuntimeError: CUDA error: uncorrectable ECC error"),
    FailureClass.DISK_FULL: Facts(exit=Exit(True, 1), log_tail="OSError: [Errno 28] No space left on device"),
    FailureClass.CANNOT_WRITE: Facts(exit=Exit(True, ExitCode.CANNOT_WRITE)),
    FailureClass.KILLED: Facts(exit=Exit(True, signal=9)),
    FailureClass.TIMEOUT: Facts(exit=Exit(True, signal=15), timed_out=True),
    FailureClass.NO_RESULT: Facts(exit=Exit(True, 0), has_result=False),
    FailureClass.NEVER_STARTED: Facts(exit=Exit(False)),
    FailureClass.CRASH: Facts(exit=Exit(True, 1), log_tail="RuntimeError: simulated"),
}


def settled(queued: QueuedJob, failure: FailureClass | None, gpus: tuple[str, ...], now: float) -> Settlement:
    """What becomes of the job when an attempt on these GPUs (UUIDs) has ended so; None is a success."""
    facts = _SUCCESS if failure is None else replace(_SIGNS[failure], gpus=gpus)
    return settle(queued, facts, now)


def given_way(queued: QueuedJob, now: float) -> Settlement:
    """What becomes of the job when we stopped it because a stranger wanted its GPU."""
    return settle(queued, Facts(exit=Exit(True, signal=15), blameless=Blameless.STOPPED), now)
