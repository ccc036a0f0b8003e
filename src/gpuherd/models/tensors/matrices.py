"""The weight matrices of a model, found by tensor name and shape, in order, each readable by itself.

Goes by tensors, not by module classes, so that fused experts are not missed; what a tensor is says ``kinds``. Reads
headers only; a matrix's numbers are read when its ``slices()`` or ``slabs()`` are called. Nothing is kept, but a fused
tensor whose parts can't be read apart, until its last part was asked for. Names, splits and what is skipped:
docs/models.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, TypeGuard

import numpy as np

from gpuherd.errors import BadModel
from gpuherd.models.tensors.fused import (
    FusedLayout,
    Shape,
    expert_layout,
    expert_name,
    layout_of,
    part_name,
    stacked_experts,
)
from gpuherd.models.tensors.kinds import Kind, classify, ties_of
from gpuherd.models.tensors.source import (
    BlockSource,
    Codes,
    CodeSource,
    FloatArray,
    Half,
    Region,
    Room,
    TensorInfo,
    TensorSource,
    code_slabs,
    read_region,
    slabs,
)


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """Which part of its stored tensor a matrix is.

    Attributes:
        piece: number of the expert in a fused mixture; 0 where the tensor has two axes.
        layout: how the tensor, or each of its experts, holds several matrices; None where it is one.
        number: which of these.
    """

    piece: int = 0
    layout: FusedLayout | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class HalfSlabs:
    """A matrix of 16-bit numbers, in slabs as they are stored.

    Attributes:
        dtype: their format.
        stream: reads slabs of at most a given longer side, as ``WeightMatrix.slabs`` has them, into arrays that the
            caller makes.
    """

    dtype: Half
    stream: Callable[[int, Room], Iterator[Codes]]


@dataclass(frozen=True)
class WeightMatrix:
    """One weight matrix, or one thing of two or more axes that is not analysed.

    Attributes:
        longname: the tensor's name without ``.weight``; the parts of a fused tensor have ``_q``, ``_k``, ... added,
            an expert of a fused mixture its number after ``experts``.
        kind: ``linear`` (Linear, Conv1D, router, head), ``expert``, ``conv``, ``embedding`` or ``other``.
        shape: rows and columns as stored; of a convolution (out, in) of one kernel position.
        params: numbers in it, over all kernel positions.
        skip: why it is not analysed, None if it is.
        slices: reads it: one matrix, or one for each kernel position of a convolution, as float32 or float64.
        tensor: the name of the stored tensor that it is in.
        part: which part of that tensor it is.
        factors: where the matrix is known to be a product left right of low rank (the update of an adapter), reads the
            factors in float64, (M, r) and (r, N), one pair for each of the ``slices``; their spectrum is then that of
            an r x r core. None for any other matrix.
        stream: reads it in slabs of a given longer side, each number once; None where it can only be read whole.
        half: the same of 16-bit numbers as they are stored; None where they are not, or can't be had so.
    """

    longname: str
    kind: Kind
    shape: Shape
    params: int
    skip: str | None
    slices: Callable[[], list[FloatArray]] = field(repr=False)
    tensor: str = ""
    part: MatrixPart = MatrixPart()
    factors: Callable[[], list[tuple[FloatArray, FloatArray]]] | None = field(default=None, repr=False)
    stream: Callable[[int], Iterator[FloatArray]] | None = field(default=None, repr=False)
    half: HalfSlabs | None = field(default=None, repr=False)

    def slabs(self, most: int) -> Iterator[FloatArray]:
        """The matrix in consecutive pieces along its longer side, so that it is never whole in memory.

        Args:
            most: the longer side of a piece, at most, 1 or more.

        Yields:
            Pieces as stored: (most, columns) where there are more rows than columns or as many, else (rows, most); the
            last one may be shorter. One at a time is in memory, if the caller keeps none. Read whole first
            are only parts that alternate column by column, views that skip numbers, MXFP4 experts, and what is wider
            than long in a source that has no blocks.

        Raises:
            BadModel: the file can't be read, or was changed.
            ValueError: a convolution, whose slices are matrices of their own; or ``most`` is below 1.
        """
        if self.kind == "conv":
            raise ValueError(f"{self.longname} is a convolution: it has slices")
        if most < 1:
            raise ValueError(f"slabs of {most} are none")
        if self.stream is not None:
            yield from self.stream(most)
            return
        (whole,) = self.slices()
        rows, columns = self.shape
        for start in range(0, max(rows, columns), most):
            yield whole[start : start + most] if rows >= columns else whole[:, start : start + most]


def matrices(source: TensorSource, *, embeddings: bool = False) -> Iterator[WeightMatrix]:
    """Every tensor of two or more axes, as matrices, in natural order of names (layer 2 before layer 10).

    ``embeddings`` also analyses token and position embeddings. Tied weights are analysed once; scales of quantised
    weights are left out. Reads headers only. No two have one longname: where ``a.weight`` and ``a_weight`` stand in
    one checkpoint, the second keeps its name in full.
    """
    taken: set[str] = set()
    for matrix in _as_they_are_called(source, embeddings):
        longname = matrix.longname
        while longname in taken:
            longname = _unshortened(matrix) if longname == matrix.longname else f"{longname}_"
        taken.add(longname)
        yield matrix if longname == matrix.longname else replace(matrix, longname=longname)


def _as_they_are_called(source: TensorSource, embeddings: bool) -> Iterator[WeightMatrix]:
    tensors, config = source.tensors, source.config
    ties = ties_of(tensors, config)
    for name in sorted(tensors, key=_natural):
        info = tensors[name]
        if len(info.shape) < 2 or info.scales_of is not None:
            continue
        kind, reason = classify(info, ties, embeddings)
        if reason is not None:
            yield _skipped(info, kind, reason)
        elif kind == "expert":
            yield from _experts(source, info, tensors, config)
        elif kind == "conv":
            yield _convolution(source, info)
        else:
            yield from _two_axes(source, info, kind, config)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """A sort key that compares the numbers in a name as numbers. Zero-padded numbers stay apart by their text."""
    numbers = [part.isascii() and part.isdigit() and len(part) < 10 for part in name.split(".")]
    return [(number, int(part) if number else 0, part) for part, number in zip(name.split("."), numbers, strict=True)]


def _longname(name: str) -> str:
    return name.removesuffix(".weight").removesuffix("_weight")


def _unshortened(matrix: WeightMatrix) -> str:
    """The tensor's own name, with what its parts have added to the shortened one."""
    piece = f".{matrix.part.piece}" if matrix.kind == "expert" else ""
    layout = matrix.part.layout
    return matrix.tensor + piece + ("" if layout is None else f"_{layout.parts[matrix.part.number][0].strip('_')}")


def _skipped(info: TensorInfo, kind: Kind, reason: str) -> WeightMatrix:
    def refuse() -> NoReturn:
        raise BadModel(f"{info.name} is not analysed: {reason}")

    rows = info.shape[0]
    shape = (rows, math.prod(info.shape[1:]))
    return WeightMatrix(_longname(info.name), kind, shape, math.prod(info.shape), reason, refuse, info.name)


def _two_axes(source: TensorSource, info: TensorInfo, kind: Kind, config: Mapping[str, Any]) -> Iterator[WeightMatrix]:
    name, shape = info.name, (info.shape[0], info.shape[1])
    longname = _longname(name)
    whole = Region(name, ((0, shape[0]),), (0, shape[1]))
    layout = layout_of(name, shape, config) if kind == "linear" else None
    if layout is None:
        yield _region(source, longname, kind, whole, MatrixPart())
    else:
        yield from _parts(source, kind, whole, layout, 0, lambda suffix: longname + suffix)


def _parts(
    source: TensorSource, kind: Kind, whole: Region, layout: FusedLayout, piece: int, called: Callable[[str], str]
) -> Iterator[WeightMatrix]:
    """The parts of a fused matrix: each read by itself where its bytes can be, else together."""
    alone = _has_blocks(source, whole.tensor)
    shared = _SharedRead(lambda: _read(source, whole), layout)
    for number, (suffix, _) in enumerate(layout.parts):
        region, part = _part_region(whole, layout, number), MatrixPart(piece, layout, number)
        if region is not None and (alone or (kind != "expert" and layout.block(number) is not None)):
            yield _region(source, called(suffix), kind, region, part)
        else:
            shape = layout.part_shape(whole.shape, number)
            yield _matrix_of(called(suffix), kind, shape, shared.part(number), whole.tensor, part)


def _part_region(whole: Region, layout: FusedLayout, part: int) -> Region | None:
    """Where one part of a fused matrix lies; None for columns that alternate, which are cheaper to read together."""
    runs, (first, last) = layout.runs(part), whole.rows[0]
    if layout.axis == 0:
        return Region(whole.tensor, tuple((first + start, first + stop) for start, stop in runs), whole.columns)
    return Region(whole.tensor, ((first, last),), runs[0]) if len(runs) == 1 else None


def _has_blocks(source: TensorSource, name: str) -> TypeGuard[BlockSource]:
    return isinstance(source, BlockSource) and source.has_blocks(name)


def _region(source: TensorSource, longname: str, kind: Kind, region: Region, part: MatrixPart) -> WeightMatrix:
    """A matrix that lies in its tensor by itself, streamed where the source can."""
    whole = _matrix_of(longname, kind, region.shape, lambda: [_read(source, region)], region.tensor, part)
    if _has_blocks(source, region.tensor):
        blocks = source
        half = source.half_of(region.tensor) if isinstance(source, CodeSource) else None
        if isinstance(source, CodeSource) and half is not None:
            codes = source
            whole = replace(whole, half=HalfSlabs(half, lambda most, room: code_slabs(codes, region, most, room)))
        return replace(whole, stream=lambda most: slabs(blocks, region, most))
    if len(source.tensors[region.tensor].shape) == 2 and region.shape[0] >= region.shape[1]:
        return replace(whole, stream=lambda most: _row_slabs(source, region, most))
    return whole


def _matrix_of(
    longname: str, kind: Kind, shape: Shape, slices: Callable[[], list[FloatArray]], tensor: str, part: MatrixPart
) -> WeightMatrix:
    return WeightMatrix(longname, kind, shape, shape[0] * shape[1], None, slices, tensor, part)


def _read(source: TensorSource, region: Region) -> FloatArray:
    """A region; from a source that has no blocks only one run of whole rows: a tensor, an expert, a block of rows."""
    if _has_blocks(source, region.tensor):
        return read_region(source, region)
    shape = source.tensors[region.tensor].shape
    ((start, stop),) = region.rows
    if (start, stop) == (0, math.prod(shape[:-1])):
        return source.read(region.tensor).reshape(region.shape)
    each = math.prod(shape[1:-1])
    return source.read(region.tensor, start // each, stop // each).reshape(region.shape)


def _row_slabs(source: TensorSource, region: Region, most: int) -> Iterator[FloatArray]:
    ((first, last),) = region.rows
    for start in range(first, last, most):
        yield source.read(region.tensor, start, min(start + most, last))


class _SharedRead:
    """One read for all parts of a fused tensor: it is kept from the first part asked for until the last is given.

    A part that is asked for a second time is read anew, and nothing is kept. For one caller at a time.
    """

    def __init__(self, read: Callable[[], FloatArray], layout: FusedLayout) -> None:
        self._read = read
        self._layout = layout
        self._left = set(range(len(layout.parts)))
        self._tensor: FloatArray | None = None

    def part(self, number: int) -> Callable[[], list[FloatArray]]:
        """The reader of one part."""
        return lambda: [self._take(number)]

    def _take(self, number: int) -> FloatArray:
        if number not in self._left:
            return self._layout.take(self._read(), number)
        tensor = self._read() if self._tensor is None else self._tensor
        self._left.remove(number)
        self._tensor = tensor if self._left else None
        return self._layout.take(tensor, number)


def _experts(
    source: TensorSource, info: TensorInfo, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> Iterator[WeightMatrix]:
    """One matrix for each expert, gate and up projections apart."""
    name = info.name
    if len(info.shape) == 2:
        count = stacked_experts(info, config)
        if count is None:
            yield _skipped(info, "expert", "stacked experts, but the config does not say how many")
            return
        each = (info.shape[0] // count, info.shape[1])
    else:
        count, each = info.shape[0], (info.shape[1], info.shape[2])
    layout = expert_layout(name, each, tensors, config)
    for expert in range(count):
        first, longname = expert * each[0], expert_name(_longname(name), expert)
        whole = Region(name, ((first, first + each[0]),), (0, each[1]))
        if layout is None:
            yield _region(source, longname, "expert", whole, MatrixPart(expert))
        else:
            yield from _parts(source, "expert", whole, layout, expert, partial(part_name, longname))


def _convolution(source: TensorSource, info: TensorInfo) -> WeightMatrix:
    """A convolution of one, two or three dimensions: one (out, in) matrix for each kernel position."""
    out, inputs, *kernel = info.shape

    def slices() -> list[FloatArray]:
        weights = source.read(info.name).reshape(out, inputs, math.prod(kernel))
        return list(np.moveaxis(weights, 2, 0))

    return WeightMatrix(_longname(info.name), "conv", (out, inputs), math.prod(info.shape), None, slices, info.name)
