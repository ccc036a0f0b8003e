"""Where a matrix lies in a stored tensor, and reading it whole or in slabs, each number once.

A region is runs of rows and one run of columns of a tensor seen as rows below each other: a whole tensor, one expert,
a third of a fused projection, or the heads' rows of one. What is fused how is ``fused``; what a tensor means is
``matrices``; bytes are the source's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpuherd.models.dtypes import Codes, FloatArray
from gpuherd.models.source import BlockSource, CodeSource, Run

# Gives an array of a shape, in C order, to read into.
Room = Callable[[tuple[int, int]], Codes]


@dataclass(frozen=True, slots=True)
class Region:
    """A matrix within a tensor.

    Attributes:
        tensor: its name.
        rows: runs of rows, one below the other in the matrix; each run is (first, after the last).
        columns: the run of columns.
    """

    tensor: str
    rows: tuple[Run, ...]
    columns: Run

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return sum(stop - start for start, stop in self.rows), self.columns[1] - self.columns[0]


def clip(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The runs of the elements ``start`` to ``stop``, counted through all runs one after the other.

    >>> clip([(0, 4), (10, 14)], 2, 6)
    [(2, 4), (10, 12)]
    """
    found, before = [], 0
    for first, last in runs:
        begin, end = max(start - before, 0), min(stop - before, last - first)
        if begin < end:
            found.append((first + begin, first + end))
        before += last - first
    return found


def read_region(source: BlockSource, region: Region) -> FloatArray:
    """The matrix, as float32 or float64. Raises BadModel."""
    return _read(source, region.tensor, region.rows, region.columns)


def slabs(source: BlockSource, region: Region, most: int) -> Iterator[FloatArray]:
    """The matrix in consecutive pieces of at most ``most`` rows where it is square or longer than wide, else columns.

    One piece at a time is in memory, if the caller keeps none. Raises BadModel.
    """
    rows, columns = region.shape
    for start in range(0, max(rows, columns), most):
        if rows >= columns:
            runs = clip(region.rows, start, min(start + most, rows))
            yield _read(source, region.tensor, runs, region.columns)
        else:
            first = region.columns[0] + start
            yield _read(source, region.tensor, region.rows, (first, min(first + most, region.columns[1])))


def code_slabs(source: CodeSource, region: Region, most: int, room: Room) -> Iterator[Codes]:
    """As ``slabs``, of a tensor whose 16-bit numbers are wanted as they are stored, each piece in an array in C order
    that ``room`` gave for its shape. Raises BadModel."""
    rows, columns = region.shape
    for start in range(0, max(rows, columns), most):
        stop = min(start + most, max(rows, columns))
        if rows >= columns:
            runs, across = clip(region.rows, start, stop), region.columns
        else:
            runs, across = list(region.rows), (region.columns[0] + start, region.columns[0] + stop)
        target = room((sum(last - first for first, last in runs), across[1] - across[0]))
        filled = 0
        for run in runs:
            source.read_codes(region.tensor, run, across, target[filled : filled + run[1] - run[0]])
            filled += run[1] - run[0]
        yield target


def _read(source: BlockSource, tensor: str, rows: Sequence[Run], columns: Run) -> FloatArray:
    if len(rows) == 1:
        return source.read_block(tensor, rows[0], columns)
    result: FloatArray | None = None
    filled = 0
    for run in rows:
        block = source.read_block(tensor, run, columns)
        if result is None:
            result = np.empty((sum(stop - start for start, stop in rows), block.shape[1]), block.dtype)
        result[filled : filled + len(block)] = block
        filled += len(block)
    return np.empty((0, columns[1] - columns[0]), np.float32) if result is None else result
