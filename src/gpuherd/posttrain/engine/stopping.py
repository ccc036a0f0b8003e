"""How a training ends before its last step because somebody has asked it to."""

from __future__ import annotations

from typing import Self

from gpuherd.errors import ExitCode, GpuherdError


class Stopped(GpuherdError):
    """A training was asked to stop; a checkpoint of that moment is there to go on from."""

    exit_code = ExitCode.INTERRUPTED

    @classmethod
    def after(cls, done: int, steps: int) -> Self:
        """After so many of its steps.

        >>> print(Stopped.after(2, 6))
        stopped after step 2 of 6; the same command goes on from there
        """
        return cls(f"stopped after step {done} of {steps}; the same command goes on from there")
