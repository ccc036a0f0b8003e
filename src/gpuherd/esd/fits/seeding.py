"""Random numbers that a matrix gets whatever else is analysed, before or beside it, and on which machine.

It knows names and hashes. It doesn't know what the numbers are for.
"""

from __future__ import annotations

import hashlib

import numpy as np


def generator(purpose: str, seed: int, name: str) -> np.random.Generator:
    """The random numbers of one matrix for one purpose: they depend on these three alone.

    Args:
        purpose: what they are for, so that two uses don't draw the same numbers.
        seed: 0 or more.
        name: of the matrix; any text.
    """
    digest = hashlib.sha256(f"{purpose}\0{name}".encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng([seed, *np.frombuffer(digest, dtype="<u4").tolist()])
