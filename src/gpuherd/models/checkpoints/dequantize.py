"""Weights stored as codes, turned back into float32 block by block by each format's published arithmetic.

Pure numpy, without the formats' libraries: some of them can do this on a GPU only, bitsandbytes 0.50 does it wrongly on
a CPU where rows are no multiple of its blocks, and all of them round the product of scale and code to the model's half
precision, where here it stays float32. Which tensors of a checkpoint belong together is ``quantized``. Codes are read
once (but up to 31 at a block's edge, where words hold several); scales, 1/16 of their bytes or less, again for each
block that is asked for.

Formats: bitsandbytes 8-bit (Dettmers et al. 2022) and 4-bit (Dettmers et al. 2023: NF4 and FP4, absmax itself in 8 bits
where nested), GPTQ (Frantar et al. 2023, as AutoGPTQ packs it), AWQ (Lin et al. 2024, its GEMM packing), float8 E4M3
with block-wise or per-row scales, compressed-tensors' integers (packed in 2, 4 or 8 bits, or int8), MXFP4 (OCP
Microscaling 1.0, as GPT-OSS packs it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.stored import FileStamp, StoredTensor, read_bytes, rows_of, unchanged
from gpuherd.models.tensors.source import FloatArray, Run, TensorInfo, stored_bytes

Float32 = npt.NDArray[np.float32]
_INTEGERS = {"U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8", "F8_E4M3": "u1", "F8_E8M0": "u1"}
# AWQ packs eight 4-bit numbers into a word so that column 0, 2, 4, 6, 1, 3, 5, 7 come from the lowest bits upwards.
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
# The values of MXFP4's codes (E2M1): sign, two bits of exponent, one of mantissa.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Elements of a panel: index arrays take several times the result.
_PANEL = 1 << 20


def integers(tensor: StoredTensor, rows: Run | None = None, columns: Run | None = None) -> npt.NDArray[Any]:
    """A tensor of whole numbers as it is stored, or a block of it seen as (all axes but the last, the last axis).

    float8 comes as its bit patterns. Raises BadModel when the file has changed or ends too early.
    """
    height, width = rows_of(tensor.info.shape) if tensor.info.shape else (1, 1)
    (top, bottom), (left, right) = rows or (0, height), columns or (0, width)
    item = stored_bytes(tensor.info.dtype, 1) or 1
    with unchanged(tensor.file) as fd:
        raw = read_bytes(
            fd,
            tensor.offset + (top * width + left) * item,
            (bottom - top, (right - left) * item),
            width * item,
            f"tensor {tensor.info.name!r} of {tensor.file.path}",
        )
    found = raw.view(_INTEGERS[tensor.info.dtype])
    return found.reshape(tensor.info.shape) if rows is None and columns is None else found


def unpacked(words: npt.NDArray[np.int32], bits: int) -> npt.NDArray[np.int32]:
    """The numbers of ``bits`` bits in words of 32 along the first axis: a stream of bits from the lowest up.

    The words along it must hold whole numbers: 32 numbers in ``bits`` words. 3-bit numbers reach over the words' ends.
    """
    first = np.arange(len(words) * 32 // bits) * bits
    word, shift = first // 32, (first % 32).astype(np.uint64)
    wide = np.concatenate([words.view(np.uint32), np.zeros_like(words[:1]).view(np.uint32)]).astype(np.uint64)
    shift = shift.reshape(-1, *(1,) * (words.ndim - 1))
    both = wide[word] | (wide[word + 1] << np.uint64(32))
    return ((both >> shift) & np.uint64((1 << bits) - 1)).astype(np.int32)


def group_of(listed: StoredTensor | None, count: int, inputs: int, columns: Run) -> npt.NDArray[np.int64]:
    """The group of each of these inputs: as ``listed`` says, else ``count`` groups of neighbours.

    Raises BadModel for a group that is not there.
    """
    if listed is None:
        return np.arange(*columns) // (inputs // count)
    found = integers(listed).reshape(-1)[slice(*columns)].astype(np.int64)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < count:
        raise BadModel(f"{listed.file.path}: {listed.info.name!r} names a group that is not there")
    return found


def _product(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> Float32:
    """Element by element, rounded to float32."""
    product: Float32 = np.multiply(left, right, dtype=np.float32)
    return product


@dataclass(frozen=True)
class Dequantized(ABC):
    """A matrix whose stored numbers are codes. ``info`` has the shape of the weights and the format's name."""

    info: TensorInfo
    codes: StoredTensor

    @property
    def file(self) -> FileStamp:
        """The file of the codes."""
        return self.codes.file

    @property
    def has_blocks(self) -> bool:
        """Whether a block of the matrix costs no more than its own codes."""
        return True

    def read(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """The weights, or rows ``start`` to ``stop``, as float32. Raises BadModel."""
        rows = (0, self.info.shape[0]) if start is None or stop is None else (start, stop)
        return self.read_block(rows, (0, self.info.shape[1]))

    def read_block(self, rows: Run, columns: Run) -> FloatArray:
        """A block of the weights as float32, made in panels of rows. Raises BadModel."""
        if not (0 <= rows[0] <= rows[1] <= self.info.shape[0] and 0 <= columns[0] <= columns[1] <= self.info.shape[1]):
            raise ValueError(f"{self.info.name}: no block {rows} x {columns} in {self.info.shape}")
        result = np.empty((rows[1] - rows[0], columns[1] - columns[0]), np.float32)
        step = max(1, _PANEL // max(1, result.shape[1]))
        with np.errstate(all="ignore"):  # scales of strangers: the spectrum's checks tell of NaN and infinities
            for start in range(0, len(result), step):
                panel = result[start : start + step]
                panel[:] = self._weights((rows[0] + start, rows[0] + start + len(panel)), columns)
        return result

    @abstractmethod
    def _weights(self, rows: Run, columns: Run) -> Float32:
        """A small block."""


@dataclass(frozen=True)
class FourBit(Dequantized):
    """bitsandbytes 4-bit: two codes a byte, the first one above; weight = table[code] absmax[element // block].

    Attributes:
        table: the 16 values of the codes.
        absmax: one factor for each block, float32; in 8-bit codes where ``nested`` is set.
        nested: table of the 256 values of absmax's codes, factors for blocks of these, their size, and an offset.
    """

    table: StoredTensor
    absmax: StoredTensor
    block: int
    nested: tuple[StoredTensor, StoredTensor, int, float] | None = None

    def _weights(self, rows: Run, columns: Run) -> Float32:
        width, (first, last) = self.info.shape[1], columns
        if width % 2:  # rows begin within a byte: no strided reading
            start, stop = rows[0] * width, rows[1] * width
            flat = self._nibbles((start // 2, -(-stop // 2)))[start % 2 : start % 2 + stop - start]
            codes = flat.reshape(-1, width)[:, first:last]
        else:
            raw = integers_of(self.codes, self.codes.offset, rows, (first // 2, -(-last // 2)), width // 2)
            codes = _split(raw)[:, first % 2 : first % 2 + last - first]
        element = np.arange(*rows, dtype=np.int64)[:, None] * width + np.arange(first, last)
        blocks = element // self.block
        begin = int(blocks[0, 0]) if blocks.size else 0
        end = int(blocks[-1, -1]) + 1 if blocks.size else 0
        factors = self._factors((begin, end))[blocks - begin]
        table = self.table.read().reshape(-1)
        return _product(table[codes], factors)

    def _nibbles(self, run: Run) -> npt.NDArray[np.uint8]:
        return _split(integers_of(self.codes, self.codes.offset, (0, 1), run, 0)).reshape(-1)

    def _factors(self, run: Run) -> Float32:
        if self.nested is None:
            plain: Float32 = self.absmax.read(*run).astype(np.float32, copy=False)
            return plain
        table, scales, size, offset = self.nested
        codes = integers_of(self.absmax, self.absmax.offset, (0, 1), run, 0).reshape(-1)
        scale = scales.read().reshape(-1)[np.arange(*run) // size]
        return np.add(_product(table.read().reshape(-1)[codes], scale), np.float32(offset))


def integers_of(tensor: StoredTensor, offset: int, rows: Run, columns: Run, apart: int) -> npt.NDArray[np.uint8]:
    """Bytes of a tensor seen as rows of ``apart`` bytes, whatever its shape says."""
    with unchanged(tensor.file) as fd:
        return read_bytes(
            fd,
            offset + rows[0] * apart + columns[0],
            (rows[1] - rows[0], columns[1] - columns[0]),
            apart,
            f"tensor {tensor.info.name!r} of {tensor.file.path}",
        )


def _split(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two 4-bit codes from each byte of the last axis, the upper one first."""
    return np.stack([raw >> 4, raw & 15], axis=-1).reshape(*raw.shape[:-1], 2 * raw.shape[-1])


@dataclass(frozen=True)
class EightBit(Dequantized):
    """bitsandbytes 8-bit: weight = code SCB[row] / 127."""

    scale: StoredTensor

    def _weights(self, rows: Run, columns: Run) -> Float32:
        scale = self.scale.read(*rows).reshape(-1, 1) / np.float32(127)
        return _product(integers(self.codes, rows, columns), scale)


@dataclass(frozen=True)
class Gptq(Dequantized):
    """GPTQ: weight[out, in] = scale[g, out] (code[in, out] - zero[g, out]), g the group of the input.

    Codes are packed along the inputs, zeros along the outputs. ``offset`` is 1 for the usual files, which store the
    zeros less one (modulo 2^bits), and 0 for the format gptq_v2.
    """

    zeros: StoredTensor
    scales: StoredTensor
    groups: StoredTensor | None
    bits: int
    offset: int

    def _weights(self, rows: Run, columns: Run) -> Float32:
        first = columns[0] // 32 * 32
        words = (first * self.bits // 32, -(-columns[1] // 32) * self.bits)
        words = (words[0], min(words[1], self.codes.info.shape[0]))
        code = unpacked(integers(self.codes, words, rows), self.bits)[columns[0] - first : columns[1] - first]
        zero = unpacked(np.ascontiguousarray(integers(self.zeros).T), self.bits).T[:, slice(*rows)]
        zero = (zero + self.offset) & ((1 << self.bits) - 1)
        group = group_of(self.groups, self.scales.info.shape[0], self.info.shape[1], columns)
        scale = self.scales.read()[:, slice(*rows)].astype(np.float32, copy=False)
        return _product(scale[group], code - zero[group]).T


@dataclass(frozen=True)
class Awq(Dequantized):
    """AWQ, GEMM packing: weight[out, in] = scale[g, out] (code[in, out] - zero[g, out]), 4 bits, along the outputs."""

    zeros: StoredTensor
    scales: StoredTensor

    def _weights(self, rows: Run, columns: Run) -> Float32:
        words = (rows[0] // 8, -(-rows[1] // 8))
        cut = slice(rows[0] - 8 * words[0], rows[1] - 8 * words[0])
        groups = np.arange(*columns) // (self.info.shape[1] // self.scales.info.shape[0])
        code = _spread(integers(self.codes, columns, words), 4, _AWQ_PLACES)[:, cut]
        zero = _spread(integers(self.zeros)[:, slice(*words)], 4, _AWQ_PLACES)[:, cut]
        scale = self.scales.read()[:, slice(*rows)].astype(np.float32, copy=False)
        return _product(scale[groups], code - zero[groups]).T


def _spread(
    words: npt.NDArray[np.int32], bits: int, places: npt.NDArray[np.intp] | None = None
) -> npt.NDArray[np.int32]:
    """The numbers of ``bits`` bits in words of 32 along the last axis: from the lowest up, or at these places."""
    shifts = bits * (np.arange(32 // bits) if places is None else places).astype(np.uint32)
    numbers = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return numbers.reshape(len(words), -1).astype(np.int32)


@dataclass(frozen=True)
class Float8(Dequantized):
    """float8 E4M3 with a factor for each block of ``block`` (rows, columns)."""

    scale: StoredTensor
    block: tuple[int, int]

    def _weights(self, rows: Run, columns: Run) -> Float32:
        scale = self.scale.read()
        if scale.ndim < 2:
            scale = scale.reshape(-1, 1)
        factors = scale[np.arange(*rows) // self.block[0]][:, np.arange(*columns) // self.block[1]]
        return _product(e4m3()[integers(self.codes, rows, columns)], factors)


@dataclass(frozen=True)
class Compressed(Dequantized):
    """compressed-tensors' integers: weight[out, in] = scale[out, g] (code[out, in] - zero[out, g]).

    Packed (``bits`` each, along the inputs) they and their zeros are stored plus 2^(bits-1), which cancels; where they
    are not packed (``bits`` None) each is an int8. Without zeros that of the packed codes is 2^(bits-1). Zeros are
    packed along the outputs.
    """

    zeros: StoredTensor | None
    scales: StoredTensor
    groups: StoredTensor | None
    bits: int | None

    def _weights(self, rows: Run, columns: Run) -> Float32:
        group = group_of(self.groups, self.scales.info.shape[-1], self.info.shape[1], columns)
        scale = self.scales.read().astype(np.float32, copy=False).reshape(-1, self.scales.info.shape[-1])
        scale = (scale if len(scale) == 1 else scale[slice(*rows)])[:, group]
        return _product(scale, self._codes(rows, columns) - self._zeros(rows, group))

    def _codes(self, rows: Run, columns: Run) -> npt.NDArray[np.int32]:
        if self.bits is None:
            return integers(self.codes, rows, columns).astype(np.int32)
        each = 32 // self.bits
        words, first = (columns[0] // each, -(-columns[1] // each)), columns[0] % each
        return _spread(integers(self.codes, rows, words), self.bits)[:, first : first + columns[1] - columns[0]]

    def _zeros(self, rows: Run, group: npt.NDArray[np.int64]) -> npt.NDArray[np.int32] | int:
        if self.zeros is None:
            return 0 if self.bits is None else 1 << (self.bits - 1)
        stored = integers(self.zeros)
        if self.bits is None:
            return stored.astype(np.int32)[slice(*rows)][:, group]
        return _spread(np.ascontiguousarray(stored.T), self.bits).T[slice(*rows)][:, group]


def e4m3() -> Float32:
    """The 256 values of float8 E4M3 (finite and NaN, no infinities): bias 7, 448 the largest."""
    pattern = np.arange(256)
    exponent, mantissa = pattern >> 3 & 15, pattern & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(pattern & 127) == 127] = np.nan
    return np.where(pattern > 127, -size, size).astype(np.float32)


@dataclass(frozen=True)
class Mxfp4(Dequantized):
    """MXFP4 experts: (expert, out, groups, 16) bytes of two codes, the lower one first, each group times 2^(scale-127).

    The weights are (expert, in, out), as transformers has them. Experts are read whole.
    """

    scales: StoredTensor

    @property
    def has_blocks(self) -> bool:
        """Never: inputs are the packed axis, and come as rows."""
        return False

    def read(self, start: int | None = None, stop: int | None = None) -> FloatArray:
        """The experts, or ``start`` to ``stop`` of them, as float32. Raises BadModel."""
        count, inputs, outputs = self.info.shape
        experts = (0, count) if start is None or stop is None else (start, stop)
        result = np.empty((experts[1] - experts[0], inputs, outputs), np.float32)
        for place, expert in enumerate(range(*experts)):
            result[place] = self._weights((expert, expert + 1), (0, outputs)).T
        return result

    def _weights(self, rows: Run, columns: Run) -> Float32:
        """One expert as (out, in)."""
        _, inputs, outputs = self.info.shape
        groups = inputs // 32
        raw = integers_of(self.codes, self.codes.offset, rows, (0, outputs * groups * 16), outputs * groups * 16)
        power = integers_of(self.scales, self.scales.offset, rows, (0, outputs * groups), outputs * groups)
        both = np.stack([raw & 15, raw >> 4], axis=-1).reshape(outputs, groups, 32)
        weights = np.ldexp(_E2M1[both], power.reshape(outputs, groups, 1).astype(np.int32) - 127)
        found: Float32 = weights.reshape(outputs, inputs)[slice(*columns)]
        return found
