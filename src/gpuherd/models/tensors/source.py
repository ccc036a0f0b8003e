"""A model as named tensors that are read one at a time: the protocols of sources, and regions of a tensor.

A region is runs of rows and one run of columns of a tensor seen as rows below each other: a whole tensor, one expert,
a third of a fused projection, or the heads' rows of one. Knows no files; which region is a matrix decides ``matrices``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from gpuherd.errors import BadModel
from gpuherd.models.names import quoted

FloatArray = npt.NDArray[np.floating[Any]]
# 16-bit numbers as they are stored, and their formats.
Codes = npt.NDArray[np.uint16]
Half = Literal["BF16", "F16"]
# First index and index after the last.
Run = tuple[int, int]

# Bytes per element, by safetensors' names.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
# Bits per element of the formats that are narrower than a byte. They are known so that a header with them can be
# checked; they are never read as weights.
ITEM_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

# safetensors' names by torch's, of the formats that a PyTorch file may name.
BY_TORCH = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip

# The formats that are read as weights.
READABLE = frozenset({"F16", "BF16", "F32", "F64"})


def stored_bytes(dtype: str, elements: int) -> int | None:
    """Bytes that so many elements take in a file, None for an unknown format or a part of a byte."""
    if dtype in ITEM_BITS:
        bits = elements * ITEM_BITS[dtype]
        return bits // 8 if bits % 8 == 0 else None
    return elements * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry in a checkpoint.

    Attributes:
        name: key in the checkpoint, for example ``transformer.h.0.attn.c_attn.weight``.
        shape: as stored.
        dtype: safetensors' name of the stored type: F64, F32, F16, BF16, F8_E4M3, I8, …; or that of the quantised
            format whose codes reading turns into weights, for example ``Q4_K`` or ``NF4``.
        nbytes: bytes in the file.
        shares: name of an earlier tensor of the checkpoint whose very bytes these are (tied weights), else None.
        dequantized: whether the stored numbers are codes that are turned into weights when they are read.
        scales_of: name of the dequantized tensor that these scales, zeros or settings belong to, else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    shares: str | None = None
    dequantized: bool = False
    scales_of: str | None = None


class TensorSource(Protocol):
    """A checkpoint, or a checkpoint with an adapter merged on the way: both are read like this."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The parsed config.json, empty if there is none."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors, by name, in the order of the checkpoint."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> FloatArray:
        """One tensor in its stored shape, or entries ``start`` to ``stop`` of its first axis, others not read.

        So one expert of a fused mixture, or the rows of one projection, cost no more than their own bytes. float16 and
        bfloat16 come as float32 (exactly), float32 and float64 as they are. Nothing stays in memory here after the
        call. Raises BadModel when it can't be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadersOnly:
    """A ``TensorSource`` of a model that is not downloaded: names, shapes and types, but no numbers."""

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> FloatArray:  # noqa: ARG002 - the protocol's
        """Raises BadModel."""
        raise BadModel(f"tensor {quoted(name)} is not downloaded")


@runtime_checkable
class BlockSource(TensorSource, Protocol):
    """A source that can also read a block of a tensor for the price of the block, so that no tensor is ever whole in
    memory. Others are read whole, or by entries of the first axis."""

    def has_blocks(self, name: str) -> bool:
        """Whether ``read_block`` can be called for this tensor."""
        ...

    def read_block(self, name: str, rows: Run, columns: Run) -> FloatArray:
        """A 2-D block of a tensor of two or more axes, seen as a matrix of (all axes but the last, the last axis).

        Numbers as ``read`` gives them, no others read. Raises BadModel when it can't be read.
        """
        ...


@runtime_checkable
class CodeSource(TensorSource, Protocol):
    """A source that can also hand out 16-bit numbers as they are stored, for a GPU that widens them itself: half the
    bytes to read, to hold and to send."""

    def half_of(self, name: str) -> Half | None:
        """The tensor's format, None where its numbers can't be had so."""
        ...

    def read_codes(self, name: str, rows: Run, columns: Run, target: Codes) -> None:
        """Fills ``target``, in C order, with a block as ``BlockSource.read_block`` has it. Raises BadModel."""
        ...


# ---- regions ---------------------------------------------------------------------------------------------------------

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
    for runs, columns in _pieces(region, most):
        yield _read(source, region.tensor, runs, columns)


def code_slabs(source: CodeSource, region: Region, most: int, room: Room) -> Iterator[Codes]:
    """As ``slabs``, of a tensor whose 16-bit numbers are wanted as they are stored, each piece in an array in C order
    that ``room`` gave for its shape. Raises BadModel."""
    for runs, columns in _pieces(region, most):
        target = room((sum(last - first for first, last in runs), columns[1] - columns[0]))
        filled = 0
        for run in runs:
            source.read_codes(region.tensor, run, columns, target[filled : filled + run[1] - run[0]])
            filled += run[1] - run[0]
        yield target


def _pieces(region: Region, most: int) -> Iterator[tuple[Sequence[Run], Run]]:
    """The runs of rows, and the columns, of each piece along the longer side."""
    rows, columns = region.shape
    for start in range(0, max(rows, columns), most):
        stop = min(start + most, max(rows, columns))
        if rows >= columns:
            yield clip(region.rows, start, stop), region.columns
        else:
            yield region.rows, (region.columns[0] + start, region.columns[0] + stop)


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
