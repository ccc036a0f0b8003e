"""The weight matrices of a model, found by tensor name and shape, in order, each readable by itself.

Goes by tensors, not by module classes, so that fused experts are not missed. Reads headers only; a matrix's numbers
are read when its ``slices()`` is called. Nothing is kept, but a fused tensor until its last part was asked for. Names,
splits and what is skipped: docs/models.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import numpy as np

from gpuherd.errors import BadModel
from gpuherd.models.dtypes import READABLE, FloatArray
from gpuherd.models.fused import Layout, Shape, expert_layout, layout_of
from gpuherd.models.source import TensorInfo, TensorSource

Kind = Literal["linear", "expert", "conv", "embedding", "other"]

_INPUT_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared|tokens_embed|word_embedding)\.weight"
)
_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:[\w-]*embed_tokens|wte|wpe|tok_embeddings|embed_in|shared|tokens_embed|positions_embed|"
    r"word_embedding|embed_positions|[\w-]*embeddings?|relative_attention_bias)\.weight"
)
_HEAD = re.compile(
    r"(?:.*\.)?(?:lm_head|embed_out|output_layer|output|predictions\.decoder|lm_head\.decoder|generator_lm_head)\.weight"
)
# Matrices whose names don't end in .weight: torch.nn.MultiheadAttention's.
_BARE_MATRIX = re.compile(r"(?:.*\.)?(?:in_proj_weight|[qkv]_proj_weight)")
# More experts or kernel positions than this in one tensor are no mixture and no convolution; each is a matrix to us.
MAX_PIECES = 1 << 16
_EXPERTS = re.compile(r"(?:.*\.)?(?:experts|moe|block_sparse_moe)\.(?:.*\.)?[^.]+")
_STACKED = re.compile(r"(?:.*\.)?experts\.mlp\.(?:w1|v1|w2)")


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of its stored tensor a matrix is.

    Attributes:
        piece: number of the expert in a fused mixture; 0 where the tensor has two axes.
        layout: how the tensor, or each of its experts, holds several matrices; None where it is one.
        number: which of these.
    """

    piece: int = 0
    layout: Layout | None = None
    number: int = 0


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
    """

    longname: str
    kind: Kind
    shape: Shape
    params: int
    skip: str | None
    slices: Callable[[], list[FloatArray]] = field(repr=False)
    tensor: str = ""
    part: Part = Part()
    factors: Callable[[], list[tuple[FloatArray, FloatArray]]] | None = field(default=None, repr=False)

    def slabs(self, most: int) -> Iterator[FloatArray]:
        """The matrix in consecutive pieces along its longer side, so that it is never whole in memory.

        Args:
            most: the longer side of a piece, at most, 1 or more.

        Yields:
            Pieces as stored: (most, columns) where there are more rows than columns or as many, else (rows, most); the
            last one may be shorter. One at a time is in memory, if the caller keeps none.

        Raises:
            ValueError: a convolution, whose slices are matrices of their own.
        """
        if self.kind == "conv":
            raise ValueError(f"{self.longname} is a convolution: it has slices")
        (whole,) = self.slices()
        rows, columns = self.shape
        for start in range(0, max(rows, columns), most):
            yield whole[start : start + most] if rows >= columns else whole[:, start : start + most]


def matrices(source: TensorSource, *, embeddings: bool = False) -> Iterator[WeightMatrix]:
    """Every tensor of two or more axes, as matrices, in natural order of names (layer 2 before layer 10).

    ``embeddings`` also analyses token and position embeddings. Tied weights are analysed once. Reads headers only.
    """
    tensors, config = source.tensors, source.config
    tied = _tied_heads(tensors, config)
    for name in sorted(tensors, key=_natural):
        info = tensors[name]
        if len(info.shape) < 2:
            continue
        kind, reason = _classify(info, tied, embeddings)
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


def _tied_heads(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Mapping[str, str | None]:
    """For each output head that the config says is the input embedding: the embedding's name, None if only the head is
    in the file (it then is the embedding)."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    if not any(part.get("tie_word_embeddings") is True for part in parts):
        return {}
    inputs = {info.shape: name for name, info in tensors.items() if _INPUT_EMBEDDING.fullmatch(name)}
    return {
        name: inputs.get(info.shape)
        for name, info in tensors.items()
        if _HEAD.fullmatch(name) and (info.shape in inputs or not inputs)
    }


def _classify(info: TensorInfo, tied: Mapping[str, str | None], embeddings: bool) -> tuple[Kind, str | None]:
    """What the tensor is, and why it is not analysed (None if it is)."""
    name, axes = info.name, len(info.shape)
    if info.dtype not in READABLE:
        return "other", f"stored as {info.dtype}, no weights"
    if 0 in info.shape:
        return "other", "empty"
    if name.endswith("bias"):
        return "other", "a bias"
    same_as = info.shares or tied.get(name)
    if same_as:
        return "other", f"tied to {same_as}, counted there"
    if axes == 2 and (_EMBEDDING.fullmatch(name) or name in tied):
        return "embedding", None if embeddings else "embedding (use --embeddings)"
    if _EXPERTS.fullmatch(name) and axes == 3:
        return ("expert", None) if info.shape[0] <= MAX_PIECES else ("other", f"{info.shape[0]} experts, too many")
    if _STACKED.fullmatch(name):
        return "expert", None
    if axes == 2 and (name.endswith(".weight") or name == "weight" or _BARE_MATRIX.fullmatch(name)):
        return "linear", None
    if axes in (3, 4, 5) and name.endswith("weight"):
        positions = math.prod(info.shape[2:])
        return ("conv", None) if positions <= MAX_PIECES else ("other", f"{positions} kernel positions, too many")
    return "other", "a parameter or buffer that no rule knows as a weight matrix"


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
        yield _matrix(longname, kind, shape, lambda: [source.read(name)], name)
        return
    shared = _SharedRead(lambda: source.read(name), layout)
    for number, (suffix, _) in enumerate(layout.parts):
        shape_of_part, block = layout.part_shape(shape, number), layout.block(number)
        read = shared.part(number) if block is None else _rows(source, name, *block)
        yield replace(_matrix(longname + suffix, kind, shape_of_part, read, name), part=Part(0, layout, number))


def _matrix(
    longname: str, kind: Kind, shape: Shape, slices: Callable[[], list[FloatArray]], tensor: str
) -> WeightMatrix:
    return WeightMatrix(longname, kind, shape, shape[0] * shape[1], None, slices, tensor)


def _rows(source: TensorSource, name: str, start: int, stop: int) -> Callable[[], list[FloatArray]]:
    """Reads a block of rows without the others."""
    return lambda: [source.read_part(name, start, stop)]


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
        count = _stacked_experts(info, config)
        if count is None:
            yield _skipped(info, "expert", "stacked experts, but the config does not say how many")
            return
        each, rows_each = (info.shape[0] // count, info.shape[1]), info.shape[0] // count
    else:
        count, each, rows_each = info.shape[0], (info.shape[1], info.shape[2]), 1
    layout = expert_layout(name, each, _down_shape(name, tensors), config)
    for expert in range(count):
        read = _expert(source, name, expert * rows_each, (expert + 1) * rows_each, each)
        longname = _expert_name(name, expert)
        if layout is None:
            yield replace(_matrix(longname, "expert", each, _listed(read), name), part=Part(expert))
            continue
        shared = _SharedRead(read, layout)
        for number, (suffix, _) in enumerate(layout.parts):
            shape = layout.part_shape(each, number)
            fused = _matrix(_renamed(longname, suffix), "expert", shape, shared.part(number), name)
            yield replace(fused, part=Part(expert, layout, number))


def _stacked_experts(info: TensorInfo, config: Mapping[str, Any]) -> int | None:
    """How many experts lie below each other in a 2-D tensor (DBRX)."""
    ffn = config.get("ffn_config")
    count = ffn.get("moe_num_experts") if isinstance(ffn, Mapping) else None
    return count if type(count) is int and 0 < count <= MAX_PIECES and info.shape[0] % count == 0 else None


def _down_shape(name: str, tensors: Mapping[str, TensorInfo]) -> Shape | None:
    """The shape of the down projection that belongs to a fused gate and up projection."""
    other = name.replace("gate_up_proj", "down_proj").replace("input_linear", "output_linear")
    down = tensors.get(other)
    return (down.shape[1], down.shape[2]) if other != name and down is not None and len(down.shape) == 3 else None


def _expert_name(name: str, expert: int) -> str:
    """As models with separate experts call them: ``experts.gate_up_proj`` gives ``experts.3.gate_up_proj``."""
    longname = _longname(name)
    before, experts, after = longname.rpartition("experts.")
    return f"{before}{experts}{expert}.{after}" if experts else f"{longname}.{expert}"


def _renamed(longname: str, suffix: str) -> str:
    """``...gate_up_proj`` becomes ``...gate_proj``; names of another form get the part added."""
    if longname.endswith("gate_up_proj"):
        return f"{longname.removesuffix('gate_up_proj')}{suffix}_proj"
    return f"{longname}_{suffix}"


def _expert(source: TensorSource, name: str, start: int, stop: int, shape: Shape) -> Callable[[], FloatArray]:
    return lambda: source.read_part(name, start, stop).reshape(shape)


def _listed(read: Callable[[], FloatArray]) -> Callable[[], list[FloatArray]]:
    return lambda: [read()]


def _convolution(source: TensorSource, info: TensorInfo) -> WeightMatrix:
    """A convolution of one, two or three dimensions: one (out, in) matrix for each kernel position."""
    out, inputs, *kernel = info.shape

    def slices() -> list[FloatArray]:
        weights = source.read(info.name).reshape(out, inputs, math.prod(kernel))
        return list(np.moveaxis(weights, 2, 0))

    return WeightMatrix(_longname(info.name), "conv", (out, inputs), math.prod(info.shape), None, slices, info.name)
