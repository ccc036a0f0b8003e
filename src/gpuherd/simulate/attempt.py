"""An attempt of a job in virtual time, and the GPUs on which it runs: each knows the other.

An attempt may be paused for strangers, and knows when it will end.
"""

from __future__ import annotations

from gpuherd.gpus.state import Gpu
from gpuherd.jobs.failures import FailureClass
from gpuherd.simulate.standing import Standing


class Slot:
    """A GPU, by its number over all machines, and who is on it.

    ``left``: who used it last was a job of ours. ``attempts``: ours on it now; more than one when they share it.
    ``left_out``: nothing of ours is started on it for now.
    """

    __slots__ = ("attempts", "clean_since", "gpu", "left", "left_out", "machine", "number", "stranger")

    def __init__(self, number: int, gpu: Gpu, machine: str):
        self.number = number
        self.gpu = gpu
        self.machine = machine
        self.attempts: list[Attempt] = []
        self.stranger = False
        self.clean_since = 0.0
        self.left = False
        self.left_out = False

    @property
    def clean(self) -> bool:
        """Whether nobody uses it."""
        return not self.attempts and not self.stranger


class Attempt:
    """A running attempt.

    Attributes:
        standing: the job as it was when it started.
        slots: its GPUs; () on the CPU.
        started: second of its start.
        failure: how it will end, None for a success.
        ends_at: when it will end; None while it is paused.
        shared: others that share may be on its GPU.
        over_at: when its time limit ends it at the latest; None without one, and while it is paused.
        over: it has ended.
    """

    __slots__ = (
        "_left_s",
        "_limit_s",
        "ends_at",
        "failure",
        "over",
        "over_at",
        "shared",
        "slots",
        "standing",
        "started",
    )

    def __init__(
        self,
        standing: Standing,
        slots: tuple[Slot, ...],
        now: float,
        seconds: float,
        failure: FailureClass | None,
        *,
        shared: bool,
        limit_s: float | None = None,
    ):
        self.standing = standing
        self.shared = shared
        self.slots = slots
        self.started = now
        self.failure = failure
        self.ends_at: float | None = now + seconds
        self.over = False
        self.over_at = None if limit_s is None else now + limit_s
        self._left_s = seconds
        self._limit_s = limit_s

    def pause(self, now: float) -> None:
        """It stands still from now on."""
        if self.ends_at is not None:
            self._left_s = self.ends_at - now
            self._limit_s = None if self.over_at is None else self.over_at - now
            self.ends_at = self.over_at = None

    def resume(self, now: float) -> float:
        """It goes on. Returns when it will end."""
        if self.ends_at is None:
            self.ends_at = now + self._left_s
            self.over_at = None if self._limit_s is None else now + self._limit_s
        return self.ends_at
