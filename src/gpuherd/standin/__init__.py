"""Stand-ins for the driver libraries of NVIDIA and AMD, for tests and for users without GPUs.

Nothing below the command line imports this package: the code that reads GPUs finds an ordinary ``libnvidia-ml.so.1`` or
``libamd_smi.so``.
``activate`` is what ``gpuherd --simulate`` calls; tests make their own ``gpuherd.standin.machine.SimulatedMachine``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuherd.standin.machine import SimulatedMachine

__all__ = ["activate"]


def activate(spec: str) -> SimulatedMachine:
    """Makes this process and its jobs see the simulated machine that ``spec`` describes (``8x40GB``), or that of an
    existing state file. Says so once on standard error. Raises UsageError for a bad spec, GpuherdError when the
    stand-in library can't be had.
    """
    from gpuherd.standin.machine import start

    return start(spec)
