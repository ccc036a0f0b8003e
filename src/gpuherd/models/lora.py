"""The arithmetic of LoRA: W + s B A, with s = alpha / r (LoRA) or alpha / sqrt(r) (rsLoRA), and DoRA's rescaling.

LoRA: Hu et al. 2021; rsLoRA: Kalajdzievski 2023; DoRA: Liu et al. 2024, W' = m (W + s B A) / |W + s B A| with the norm
of each output's weights. Every case becomes ``left @ right`` in the shape in which the base stores the weight, so that
any block of rows can be merged by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpuherd.errors import BadModel
from gpuherd.models.dtypes import FloatArray
from gpuherd.models.source import TensorInfo
from gpuherd.models.stored import StoredTensor, read_stored

Float64 = npt.NDArray[np.float64]
# Two factors: their product is the update of a matrix.
Product = tuple[FloatArray, FloatArray]

PANEL_BYTES = 64 << 20
# model_type of architectures whose fused experts PEFT knows to be stored (experts, in, out).
_TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "openai_privacy_filter", "aria", "aria_text"})


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


class Edit(Protocol):
    """What an adapter does to one tensor of the base."""

    def check(self, info: TensorInfo) -> None:
        """Raises BadModel when the adapter does not fit a tensor of this shape."""
        ...

    def apply(self, tensor: FloatArray, start: int) -> FloatArray:
        """The merged tensor, or its part from row ``start`` on; ``tensor`` may be changed in place."""
        ...


@dataclass(frozen=True, slots=True)
class MatrixEdit:
    """W + s left right on a Linear, Conv1D, convolution or embedding.

    ``transposed``: the stored weight is (in, out): Conv1D and embeddings (whose "in" is the vocabulary).
    """

    where: str
    factors: Factors
    transposed: bool

    @property
    def needs_squares(self) -> bool:
        """Whether a part of the tensor can't be merged without a look at all of it: DoRA's norms over columns."""
        return self.factors.magnitude is not None and self.transposed

    def check(self, info: TensorInfo) -> None:
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

    def squares(self, tensor: FloatArray, start: int) -> Float64:
        """The sums of squares of each column of W + s B A over these rows, from ``start`` on; changes the tensor."""
        return _column_squares(self._add(tensor, start))

    def apply(self, tensor: FloatArray, start: int, squares: Float64 | None = None) -> FloatArray:
        """See ``Edit``. ``squares``: of all columns, over all rows; needed for a part if the edit ``needs_squares``."""
        rows = self._add(tensor, start)
        if self.factors.magnitude is not None:
            magnitude = read_stored(self.factors.magnitude).reshape(-1)
            if self.transposed:
                _rescale_columns(rows, magnitude, _column_squares(rows) if squares is None else squares)
            else:
                _rescale_rows(rows, magnitude[start : start + len(rows)])
        return tensor

    def without_rescaling(self) -> MatrixEdit:
        """The edit that only adds s B A."""
        return replace(self, factors=replace(self.factors, magnitude=None))

    def products(self) -> list[Product]:
        """s B A as it is stored, as factors in float64: one pair, or one for each kernel position of a convolution."""
        left, right = self._sides()
        scaled = left * np.float64(self.factors.scaling)
        positions = math.prod(self.factors.a.info.shape[2:])
        each = right.astype(np.float64).reshape(len(right), -1, positions)
        return [(scaled, np.ascontiguousarray(each[:, :, position])) for position in range(positions)]

    def _sides(self) -> tuple[FloatArray, FloatArray]:
        rank = self.factors.rank
        a = read_stored(self.factors.a).reshape(rank, -1)
        b = read_stored(self.factors.b).reshape(-1, rank)
        return (a.T, b.T) if self.transposed else (b, a)

    def _add(self, tensor: FloatArray, start: int) -> FloatArray:
        """Adds s B A in place. Returns the tensor as rows."""
        rows = tensor.reshape(tensor.shape[0], -1)
        left, right = self._sides()
        _add_product(rows, left[start : start + len(rows)], right, self.factors.scaling)
        return rows


def _add_product(rows: FloatArray, left: FloatArray, right: FloatArray, scaling: float) -> None:
    """rows += scaling left right, in panels of rows, in place."""
    step = max(1, PANEL_BYTES // max(1, rows.shape[1] * rows.itemsize))
    right = right.astype(rows.dtype, copy=False)
    for start in range(0, len(rows), step):
        panel = left[start : start + step].astype(rows.dtype, copy=False) @ right
        panel *= rows.dtype.type(scaling)
        rows[start : start + step] += panel


def _panel_rows(rows: FloatArray) -> int:
    return max(1, PANEL_BYTES // max(1, 8 * int(rows.shape[1])))


def _column_squares(rows: FloatArray) -> Float64:
    """The sum of squares of each column, in float64."""
    squares = np.zeros(rows.shape[1])
    step = _panel_rows(rows)
    for start in range(0, len(rows), step):
        panel = rows[start : start + step].astype(np.float64)
        squares += np.einsum("ij,ij->j", panel, panel)
    return squares


def _rescale_rows(rows: FloatArray, magnitude: FloatArray) -> None:
    """DoRA where each output is a row: gives it the length ``magnitude``, in place."""
    step = _panel_rows(rows)
    for start in range(0, len(rows), step):
        panel = rows[start : start + step].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = magnitude[start : start + step] / np.sqrt(np.einsum("ij,ij->i", panel, panel))
        rows[start : start + step] *= factor.astype(rows.dtype)[:, None]


def _rescale_columns(rows: FloatArray, magnitude: FloatArray, squares: Float64) -> None:
    """DoRA where each output is a column, whose sum of squares over all rows is ``squares``, in place."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rows *= (magnitude / np.sqrt(squares)).astype(rows.dtype)[None, :]


def matrix_edit(where: str, info: TensorInfo, factors: Factors, stores_transpose: bool) -> MatrixEdit:
    """The edit of a weight of two or more axes.

    Whether it is stored transposed is told by the shapes; only for a square weight by ``stores_transpose``.
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
        if info.shape != self.bias.info.shape:
            raise BadModel(f"the trained bias {self.bias.info.name!r} does not fit {info.name!r} of shape {info.shape}")

    def apply(self, tensor: FloatArray, start: int) -> FloatArray:
        tensor += (read_stored(self.bias)[start : start + len(tensor)] * self.scaling).astype(tensor.dtype)
        return tensor


def bias_edit(bias: StoredTensor, factors: Factors) -> BiasEdit:
    """The edit of a bias vector."""
    return BiasEdit(bias, factors.scaling)


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

    def check(self, info: TensorInfo) -> None:
        """The shapes were compared when the parameter was chosen."""

    def apply(self, tensor: FloatArray, start: int) -> FloatArray:
        for number in range(len(tensor)):
            left, right = self._sides(start + number)
            _add_product(tensor[number], left, right, self.factors.scaling)
        return tensor

    def product(self, expert: int) -> Product:
        """s B A of one expert as it is stored, as factors in float64."""
        left, right = self._sides(expert)
        return left * np.float64(self.factors.scaling), right.astype(np.float64)

    def _sides(self, expert: int) -> tuple[FloatArray, FloatArray]:
        rank = self.factors.rank
        a = read_stored(self.factors.a, expert * rank, (expert + 1) * rank)
        b = _read_and_keep(self.factors.b)
        b = b.reshape(b.shape[0], rank, self.experts)[:, :, expert]
        return (a.T, b.T) if self.transposed else (b, a)


@lru_cache(maxsize=1)
def _read_and_keep(tensor: StoredTensor) -> FloatArray:
    """The factor B of all experts, which lie between each other in it: read once for all of them."""
    b = read_stored(tensor)
    b.setflags(write=False)
    return b


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
