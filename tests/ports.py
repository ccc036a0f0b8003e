"""Ports for the daemons that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Above the ports that gpuherd and Ray's workers choose, below those that the kernel gives to clients.
_FIRST, _LAST = 32_000, 32_767


class AddressInUse(RuntimeError):
    """Another program has taken a port between its choice and its use."""


def free_ports(count: int) -> list[int]:
    """Different ports, each free a moment ago."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randint(_FIRST, _LAST)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.add(port)
    return list(found)
