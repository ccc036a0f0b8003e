"""Whose connection it is: on the loopback the kernel knows the user at the other end.

All users of a machine can reach a port of 127.0.0.1. A link that one of them has seen (in a list of processes, over a
shoulder) is worth nothing to them, because their connections are refused before anything is read. The kernel is asked
for one socket by its addresses (``NETLINK_SOCK_DIAG``, sock_diag(7)), in microseconds however many there are.
"""

from __future__ import annotations

import socket
import struct

_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ERROR = 4, 20, 1, 2
_ANY_COOKIE = 0xFFFFFFFF
# Of struct nlmsghdr; and of struct inet_diag_msg up to the user's id: 4 bytes, the socket's id, three numbers.
_HEADER, _BEFORE_UID = 16, 4 + 48 + 12
_ALL_STATES = 0xFFF
_WAIT_S = 0.5


def user_at(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """The uid of the TCP socket on this machine whose own address is ``local`` and whose other end is ``remote``.

    None where there is none, or where the kernel does not tell (another network namespace, no such module).
    """
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    try:
        ends = [socket.inet_pton(family, address).ljust(16, b"\0") for address, _ in (local, remote)]
        question = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES)
        question += struct.pack(">HH", local[1], remote[1]) + ends[0] + ends[1]
        question += struct.pack("=III", 0, _ANY_COOKIE, _ANY_COOKIE)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
            kernel.settimeout(_WAIT_S)
            kernel.send(struct.pack("=IHHII", _HEADER + len(question), _BY_FAMILY, _REQUEST, 1, 0) + question)
            answer = kernel.recv(8192)
    except (OSError, ValueError, struct.error):
        return None
    _, kind = struct.unpack_from("=IH", answer)
    if kind != _BY_FAMILY or len(answer) < _HEADER + _BEFORE_UID + 4:
        return None
    uid: int = struct.unpack_from("=I", answer, _HEADER + _BEFORE_UID)[0]
    return uid
