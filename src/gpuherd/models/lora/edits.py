"""The arithmetic of LoRA: W + s B A, with s = alpha / r (LoRA) or alpha / sqrt(r) (rsLoRA), and DoRA's rescaling.

LoRA: Hu et al. 2021; rsLoRA: Kalajdzievski 2023; DoRA: Liu et al. 2024, W' = m (W + s B A) / |W + s B A| with the norm
of each output's weights. Every case becomes ``left @ right`` in the shape in which the base stores the weight, so that
any block of rows can be merged by itself.

Of the experts of a mixture PEFT keeps the factors fused in two matrices: A of all experts, and B of all. Which
parameter of the base they fit is known from their shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.stored import StoredTensor
from gpuherd.models.tensors.source import FloatArray, Run, TensorInfo

Float64 = npt.NDArray[np.float64]
# Two factors: their product is the update of a matrix.
Product = tuple[FloatArray, FloatArray]

PANEL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Factors:
    """One module's LoRA tensors and settings. ``a`` is (r, in), ``b`` is (out, r), of embeddings too."""

    a: StoredTensor
    b: StoredTensor
    magnitude: StoredTensor | None
    rank: int
    alpha: float
    rank_stabilised: bool
    embedding: bool

    @property
    def scaling(self) -> float:
        """s in W + s B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


@lru_cache(maxsize=3)
def read_factor(tensor: StoredTensor) -> FloatArray:
    """A factor, kept while its module is merged: every block and every expert needs it anew."""
    factor = tensor.read()
    factor.setflags(write=False)
    return factor


@dataclass(frozen=True, slots=True)
class MatrixEdit:
    """W + s left right on a Linear, Conv1D, convolution or embedding.

    ``transposed``: the stored weight is (in, out): Conv1D and embeddings (whose "in" is the vocabulary).
    """

    where: str
    factors: Factors
    transposed: bool

    @property
    def has_blocks(self) -> bool:
        """Whether ``apply_block`` can be called: not of a convolution."""
        return len(self.factors.a.info.shape) == 2

    def needs_squares(self, shape: tuple[int, ...], rows: Run, columns: Run) -> bool:
        """Whether a block can't be merged without a look at others: DoRA's norms run over all inputs of an output."""
        inputs, size = (rows, shape[0]) if self.transposed else (columns, math.prod(shape[1:]))
        return self.factors.magnitude is not None and inputs != (0, size)

    def check(self, info: TensorInfo) -> None:
        """Raises BadModel when the adapter does not fit a tensor of this shape."""
        a, b = self.factors.a.info.shape, self.factors.b.info.shape
        fits = len(a) >= 2 and len(b) >= 2 and a[0] == b[1] == self.factors.rank and math.prod(b[2:]) == 1
        if fits and self.transposed:
            fits = info.shape == (a[1], b[0])
        elif fits:
            fits = info.shape == (b[0], *a[1:])
        if not fits:
            raise BadModel(
                f"{self.where}: factors {a} and {b} with rank {self.factors.rank} do not fit the base tensor "
                f"{info.name!r} of shape {info.shape}; is this the right base model?"
            )
        magnitude = self.factors.magnitude
        if magnitude is not None and math.prod(magnitude.info.shape) != b[0]:
            raise BadModel(f"{self.where}: the DoRA magnitudes {magnitude.info.shape} do not fit {info.name!r}")

    def apply(self, tensor: FloatArray, start: int) -> FloatArray:
        """The merged tensor, or its part from row ``start`` on; ``tensor`` is changed. For a part whose edit
        ``needs_squares`` there is ``apply_block``."""
        rows = tensor.reshape(tensor.shape[0], -1)
        self.apply_block(rows, (start, start + len(rows)), (0, rows.shape[1]))
        return tensor

    def apply_block(self, block: FloatArray, rows: Run, columns: Run, squares: Float64 | None = None) -> FloatArray:
        """The merged block of these rows and columns, in place. ``squares``: of each output, where it
        ``needs_squares``."""
        self._add(block, rows, columns)
        if self.factors.magnitude is not None:
            first, last = columns if self.transposed else rows
            magnitudes = read_factor(self.factors.magnitude).reshape(-1)[first:last]
            lengths = np.sqrt(_squares(block, self._axis) if squares is None else squares[first:last])
            with np.errstate(divide="ignore", invalid="ignore"):
                factor = (magnitudes / lengths).astype(block.dtype)
            block *= factor[None, :] if self.transposed else factor[:, None]
        return block

    def add_squares(self, total: Float64, rows: FloatArray, start: int) -> None:
        """Adds to ``total``, of each output, the squares of W + s B A over these whole rows, which are changed."""
        self._add(rows, (start, start + len(rows)), (0, rows.shape[1]))
        if self.transposed:
            total += _squares(rows, self._axis)
        else:
            total[start : start + len(rows)] = _squares(rows, self._axis)

    def without_rescaling(self) -> MatrixEdit:
        """The edit that only adds s B A."""
        return replace(self, factors=replace(self.factors, magnitude=None))

    def products(self) -> list[Product]:
        """s B A as it is stored, as factors in float64: one pair, or one for each kernel position of a convolution."""
        scaled, right = _product(self._sides(), self.factors)
        positions = math.prod(self.factors.a.info.shape[2:])
        each = right.reshape(len(right), -1, positions)
        return [(scaled, np.ascontiguousarray(each[:, :, position])) for position in range(positions)]

    def _sides(self) -> tuple[FloatArray, FloatArray]:
        rank = self.factors.rank
        a = read_factor(self.factors.a).reshape(rank, -1)
        b = read_factor(self.factors.b).reshape(-1, rank)
        return (a.T, b.T) if self.transposed else (b, a)

    @property
    def _axis(self) -> Literal[0, 1]:
        """The axis of the inputs, over which the norms run."""
        return 0 if self.transposed else 1

    def _add(self, block: FloatArray, rows: Run, columns: Run) -> None:
        left, right = self._sides()
        add_product(block, left[slice(*rows)], right[:, slice(*columns)], self.factors.scaling)


def add_product(rows: FloatArray, left: FloatArray, right: FloatArray, scaling: float) -> None:
    """rows += scaling left right, in panels of rows, in place."""
    step = max(1, PANEL_BYTES // max(1, rows.shape[1] * rows.itemsize))
    right = right.astype(rows.dtype, copy=False)
    for start in range(0, len(rows), step):
        panel = left[start : start + step].astype(rows.dtype, copy=False) @ right
        panel *= rows.dtype.type(scaling)
        rows[start : start + step] += panel


def _squares(rows: FloatArray, axis: Literal[0, 1]) -> Float64:
    """The sum of squares along an axis, in float64, in panels of rows."""
    sums = np.zeros(rows.shape[1 - axis])
    step = max(1, PANEL_BYTES // max(1, 8 * int(rows.shape[1])))
    for start in range(0, len(rows), step):
        panel = rows[start : start + step].astype(np.float64)
        if axis == 0:
            sums += np.einsum("ij,ij->j", panel, panel)
        else:
            sums[start : start + step] = np.einsum("ij,ij->i", panel, panel)
    return sums


def matrix_edit(where: str, info: TensorInfo, factors: Factors, stores_transpose: bool) -> MatrixEdit:
    """The edit of a weight of two or more axes.

    Whether it is stored transposed is known from the shapes; only for a square weight by ``stores_transpose``.
    """
    if factors.embedding:
        return MatrixEdit(where, factors, transposed=True)
    a, b = factors.a.info.shape, factors.b.info.shape
    if len(info.shape) == 2 and info.shape[0] != info.shape[1] and len(a) == len(b) == 2:
        return MatrixEdit(where, factors, transposed=info.shape == (a[1], b[0]))
    return MatrixEdit(where, factors, transposed=stores_transpose and len(info.shape) == 2)


@dataclass(frozen=True, slots=True)
class BiasEdit:
    """bias + s (bias of B), as PEFT does with ``lora_bias``."""

    bias: StoredTensor
    scaling: float

    def check(self, info: TensorInfo) -> None:
        """As that of ``MatrixEdit``."""
        if info.shape != self.bias.info.shape:
            raise BadModel(f"the trained bias {self.bias.info.name!r} does not fit {info.name!r} of shape {info.shape}")

    def apply(self, tensor: FloatArray, start: int) -> FloatArray:
        tensor += (self.bias.read()[start : start + len(tensor)] * self.scaling).astype(tensor.dtype)
        return tensor


# ---- experts of a mixture --------------------------------------------------------------------------------------------

# model_type of architectures whose fused experts PEFT knows to be stored (experts, in, out).
_TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "openai_privacy_filter", "aria", "aria_text"})


@dataclass(frozen=True, slots=True)
class ExpertEdit:
    """W[e] + s B[e] A[e] on fused experts, (experts, out, in) or, ``transposed``, (experts, in, out).

    PEFT keeps all experts' factors in two matrices: A is (experts r, in) with the experts behind each other, B is
    (out, r experts) with the experts innermost.
    """

    where: str
    factors: Factors
    experts: int
    transposed: bool

    def apply(self, tensor: FloatArray, start: int) -> FloatArray:
        for number in range(len(tensor)):
            left, right = self._sides(start + number)
            add_product(tensor[number], left, right, self.factors.scaling)
        return tensor

    @property
    def has_blocks(self) -> bool:
        """``apply_block`` can be called, of all experts' rows below each other."""
        return True

    def apply_block(self, block: FloatArray, rows: Run, columns: Run) -> FloatArray:
        """The merged block of these rows (through all experts) and columns, in place."""
        each = (self.factors.a if self.transposed else self.factors.b).info.shape[1 if self.transposed else 0]
        for expert in range(rows[0] // each, -(-rows[1] // each)):
            first, last = max(rows[0], expert * each), min(rows[1], (expert + 1) * each)
            left, right = self._sides(expert)
            part = left[first - expert * each : last - expert * each]
            add_product(block[first - rows[0] : last - rows[0]], part, right[:, slice(*columns)], self.factors.scaling)
        return block

    def product(self, expert: int) -> Product:
        """s B A of one expert as it is stored, as factors in float64."""
        return _product(self._sides(expert), self.factors)

    def _sides(self, expert: int) -> tuple[FloatArray, FloatArray]:
        b, a = _of_expert(self.factors, self.experts, expert)
        return (a.T, b.T) if self.transposed else (b, a)


def _product(sides: Product, factors: Factors) -> Product:
    """The two factors in float64, scaled."""
    return sides[0] * np.float64(factors.scaling), sides[1].astype(np.float64)


def _of_expert(factors: Factors, experts: int, expert: int) -> tuple[FloatArray, FloatArray]:
    """One expert's B (out, r) and A (r, in), from the factors of all."""
    a = factors.a.read(expert * factors.rank, (expert + 1) * factors.rank)
    b = read_factor(factors.b)
    return b.reshape(b.shape[0], factors.rank, experts)[:, :, expert], a


@dataclass(frozen=True, slots=True)
class OneExpertEdit:
    """W + (s B[e] A[e])[rows] on one expert's own matrix, (out, in), by factors for all experts fused.

    transformers fuses in memory what most checkpoints store apart, and PEFT's factors are those of the fused parameter
    (see ``ExpertEdit``). ``rows``: which of its outputs these are; its gate and up projections lie below each other.
    """

    where: str
    factors: Factors
    experts: int
    expert: int
    rows: Run

    def apply(self, tensor: FloatArray, start: int) -> FloatArray:
        left, right = self._sides()
        add_product(tensor, left[start : start + len(tensor)], right, self.factors.scaling)
        return tensor

    def product(self) -> Product:
        """s B A of this matrix, as factors in float64."""
        return _product(self._sides(), self.factors)

    def _sides(self) -> tuple[FloatArray, FloatArray]:
        b, a = _of_expert(self.factors, self.experts, self.expert)
        return b[slice(*self.rows)], a


# What an adapter does to one tensor of the base. ``apply`` gives the merged tensor, or its part from a row on. Experts'
# shapes are compared when their tensors are chosen; the other edits ``check`` the tensor.
Edit = MatrixEdit | BiasEdit | ExpertEdit | OneExpertEdit


def edits_of_experts_apart(
    where: str, factors: Factors, parameters: Iterable[Sequence[Sequence[str]]], tensors: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, OneExpertEdit]]:
    """The edits of the experts' own matrices, by the fused factors of one parameter of theirs; with their names.

    Args:
        where: the module, for messages.
        factors: of all experts together.
        parameters: for each parameter that is meant, for each expert, the matrices that make it, below each other.
        tensors: the base's.
    """
    a, b = factors.a.info.shape, factors.b.info.shape
    for experts in parameters:
        shapes = {tuple(tensors[name].shape for name in names) for names in experts}
        matrices = next(iter(shapes))
        if len(shapes) != 1 or any(len(shape) != 2 for shape in matrices) or factors.magnitude is not None:
            continue
        outputs = sum(shape[0] for shape in matrices)
        if a != (len(experts) * factors.rank, matrices[0][1]) or b != (outputs, len(experts) * factors.rank):
            continue
        for expert, names in enumerate(experts):
            first = 0
            for name in names:
                rows = (first, first + tensors[name].shape[0])
                yield name, OneExpertEdit(where, factors, len(experts), expert, rows)
                first = rows[1]
        return
    raise BadModel(
        f"{where} finds no experts in the base model that its factors {a} and {b} fit; is this the right base model?"
    )


def expert_edit(
    where: str, config: Mapping[str, Any], factors: Factors, candidates: Mapping[str, TensorInfo]
) -> tuple[str, ExpertEdit]:
    """The edit of one of the fused expert parameters of a module: the one that the factors fit. With its name."""
    a, b = factors.a.info.shape, factors.b.info.shape
    known_transposed = str(config.get("model_type")) in _TRANSPOSED_EXPERTS
    fitting: list[tuple[str, ExpertEdit]] = []
    for name, info in candidates.items():
        if len(info.shape) != 3 or len(a) != 2 or len(b) != 2 or factors.magnitude is not None:
            continue
        experts, rows, columns = info.shape
        if not a[0] == b[1] == experts * factors.rank:
            continue
        inputs, outputs = (rows, columns) if known_transposed else (columns, rows)
        if (a[1], b[0]) == (inputs, outputs):
            fitting.append((name, ExpertEdit(where, factors, experts, known_transposed)))
    if len(fitting) != 1:
        raise BadModel(
            f"{where} finds no weight in the base model that its factors {a} and {b} fit; is this the right base "
            "model? (An adapter of fused experts needs a base that stores them fused.)"
        )
    return fitting[0]
