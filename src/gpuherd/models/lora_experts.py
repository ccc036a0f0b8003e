"""LoRA on the experts of a mixture, whose factors PEFT keeps fused in two matrices: A of all experts, and B of all.

Which parameter of the base the factors fit is told by their shapes. The arithmetic of one product is ``lora``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuherd.errors import BadModel
from gpuherd.models.dtypes import FloatArray
from gpuherd.models.lora import Factors, Product, add_product, read_factor
from gpuherd.models.source import Run, TensorInfo
from gpuherd.models.stored import read_stored

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

    def check(self, info: TensorInfo) -> None:
        """The shapes were compared when the parameter was chosen."""

    def apply(self, tensor: FloatArray, start: int) -> FloatArray:
        for number in range(len(tensor)):
            left, right = self._sides(start + number)
            add_product(tensor[number], left, right, self.factors.scaling)
        return tensor

    @property
    def has_blocks(self) -> bool:
        """``apply_block`` can be asked, of all experts' rows below each other."""
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
        left, right = self._sides(expert)
        return left * np.float64(self.factors.scaling), right.astype(np.float64)

    def _sides(self, expert: int) -> tuple[FloatArray, FloatArray]:
        rank = self.factors.rank
        a = read_stored(self.factors.a, expert * rank, (expert + 1) * rank)
        b = read_factor(self.factors.b)
        b = b.reshape(b.shape[0], rank, self.experts)[:, :, expert]
        return (a.T, b.T) if self.transposed else (b, a)


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

    def check(self, info: TensorInfo) -> None:
        """The shapes were compared when the matrices were chosen."""

    def apply(self, tensor: FloatArray, start: int) -> FloatArray:
        left, right = self._sides()
        add_product(tensor, left[start : start + len(tensor)], right, self.factors.scaling)
        return tensor

    def product(self) -> Product:
        """s B A of this matrix, as factors in float64."""
        left, right = self._sides()
        return left * np.float64(self.factors.scaling), right.astype(np.float64)

    def _sides(self) -> tuple[FloatArray, FloatArray]:
        rank = self.factors.rank
        a = read_stored(self.factors.a, self.expert * rank, (self.expert + 1) * rank)
        b = read_factor(self.factors.b)
        return b.reshape(b.shape[0], rank, self.experts)[slice(*self.rows), :, self.expert], a


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
