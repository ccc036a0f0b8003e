"""An attempt of a job in virtual time: it runs, may be paused for strangers, and knows when it will end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuherd.jobs.failures import FailureClass
from gpuherd.simulate.standing import Standing

if TYPE_CHECKING:
    from gpuherd.simulate.floor import Slot


class Attempt:
    """A running attempt.

    Attributes:
        standing: the job as it was when it started.
        slots: its GPUs; () on the CPU.
        started: second of its start.
        failure: how it will end, None for a success.
        ends_at: when it will end; None while it is paused.
        shared: others that share may be on its GPU.
        over: it has ended.
    """

    __slots__ = ("_left_s", "ends_at", "failure", "over", "shared", "slots", "standing", "started")

    def __init__(
        self,
        standing: Standing,
        slots: tuple[Slot, ...],
        now: float,
        seconds: float,
        failure: FailureClass | None,
        *,
        shared: bool,
    ):
        self.standing = standing
        self.shared = shared
        self.slots = slots
        self.started = now
        self.failure = failure
        self.ends_at: float | None = now + seconds
        self.over = False
        self._left_s = seconds

    def pause(self, now: float) -> None:
        """It stands still from now on."""
        if self.ends_at is not None:
            self._left_s = self.ends_at - now
            self.ends_at = None

    def resume(self, now: float) -> float:
        """It goes on. Returns when it will end."""
        if self.ends_at is None:
            self.ends_at = now + self._left_s
        return self.ends_at
