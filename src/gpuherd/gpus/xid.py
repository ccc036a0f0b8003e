"""What an Xid error of the NVIDIA driver says: the GPU's fault, or the program's.

Numbers and meanings from NVIDIA's "Xid Errors" reference. Those that a program can cause by itself (13: an exception in
a kernel, 31: a bad address, 43 and 45: its work was ended) say nothing about the GPU and have no sentence here.
"""

from __future__ import annotations

_FAULTS = {
    48: "a double-bit memory error",
    61: "an internal micro-controller has stopped",
    62: "an internal micro-controller has halted",
    63: "a page of memory is to be retired or a row remapped",
    64: "a page of memory could not be retired or a row remapped",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    92: "very many single-bit memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "its system processor failed",
    136: "an NVLink could not be trained",
    140: "an unrecovered memory error",
    143: "it could not be initialised",
    154: "it needs a reset, a drain or a reboot",
}


def fault(xid: int) -> str | None:
    """A sentence about an Xid that is the GPU's own fault: ``Xid 79 (it has fallen off the bus)``; None for others.

    >>> fault(79)
    'Xid 79 (it has fallen off the bus)'
    >>> fault(31) is None
    True
    """
    return f"Xid {xid} ({_FAULTS[xid]})" if xid in _FAULTS else None
