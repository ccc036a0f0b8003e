"""The weight matrices of a model, found by tensor name and shape, in order, each readable by itself.

Goes by tensors, not by module classes, so that fused experts are not missed; what a tensor is says ``kinds``. Reads
headers only; a matrix's numbers are read when its ``slices()`` or ``slabs()`` are called. Nothing is kept, but a fused
tensor whose parts can't be read apart, until its last part was asked for. Names, splits and what is skipped:
docs/models.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeGuard

import numpy as np

from gpuherd.errors import BadModel
from gpuherd.models.dtypes import FloatArray
from gpuherd.models.experts import down_shape, expert_name, part_name, stacked_experts
from gpuherd.models.fused import Layout, Shape, expert_layout, layout_of
from gpuherd.models.kinds import Kind, classify, tied_heads
from gpuherd.models.region import Region, read_region, slabs
from gpuherd.models.source import BlockSource, TensorInfo, TensorSource


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
        stream: reads it in slabs of a given longer side, each number once; None where it can only be read whole.
    """

    longname: str
    kind: Kind
    shape: Shape
    params: int
    skip: str | None
    slices: Callable[[], list[FloatArray]] = field(repr=False)
    tensor: str = ""
    stream: Callable[[int], Iterator[FloatArray]] | None = field(default=None, repr=False)

    def slabs(self, most: int) -> Iterator[FloatArray]:
        """The matrix in consecutive pieces along its longer side, so that it is never whole in memory.

        Args:
            most: the longer side of a piece, at most, 1 or more.

        Yields:
            Pieces as stored: (most, columns) where there are more rows than columns or as many, else (rows, most); the
            last one may be shorter. One at a time is in memory, if the caller keeps none. Only a merged adapter's
            matrices, views that skip numbers, and parts that alternate column by column are read whole first.

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

    ``embeddings`` also analyses token and position embeddings. Tied weights are analysed once. Reads headers only.
    """
    tensors, config = source.tensors, source.config
    tied = tied_heads(tensors, config)
    for name in sorted(tensors, key=_natural):
        info = tensors[name]
        if len(info.shape) < 2:
            continue
        kind, reason = classify(info, tied, embeddings)
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


def _skipped(info: TensorInfo, kind: Kind, reason: str) -> WeightMatrix:
    def refuse() -> NoReturn:
        raise BadModel(f"{info.name} is not analysed: {reason}")

    rows = info.shape[0]
    shape = (rows, math.prod(info.shape[1:]))
    return WeightMatrix(_longname(info.name), kind, shape, math.prod(info.shape), reason, refuse, info.name)


def _two_axes(source: TensorSource, info: TensorInfo, kind: Kind, config: Mapping[str, Any]) -> Iterator[WeightMatrix]:
    name, shape = info.name, (info.shape[0], info.shape[1])
    longname = _longname(name)
    layout = layout_of(name, shape, config) if kind == "linear" else None
    if layout is None:
        yield _region(source, longname, kind, Region(name, ((0, shape[0]),), (0, shape[1])))
        return
    shared = _SharedRead(lambda: source.read(name), layout)
    for number, (suffix, _) in enumerate(layout.parts):
        region = _part_region(name, 0, shape, layout, number)
        if region is not None and (_has_blocks(source, name) or layout.block(number) is not None):
            yield _region(source, longname + suffix, kind, region)
        else:
            yield _whole(longname + suffix, kind, layout.part_shape(shape, number), shared.part(number), name)


def _part_region(name: str, first: int, shape: Shape, layout: Layout, part: int) -> Region | None:
    """Where one part of a fused matrix lies that begins in row ``first`` of its tensor; None for columns that
    alternate, whose parts are cheaper to read together."""
    runs = layout.runs(part)
    if layout.axis == 0:
        return Region(name, tuple((first + start, first + stop) for start, stop in runs), (0, shape[1]))
    return Region(name, ((first, first + shape[0]),), runs[0]) if len(runs) == 1 else None


def _has_blocks(source: TensorSource, name: str) -> TypeGuard[BlockSource]:
    return isinstance(source, BlockSource) and source.has_blocks(name)


def _region(source: TensorSource, longname: str, kind: Kind, region: Region) -> WeightMatrix:
    """A matrix that lies in one tensor by itself: streamed where the source can, else read by rows."""
    shape = region.shape
    if _has_blocks(source, region.tensor):
        blocks = source
        return WeightMatrix(
            longname,
            kind,
            shape,
            shape[0] * shape[1],
            None,
            lambda: [read_region(blocks, region)],
            region.tensor,
            lambda most: slabs(blocks, region, most),
        )
    return _whole(longname, kind, shape, lambda: [_rows(source, region)], region.tensor)


def _whole(
    longname: str, kind: Kind, shape: Shape, slices: Callable[[], list[FloatArray]], tensor: str
) -> WeightMatrix:
    return WeightMatrix(longname, kind, shape, shape[0] * shape[1], None, slices, tensor)


def _rows(source: TensorSource, region: Region) -> FloatArray:
    """Reads whole rows of a tensor, in one run, by entries of its first axis: an expert, or a block of rows."""
    shape = source.tensors[region.tensor].shape
    ((start, stop),) = region.rows
    if (start, stop) == (0, math.prod(shape[:-1])):
        return source.read(region.tensor).reshape(region.shape)
    each = math.prod(shape[1:-1])
    return source.read_part(region.tensor, start // each, stop // each).reshape(region.shape)


class _SharedRead:
    """One read for all parts of a fused tensor: it is kept from the first part asked for until the last is given.

    A part that is asked for a second time is read anew, and nothing is kept. For one caller at a time.
    """

    def __init__(self, read: Callable[[], FloatArray], layout: Layout) -> None:
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
    layout = expert_layout(name, each, down_shape(name, tensors), config)
    for expert in range(count):
        first, longname = expert * each[0], expert_name(_longname(name), expert)
        whole = Region(name, ((first, first + each[0]),), (0, each[1]))
        if layout is None:
            yield _region(source, longname, "expert", whole)
            continue
        shared = _SharedRead(_reader(source, whole), layout)
        for number, (suffix, _) in enumerate(layout.parts):
            called, region = part_name(longname, suffix), _part_region(name, first, each, layout, number)
            if region is not None and _has_blocks(source, name):
                yield _region(source, called, "expert", region)
            else:
                yield _whole(called, "expert", layout.part_shape(each, number), shared.part(number), name)


def _reader(source: TensorSource, region: Region) -> Callable[[], FloatArray]:
    return lambda: read_region(source, region) if _has_blocks(source, region.tensor) else _rows(source, region)


def _convolution(source: TensorSource, info: TensorInfo) -> WeightMatrix:
    """A convolution of one, two or three dimensions: one (out, in) matrix for each kernel position."""
    out, inputs, *kernel = info.shape

    def slices() -> list[FloatArray]:
        weights = source.read(info.name).reshape(out, inputs, math.prod(kernel))
        return list(np.moveaxis(weights, 2, 0))

    return WeightMatrix(_longname(info.name), "conv", (out, inputs), math.prod(info.shape), None, slices, info.name)
