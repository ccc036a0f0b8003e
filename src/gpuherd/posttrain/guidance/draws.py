"""Random decisions that belong to a problem and a sample, whoever collects them and beside what. Pure."""

from __future__ import annotations

import hashlib


def uniform(seed: int, purpose: str, problem: str, sample: int) -> float:
    """A number in [0, 1) that these four fix: 53 bits of a BLAKE2b digest of them.

    >>> 0 <= uniform(0, "switch", "a problem", 1) < 1
    True
    >>> uniform(0, "switch", "p", 1) == uniform(0, "switch", "p", 1) != uniform(0, "switch", "p", 2)
    True
    """
    counter = f"{seed} {purpose} {sample} {problem}".encode("utf-8", "surrogatepass")
    return (int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "big") >> 11) / 2.0**53


def whole_number(low: int, high: int, seed: int, purpose: str, problem: str, sample: int) -> int:
    """One of ``low`` to ``high``, both included, each as probable as the other.

    >>> {whole_number(1, 3, 0, "cut", "p", sample) for sample in range(50)}
    {1, 2, 3}
    """
    return low + int(uniform(seed, purpose, problem, sample) * (high - low + 1))
