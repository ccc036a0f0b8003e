"""What a room that reads weights sees of a model: named tensors, read one at a time. Plain types, no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from gpuherd.errors import BadModel
from gpuherd.models.names import shown

# First index and index after the last.
Run = tuple[int, int]


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
        decoded: whether the stored numbers are codes that are turned into weights when they are read.
        scales_of: name of the decoded tensor that these scales, zeros or settings belong to, else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    shares: str | None = None
    decoded: bool = False
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

    def read(self, name: str) -> npt.NDArray[np.floating[Any]]:
        """One tensor, in its stored shape. float16 and bfloat16 come as float32 (exactly), float32 and float64 as they
        are. Nothing of it stays in memory here after the call. Raises BadModel when it can't be read."""
        ...

    def read_part(self, name: str, start: int, stop: int) -> npt.NDArray[np.floating[Any]]:
        """Entries ``start`` to ``stop`` of the first axis, as ``read`` would give them, without reading the others.

        So one expert of a fused mixture, or the rows of one projection, cost no more than their own bytes.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadersOnly:
    """A ``TensorSource`` of a model that is not downloaded: names, shapes and types, but no numbers."""

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> npt.NDArray[np.floating[Any]]:
        """Raises BadModel."""
        raise BadModel(f"tensor {shown(name)} is not downloaded")

    def read_part(self, name: str, start: int, stop: int) -> npt.NDArray[np.floating[Any]]:
        """Raises BadModel."""
        raise BadModel(f"entries {start} to {stop} of tensor {shown(name)} are not downloaded")


@runtime_checkable
class BlockSource(TensorSource, Protocol):
    """A source that can also read a block of a tensor for the price of the block, so that no tensor is ever whole in
    memory. Others are read whole, or by entries of the first axis."""

    def has_blocks(self, name: str) -> bool:
        """Whether ``read_block`` can be asked for this tensor."""
        ...

    def read_block(self, name: str, rows: Run, columns: Run) -> npt.NDArray[np.floating[Any]]:
        """A 2-D block of a tensor of two or more axes, seen as a matrix of (all axes but the last, the last axis).

        Numbers as ``read`` gives them, no others read. Raises BadModel when it can't be read.
        """
        ...


@runtime_checkable
class CodeSource(TensorSource, Protocol):
    """A source that can also hand out 16-bit numbers as they are stored, for a GPU that widens them itself: half the
    bytes to read, to hold and to send."""

    def half_of(self, name: str) -> Literal["BF16", "F16"] | None:
        """The tensor's format, None where its numbers can't be had so."""
        ...

    def read_codes(self, name: str, rows: Run, columns: Run, target: npt.NDArray[np.uint16]) -> None:
        """Fills ``target``, in C order, with a block as ``BlockSource.read_block`` has it. Raises BadModel."""
        ...
