"""A base model with an adapter merged into it, read tensor by tensor or in blocks, never whole.

Knows where the adapter changes a tensor and in which order that goes. What an edit does to numbers is ``lora``; how an
adapter is stored and what it changes, ``adapter``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuherd.models.dtypes import Codes, FloatArray, Half
from gpuherd.models.lora import PANEL_BYTES, Edit, Float64, MatrixEdit
from gpuherd.models.lora_experts import ExpertEdit
from gpuherd.models.source import BlockSource, CodeSource, Run, TensorInfo, TensorSource
from gpuherd.models.stored import StoredTensor, read_stored


@dataclass(frozen=True, eq=False)
class Merged:
    """A base model with an adapter merged into it: a ``BlockSource``.

    DoRA needs the norms of all inputs of an output. For the first part of a tensor that has only some of them, the
    tensor is read through once, in panels; its norms are kept.
    """

    base: TensorSource
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    edits: Mapping[str, Edit] = field(repr=False)
    replaced: Mapping[str, StoredTensor] = field(repr=False)
    _squares: dict[str, Float64] = field(default_factory=dict, repr=False)

    def read(self, name: str) -> FloatArray:
        """One merged tensor. Memory: the tensor, the factors, and a panel of their product."""
        return self.edited(name, self.unedited(name))

    def read_part(self, name: str, start: int, stop: int) -> FloatArray:
        """Entries ``start`` to ``stop`` of the first axis of the merged tensor."""
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
        untouched = name not in self.edits and name not in self.replaced
        return self.base.half_of(name) if untouched and isinstance(self.base, CodeSource) else None

    def read_codes(self, name: str, rows: Run, columns: Run, target: Codes) -> None:
        """Fills ``target`` with a block of such a tensor as it is stored."""
        assert isinstance(self.base, CodeSource)  # noqa: S101 - half_of has been asked
        self.base.read_codes(name, rows, columns, target)

    def unedited(self, name: str, start: int = 0, stop: int | None = None) -> FloatArray:
        """A tensor, or its entries ``start`` to ``stop``, before B A is added: the base's, or the one that the adapter
        holds whole."""
        replacement = self.replaced.get(name)
        if replacement is not None:
            return read_stored(replacement) if stop is None else read_stored(replacement, start, stop)
        return self.base.read(name) if stop is None else self.base.read_part(name, start, stop)

    def unedited_block(self, name: str, rows: Run, columns: Run) -> FloatArray:
        """A block of it, where it ``has_blocks``."""
        if name in self.replaced:
            return self.replaced[name].read_block(rows, columns)
        assert isinstance(self.base, BlockSource)  # noqa: S101 - has_blocks has been asked
        return self.base.read_block(name, rows, columns)

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
