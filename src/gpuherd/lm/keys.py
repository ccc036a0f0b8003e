"""Random numbers that belong to an answer and not to a moment: the same whatever is decoded beside it. Pure."""

from __future__ import annotations

import hashlib
import struct

Key = tuple[int, int]  # two signed 32-bit numbers


def draw_key(seed: int, question: str, sample: int, step: int) -> Key:
    """What one token of one answer is drawn by: the same on every machine, in every batch, shard and order.

    64 bits of a BLAKE2b digest of the four. ``choosing.race`` draws with it.

    >>> draw_key(0, "q1", 0, 0) == draw_key(0, "q1", 0, 0) != draw_key(0, "q1", 1, 0)
    True
    """
    counter = f"{seed} {sample} {step} {question}".encode("utf-8", "surrogatepass")
    first, second = struct.unpack("<ii", hashlib.blake2b(counter, digest_size=8).digest())
    return first, second
