"""A base with an adapter in it, and what fine-tuning changed, as sources of tensors: read one at a time, never whole.

``Merged`` is the base with the adapter's edits. The updates are an adapter's s B A, or the weights minus those of the
base, in float64, under the names of the model's own tensors, so that they are taken apart into matrices like any model.
The update of LoRA is known to be a product of two thin factors, and stays one: its spectrum has at most r values that
are not zero, and no rounding of W + s B A hides them. Tensors that were not changed, or that the base has not, are
named with the reason. How adapters are stored is ``adapter``'s business, their arithmetic ``edits``'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.stored import StoredTensor
from gpuherd.models.lora.edits import PANEL_BYTES, Edit, ExpertEdit, Float64, MatrixEdit, OneExpertEdit, Product
from gpuherd.models.tensors.kinds import BaseNames
from gpuherd.models.tensors.matrices import WeightMatrix, matrices
from gpuherd.models.tensors.source import (
    READABLE,
    BlockSource,
    Codes,
    CodeSource,
    FloatArray,
    Half,
    Run,
    TensorInfo,
    TensorSource,
)

# ---- a base with an adapter ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Merged:
    """A base model with an adapter merged into it: a ``BlockSource``.

    DoRA needs the norms of all inputs of an output. For the first part of a tensor that has only some of them, the
    tensor is read through once, in panels; its norms are kept. ``wide``: the base's tensors come in float64, so that a
    sum with them is.
    """

    base: TensorSource
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    edits: Mapping[str, Edit] = field(repr=False)
    replaced: Mapping[str, StoredTensor] = field(repr=False)
    wide: bool = False
    _squares: dict[str, Float64] = field(default_factory=dict, repr=False)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> FloatArray:
        """One merged tensor, or entries of its first axis. Memory: these, the factors, and a panel of their product."""
        return self.edited(name, self.unedited(name, start, stop), start)

    def has_blocks(self, name: str) -> bool:
        """Whether the base's tensor, or the adapter's own, can be read in blocks: no convolution that is edited."""
        edit = self.edits.get(name)
        if edit is not None and not (isinstance(edit, MatrixEdit | ExpertEdit) and edit.has_blocks):
            return False
        if name in self.replaced:
            return self.replaced[name].has_blocks
        return isinstance(self.base, BlockSource) and self.base.has_blocks(name)

    def read_block(self, name: str, rows: Run, columns: Run) -> FloatArray:
        """A block of the merged tensor, seen as (all axes but the last, the last axis)."""
        return self.edited_block(name, self.unedited_block(name, rows, columns), rows, columns)

    def half_of(self, name: str) -> Half | None:
        """The format of a tensor of 16-bit numbers that the adapter leaves as it is in the base, else None."""
        untouched = not self.wide and name not in self.edits and name not in self.replaced
        return self.base.half_of(name) if untouched and isinstance(self.base, CodeSource) else None

    def read_codes(self, name: str, rows: Run, columns: Run, target: Codes) -> None:
        """Fills ``target`` with a block of such a tensor as it is stored."""
        assert isinstance(self.base, CodeSource)  # noqa: S101 - half_of has been asked
        self.base.read_codes(name, rows, columns, target)

    def unedited(self, name: str, start: int = 0, stop: int | None = None) -> FloatArray:
        """A tensor, or its entries ``start`` to ``stop``, before B A is added: the base's, or the one that the adapter
        holds whole."""
        replacement = self.replaced.get(name)
        return self.of_base(name, start, stop) if replacement is None else replacement.read(start, stop)

    def of_base(self, name: str, start: int = 0, stop: int | None = None) -> FloatArray:
        """The base's tensor, or entries of its first axis."""
        return self._widened(self.base.read(name, start, stop))

    def unedited_block(self, name: str, rows: Run, columns: Run) -> FloatArray:
        """A block of it, where it ``has_blocks``."""
        if name in self.replaced:
            return self.replaced[name].read_block(rows, columns)
        return self.block_of_base(name, rows, columns)

    def block_of_base(self, name: str, rows: Run, columns: Run) -> FloatArray:
        """A block of the base's tensor."""
        assert isinstance(self.base, BlockSource)  # noqa: S101 - has_blocks has been asked
        return self._widened(self.base.read_block(name, rows, columns))

    def _widened(self, tensor: FloatArray) -> FloatArray:
        return tensor.astype(np.float64, copy=False) if self.wide else tensor

    def edited(self, name: str, tensor: FloatArray, start: int = 0) -> FloatArray:
        """What the adapter makes of a tensor, or of its part from ``start`` on; the tensor may be changed."""
        edit = self.edits.get(name)
        if edit is None:
            return tensor
        if isinstance(edit, MatrixEdit):
            rows = tensor.reshape(len(tensor), -1)
            self.edited_block(name, rows, (start, start + len(rows)), (0, rows.shape[1]))
            return tensor
        return edit.apply(tensor, start)

    def edited_block(self, name: str, block: FloatArray, rows: Run, columns: Run) -> FloatArray:
        """What the adapter makes of a block of rows; the block is changed."""
        edit, shape = self.edits.get(name), self.tensors[name].shape
        if isinstance(edit, MatrixEdit):
            needed = edit.needs_squares(shape, rows, columns)
            return edit.apply_block(block, rows, columns, self._all_squares(name, edit) if needed else None)
        return edit.apply_block(block, rows, columns) if isinstance(edit, ExpertEdit) else block

    def _all_squares(self, name: str, edit: MatrixEdit) -> Float64:
        if name not in self._squares:
            rows, *rest = self.tensors[name].shape
            total = np.zeros(math.prod(rest) if edit.transposed else rows)
            step = max(1, PANEL_BYTES // (8 * math.prod(rest)))
            for start in range(0, rows, step):
                panel = self.unedited(name, start, min(start + step, rows))
                edit.add_squares(total, panel.reshape(len(panel), -1), start)
            self._squares[name] = total
        return self._squares[name]


def is_saved(module: str, adapter: Mapping[str, Any]) -> bool:
    """Whether an adapter's config lists the module as one that is trained and saved whole."""
    return any(f".{entry}." in f".{module}." for entry in adapter.get("modules_to_save") or ())


# ---- updates ---------------------------------------------------------------------------------------------------------

NOT_IN_ADAPTER = "not changed by the adapter"
SAVED_WHOLE = "saved whole by the adapter: it has no BA"
NOT_IN_BASE = "not in the base"
SAME_AS_BASE = "the same as in the base"


@dataclass(frozen=True, eq=False)
class AdapterUpdate:
    """What an adapter adds to its base: s B A alone (``ba``), or all that it changes (merged minus base).

    The two differ for DoRA, which rescales W + s B A, and for tensors that the adapter holds whole. For LoRA they are
    the same: the difference is not computed by subtraction, which would leave rounding of W in it.

    Attributes:
        unchanged: why a tensor is not analysed, by name; all others can be read.
        low_rank: the edits whose s B A is all of the difference, by the tensor's name.
    """

    merged: Merged
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    unchanged: Mapping[str, str]
    low_rank: Mapping[str, Edit]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> FloatArray:
        """The difference, or entries of its first axis, as a dense float64 array."""
        edit = self.low_rank.get(name)
        if edit is not None:
            rows, *rest = self.tensors[name].shape
            return edit.apply(np.zeros(((rows if stop is None else stop) - start, *rest)), start)
        return self._difference(
            name,
            self.merged.of_base(name, start, stop),
            lambda: self.merged.unedited(name, start, stop),
            lambda tensor: self.merged.edited(name, tensor, start),
        )

    def has_blocks(self, name: str) -> bool:
        """Whether what is merged, and what it is compared with, can be read in blocks."""
        edit = self.low_rank.get(name)
        if edit is not None:
            return isinstance(edit, MatrixEdit | ExpertEdit) and edit.has_blocks
        return self.merged.has_blocks(name) and _has_blocks(self.merged.base, name)

    def read_block(self, name: str, rows: Run, columns: Run) -> FloatArray:
        """A block of the difference, seen as (all axes but the last, the last axis)."""
        edit = self.low_rank.get(name)
        if isinstance(edit, MatrixEdit | ExpertEdit):
            return edit.apply_block(np.zeros((rows[1] - rows[0], columns[1] - columns[0])), rows, columns)
        return self._difference(
            name,
            self.merged.block_of_base(name, rows, columns),
            lambda: self.merged.unedited_block(name, rows, columns),
            lambda block: self.merged.edited_block(name, block, rows, columns),
        )

    def _difference(
        self,
        name: str,
        old: FloatArray,
        unedited: Callable[[], FloatArray],
        edited: Callable[[FloatArray], FloatArray],
    ) -> FloatArray:
        """Merged minus ``old``, the base's tensor or a piece of it, in float64.

        ``unedited`` reads the same piece of what the adapter holds whole; ``edited`` does its edit, in place.
        """
        if name not in self.merged.replaced:
            return _minus(edited(old.copy()), old)
        new = unedited().astype(np.float64)
        edit = self.merged.edits.get(name)
        if edit is None or _rescales(edit):
            return _minus(edited(new), old)
        # An embedding that PEFT saved with its factors is mostly the base's own: s B A is added to its difference,
        # zeros that no rounding spoils.
        return edited(_minus(new, old))


@dataclass(frozen=True, eq=False)
class WeightDifference:
    """A model minus its base. ``old_names``: each tensor's name in the base; ``unchanged``: as in ``AdapterUpdate``."""

    model: TensorSource
    base: TensorSource
    old_names: Mapping[str, str] = field(repr=False)
    unchanged: Mapping[str, str] = field(repr=False)

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's own."""
        return self.model.config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The model's own, with those that the base has not."""
        return self.model.tensors

    def read(self, name: str, start: int = 0, stop: int | None = None) -> FloatArray:
        """The difference in float64: exact for two half-precision numbers, else rounded once."""
        return _minus(self.model.read(name, start, stop), self.base.read(self.old_names[name], start, stop))

    def has_blocks(self, name: str) -> bool:
        """Whether both can be read in blocks."""
        return _has_blocks(self.model, name) and _has_blocks(self.base, self.old_names.get(name, ""))

    def read_block(self, name: str, rows: Run, columns: Run) -> FloatArray:
        """A block of the difference, seen as (all axes but the last, the last axis)."""
        assert isinstance(self.model, BlockSource) and isinstance(self.base, BlockSource)  # noqa: S101 - see has_blocks
        old = self.base.read_block(self.old_names[name], rows, columns)
        return _minus(self.model.read_block(name, rows, columns), old)


# A source whose tensors are differences.
Update = AdapterUpdate | WeightDifference


def _minus(new: FloatArray, old: FloatArray) -> FloatArray:
    difference: FloatArray = np.subtract(new, old, dtype=np.float64)
    return difference


def _has_blocks(source: TensorSource, name: str) -> bool:
    return name in source.tensors and isinstance(source, BlockSource) and source.has_blocks(name)


def adapter_update(merged: Merged, *, ba: bool) -> AdapterUpdate:
    """The update of an adapter that was merged by ``adapter.merge``: its BA alone, or merged minus base."""
    wide = replace(merged, wide=True, _squares={})
    why = _why_no_ba if ba else _why_no_delta
    unchanged = {name: reason for name in merged.tensors if (reason := why(merged, name)) is not None}
    low_rank = {name: edit for name in merged.edits if (edit := _low_rank(merged, name, ba)) is not None}
    return AdapterUpdate(wide, merged.config, merged.tensors, unchanged, low_rank)


def _low_rank(merged: Merged, name: str, ba: bool) -> Edit | None:
    """The edit that adds only s B A, where that is all that is asked for or all that the adapter does."""
    edit = merged.edits[name]
    if ba:
        return edit.without_rescaling() if isinstance(edit, MatrixEdit) else edit
    return None if _rescales(edit) or name in merged.replaced else edit


def _rescales(edit: Edit) -> bool:
    """Whether it is DoRA's, which does more than add s B A."""
    return isinstance(edit, MatrixEdit) and edit.factors.magnitude is not None


def _why_no_ba(merged: Merged, name: str) -> str | None:
    if name in merged.edits:
        return None
    return SAVED_WHOLE if name in merged.replaced else NOT_IN_ADAPTER


def _why_no_delta(merged: Merged, name: str) -> str | None:
    if name in merged.replaced:
        return _why_no_pair(merged.tensors[name], merged.base.tensors.get(name))
    return None if name in merged.edits else NOT_IN_ADAPTER


def _why_no_pair(new: TensorInfo, old: TensorInfo | None) -> str | None:
    """Why a tensor can't be compared with the base's, None if it can."""
    if old is None:
        return NOT_IN_BASE
    if old.shape != new.shape:
        return f"of shape {'x'.join(map(str, old.shape))} in the base"
    return None if old.dtype in READABLE or old.dequantized else f"stored as {old.dtype} in the base"


def difference(model: TensorSource, base: TensorSource) -> WeightDifference:
    """A whole model minus its base, for every tensor that both have in the same shape.

    Names may differ by leading parts (``model.layers.0...`` and ``layers.0...``). Raises BadModel when no matrix could
    be compared.
    """
    names = BaseNames(base.tensors, base.config)
    old_names: dict[str, str] = {}
    unchanged: dict[str, str] = {}
    for name, info in model.tensors.items():
        found = name if name in base.tensors else names.tensor(name)
        reason = _why_no_pair(info, None if found is None else base.tensors[found])
        if found is None or reason is not None:
            unchanged[name] = reason or NOT_IN_BASE
        else:
            old_names[name] = found
    for name in _doubtful(old_names):
        del old_names[name]
        unchanged[name] = NOT_IN_BASE
    if not any(len(model.tensors[name].shape) > 1 for name in old_names):
        raise BadModel("no weight matrix has a counterpart of the same name and shape; is this the right base model?")
    return WeightDifference(model, base, old_names, unchanged)


def _doubtful(old_names: Mapping[str, str]) -> list[str]:
    """Names that were found only by leaving parts away, in a base tensor that another name stands for as well."""
    standing: dict[str, list[str]] = {}
    for name, old in old_names.items():
        standing.setdefault(old, []).append(name)
    return [name for old, several in standing.items() if len(several) > 1 for name in several if name != old]


def update_matrices(update: Update, *, embeddings: bool = False) -> Iterator[WeightMatrix]:
    """The matrices of an update, under the names that they have in the model; what was not changed with its reason."""
    low_rank = update.low_rank if isinstance(update, AdapterUpdate) else {}
    for matrix in matrices(update, embeddings=embeddings):
        reason = update.unchanged.get(matrix.tensor)
        if matrix.skip is None:
            factors = _factors(matrix, low_rank.get(matrix.tensor)) if reason is None else None
            matrix = replace(matrix, skip=reason, factors=factors)
        yield matrix


def _factors(matrix: WeightMatrix, edit: Edit | None) -> Callable[[], list[Product]] | None:
    """Reads the factors of the matrix's own part of s B A; None where it has no such form."""
    if isinstance(edit, ExpertEdit) and matrix.kind == "expert":
        return lambda: [_part_of(matrix, edit.product(matrix.part.piece))]
    if isinstance(edit, OneExpertEdit):
        return lambda: [_part_of(matrix, edit.product())]
    if isinstance(edit, MatrixEdit) and matrix.kind != "expert":
        return lambda: [_part_of(matrix, product) for product in edit.products()]
    return None


def _part_of(matrix: WeightMatrix, product: Product) -> Product:
    """A part of a fused tensor is made of rows of the left factor, or of columns of the right one."""
    layout, (left, right) = matrix.part.layout, product
    if layout is None:
        return product
    if layout.axis == 0:
        return layout.take(left, matrix.part.number), right
    return left, layout.take(right, matrix.part.number)
