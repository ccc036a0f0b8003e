"""Which problems of a split a round gets: an order that a seed fixes, and the first of them. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from gpuherd.errors import UsageError
from gpuherd.posttrain.types import Problem

MOST_PROBLEMS = 10_000_000  # of a split that is made: they are all held in memory


def first_problems(problems: Sequence[Problem], count: int | None, seed: int, where: str) -> list[Problem]:
    """The first ``count`` problems in the order of a hash of the seed and their ids; None: all of them.

    The first n are among the first n + 1, and an order does not depend on how the problems lie in their file. Raises
    UsageError, which begins with ``where``, where there are not so many.
    """
    if count is not None and count < 1:
        raise UsageError(f"{where}: {count} problems were asked for; the least is 1")
    if count is not None and count > len(problems):
        raise UsageError(f"{where}: {count} problems were asked for and there are {len(problems)}; ask for fewer")

    def drawn(problem: Problem) -> bytes:
        return hashlib.sha256(f"problems\0{seed}\0{problem.id}".encode()).digest()

    return sorted(problems, key=drawn)[:count]


def without_last_tenth(problems: Sequence[Problem]) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """All problems but the last tenth, rounded up where there are two or more; and the last tenth."""
    first = len(problems) - (-(-len(problems) // 10) if len(problems) > 1 else 0)
    return problems[:first], problems[first:]


class Shuffled:
    """The numbers from 0 to ``size`` - 1 in an order that a key fixes, each found alone: nothing is listed.

    A Feistel network of four rounds over the next larger power of four, walked on until it stays within ``size`` (Black
    and Rogaway 2002, "Ciphers with arbitrary finite domains", method 2).

    >>> sorted(Shuffled(10, "key")) == list(range(10))
    True
    """

    def __init__(self, size: int, key: str):
        """``size``: up to 2**1000."""
        self._size = size
        self._key = key.encode()
        self._half = max(1, ((max(size - 1, 1)).bit_length() + 1) // 2)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return (self[place] for place in range(self._size))

    def __getitem__(self, place: int) -> int:
        """The number at a place from 0 on. Raises IndexError."""
        number = self._mixed(range(self._size)[place])
        while number >= self._size:
            number = self._mixed(number)
        return number

    def _mixed(self, number: int) -> int:
        mask = (1 << self._half) - 1
        left, right = number >> self._half, number & mask
        for turn in range(4):
            said = right.to_bytes(max(32, -(-self._half // 8)), "little")
            digest = hashlib.blake2b(said, key=self._key[:64], salt=bytes([turn])).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        return left << self._half | right
