"""Quantised checkpoints: which tensors are codes and scales, and the weights that they stand for, as one tensor.

Knows the names and shapes of bitsandbytes, GPTQ, AWQ, float8, compressed-tensors and MXFP4 files. A format is one
class: ``found`` recognises its set of tensors, ``_weights`` turns codes back into float32, block by block, by the
format's published arithmetic. A set that is incomplete or of another form stays as it is, and ``quantised_as`` then
names the format, for which the model is refused.

The arithmetic is pure numpy, without the formats' libraries: some of them can do this on a GPU only, bitsandbytes 0.50
does it wrongly on a CPU where rows are no multiple of its blocks, and all of them round the product of scale and code
to the model's half precision, where here it stays float32. Codes are read once (but up to 31 at a block's edge, where
words hold several); scales, 1/16 of their bytes or less, again for each block that is read.

Formats: bitsandbytes 8-bit (Dettmers et al. 2022) and 4-bit (Dettmers et al. 2023: NF4 and FP4, absmax itself in 8 bits
where nested), GPTQ (Frantar et al. 2023, as AutoGPTQ packs it), AWQ (Lin et al. 2024, its GEMM packing), float8 E4M3
with block-wise or per-row scales, compressed-tensors' integers (packed in 2, 4 or 8 bits, or int8), MXFP4 (OCP
Microscaling 1.0, as GPT-OSS packs it).
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.stored import FileStamp, StoredTensor, read_rows, rows_of, unchanged
from gpuherd.models.tensors.source import ITEM_BITS, FloatArray, Run, TensorInfo, stored_bytes

# ---- which format ----------------------------------------------------------------------------------------------------

# Last parts of tensor names that only one family of formats writes, most telling first.
_TELLTALES = {
    "SCB": "bitsandbytes 8-bit",
    "quant_map": "bitsandbytes 4-bit",
    "nested_absmax": "bitsandbytes 4-bit",
    "absmax": "bitsandbytes 4-bit",
    "g_idx": "GPTQ",
    "weight_packed": "compressed-tensors",
    "weight_shape": "compressed-tensors",
    "bitmask": "compressed-tensors, sparse",
    "qzeros": "GPTQ or AWQ",
    "qweight": "GPTQ or AWQ",
    "weight_scale_inv": "block-wise float8",
    "W_q": "HQQ",
    "codebooks": "AQLM",
    "Qidxs": "QuIP#",
}
# Methods that transformers can apply to plain weights while it loads them: a config that names one, next to weights
# that are all plain, only says how the author liked to load it (often left over from QLoRA training).
_ON_LOADING = frozenset({"bitsandbytes", "eetq", "hqq", "quanto", "torchao", "fbgemm_fp8", "higgs", "fp_quant"})
_NAMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "block-wise float8",
    "mxfp4": "MXFP4",
    "hqq": "HQQ",
    "aqlm": "AQLM",
}


def quantised_as(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> str | None:
    """The name of the format that the weights are quantised in, None if they are plain numbers."""
    method = method_of(config)
    listed = list(tensors)
    evidence = _evidence(info for info in listed if not info.dequantized and info.scales_of is None)
    if method is None:
        return evidence
    # What is turned back into weights on reading is why the config names a method; what is left is plain.
    if evidence is None and (method in _ON_LOADING or any(info.dequantized for info in listed)):
        return None
    name = _NAMES.get(method, method)
    return evidence if evidence is not None and evidence.startswith(name) else name


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``quantization_config`` of the config or of its text part, empty if there is none."""
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        for key in ("quantization_config", "compression_config"):
            settings = part.get(key)
            if isinstance(settings, Mapping):
                return settings
    return {}


def method_of(config: Mapping[str, Any]) -> str | None:
    """The method that the config names, lower case; None if it has no settings of this kind."""
    settings = settings_of(config)
    if settings.get("load_in_8bit") is True or settings.get("load_in_4bit") is True:
        return "bitsandbytes"
    return str(settings.get("quant_method", "an unnamed method")).lower() if settings else None


def _evidence(tensors: Iterable[TensorInfo]) -> str | None:
    """What the names and number formats of the tensors tell."""
    found: set[str] = set()
    float8 = packed = False
    for info in tensors:
        last = info.name.rpartition(".")[2]
        if "quant_state." in info.name:
            return f"bitsandbytes 4-bit ({info.name.rpartition('bitsandbytes__')[2].upper() or 'NF4'})"
        if last in _TELLTALES:
            found.add(last)
        if last.endswith(("_blocks", "_scales")) and info.dtype in ("U8", "I8", "F8_E8M0"):
            return "MXFP4"
        matrix = len(info.shape) >= 2
        float8 = float8 or (matrix and (info.dtype.startswith("F8_") or info.dtype in ITEM_BITS))
        packed = packed or (matrix and last == "weight" and info.dtype in ("I8", "U8", "I32"))
    for last, name in _TELLTALES.items():
        if last in found:
            return name
    if float8:
        return "float8"
    return "integer codes of an unnamed format" if packed else None


# ---- codes -----------------------------------------------------------------------------------------------------------

Float32 = npt.NDArray[np.float32]
_INTEGERS = {"U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8", "F8_E4M3": "u1", "F8_E8M0": "u1"}
# Elements of a panel: index arrays, and the temporaries of gguf's library, take several times the result.
_PANEL = 1 << 20


def integers(tensor: StoredTensor, rows: Run | None = None, columns: Run | None = None) -> npt.NDArray[Any]:
    """A tensor of whole numbers as it is stored, or a block of it seen as (all axes but the last, the last axis).

    float8 comes as its bit patterns. Raises BadModel when the file has changed or ends too early.
    """
    height, width = rows_of(tensor.info.shape) if tensor.info.shape else (1, 1)
    (top, bottom), (left, right) = rows or (0, height), columns or (0, width)
    item = stored_bytes(tensor.info.dtype, 1) or 1
    raw = integers_of(
        tensor, tensor.offset + top * width * item, (0, bottom - top), (left * item, right * item), width * item
    )
    found = raw.view(_INTEGERS[tensor.info.dtype])
    return found.reshape(tensor.info.shape) if rows is None and columns is None else found


def integers_of(tensor: StoredTensor, offset: int, rows: Run, columns: Run, apart: int) -> npt.NDArray[np.uint8]:
    """Bytes of a tensor seen as rows of ``apart`` bytes, whatever its shape says."""
    found = np.empty((rows[1] - rows[0], columns[1] - columns[0]), np.uint8)
    with unchanged(tensor.file) as fd:
        read_rows(fd, offset + rows[0] * apart + columns[0], found, apart, tensor.label)
    return found


def _product(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> Float32:
    """Element by element, rounded to float32."""
    product: Float32 = np.multiply(left, right, dtype=np.float32)
    return product


def _split(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two 4-bit codes from each byte of the last axis, the upper one first."""
    return np.stack([raw >> 4, raw & 15], axis=-1).reshape(*raw.shape[:-1], 2 * raw.shape[-1])


def _spread(
    words: npt.NDArray[np.int32], bits: int, places: npt.NDArray[np.intp] | None = None
) -> npt.NDArray[np.int32]:
    """The numbers of ``bits`` bits in words of 32 along the last axis: from the lowest up, or at these places."""
    shifts = bits * (np.arange(32 // bits) if places is None else places).astype(np.uint32)
    numbers = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return numbers.reshape(len(words), -1).astype(np.int32)


@dataclass(frozen=True)
class Dequantized(ABC):
    """A tensor whose stored numbers are codes. ``info`` has the shape of the weights and the format's name."""

    info: TensorInfo
    codes: StoredTensor

    @property
    def file(self) -> FileStamp:
        """The file of the codes."""
        return self.codes.file

    @property
    def has_blocks(self) -> bool:
        """Whether a block of the tensor costs no more than its own codes."""
        return True

    def read(self, start: int = 0, stop: int | None = None) -> FloatArray:
        """The weights, or entries ``start`` to ``stop`` of their first axis, as float32. Raises BadModel."""
        shape = self.info.shape
        first, last = start, shape[0] if stop is None else stop
        if len(shape) == 1:
            return self.read_block((0, 1), (first, last)).reshape(-1)
        each = math.prod(shape[1:-1])
        return self.read_block((first * each, last * each), (0, shape[-1])).reshape(last - first, *shape[1:])

    def read_block(self, rows: Run, columns: Run) -> FloatArray:
        """A block of the weights seen as (all axes but the last, the last axis), as float32, made in panels of rows.
        Raises BadModel."""
        height, width = rows_of(self.info.shape)
        if not (0 <= rows[0] <= rows[1] <= height and 0 <= columns[0] <= columns[1] <= width):
            raise ValueError(f"{self.info.name}: no block {rows} x {columns} in {height} x {width}")
        result = np.empty((rows[1] - rows[0], columns[1] - columns[0]), np.float32)
        step = max(1, _PANEL // max(1, self._decoded_width(columns)))
        with np.errstate(all="ignore"):  # scales of strangers: the spectrum's checks tell of NaN and infinities
            for start in range(0, len(result), step):
                panel = result[start : start + step]
                panel[:] = self._weights((rows[0] + start, rows[0] + start + len(panel)), columns)
        return result

    def _decoded_width(self, columns: Run) -> int:
        """Numbers of a row that are decoded for these columns."""
        return columns[1] - columns[0]

    @abstractmethod
    def _weights(self, rows: Run, columns: Run) -> Float32:
        """A small block."""


# ---- recognising a set of tensors ------------------------------------------------------------------------------------

Tensors = Mapping[str, StoredTensor]
# A matrix of weights, its name, and the names of the tensors that it stands for.
Found = tuple[Dequantized, frozenset[str]]

_FLOATS = ("F16", "BF16", "F32")
# Far above any in use (64 to 4096).
MAX_BLOCK = 1 << 20


def _info(name: str, shape: tuple[int, ...], dtype: str, codes: StoredTensor) -> TensorInfo:
    return TensorInfo(name, shape, dtype, codes.info.nbytes, dequantized=True)


def _names(*tensors: StoredTensor | None) -> frozenset[str]:
    return frozenset(tensor.info.name for tensor in tensors if tensor is not None)


def _of(stored: Tensors, name: str, axes: int | None, *dtypes: str) -> StoredTensor | None:
    """The tensor of this name if it has this many axes and one of these formats, and lies in C order."""
    tensor = stored.get(name)
    fits = tensor is not None and tensor.info.dtype in dtypes and tensor.strides is None
    return tensor if fits and tensor is not None and axes in (None, len(tensor.info.shape)) else None


def _is_block(size: object) -> TypeGuard[int]:
    """Whether it can be the size of a block: a whole number that a file could not make overflow anything."""
    return type(size) is int and 0 < size <= MAX_BLOCK


def _json(tensor: StoredTensor) -> Mapping[str, Any]:
    """A small JSON object that is kept as bytes; empty if it is none."""
    if tensor.info.nbytes > 100_000:
        return {}
    try:
        content = json.loads(integers(tensor).tobytes())
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _grouped(stored: Tensors, name: str) -> tuple[StoredTensor, StoredTensor, StoredTensor] | None:
    """qweight, qzeros and scales of one module."""
    module = name.removesuffix(".qweight")
    codes, zeros = _of(stored, name, 2, "I32"), _of(stored, f"{module}.qzeros", 2, "I32")
    scales = _of(stored, f"{module}.scales", 2, *_FLOATS)
    return None if module == name or codes is None or zeros is None or scales is None else (codes, zeros, scales)


# ---- formats ---------------------------------------------------------------------------------------------------------

_STATE = ".quant_state.bitsandbytes__"


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

    @staticmethod
    def found(stored: Tensors, name: str, _: Mapping[str, Any]) -> Found | None:
        codes, absmax = _of(stored, name, None, "U8"), _of(stored, f"{name}.absmax", 1, "F32", "U8")
        table = _of(stored, f"{name}.quant_map", 1, "F32")
        kind = next((kind for kind in ("nf4", "fp4") if f"{name}{_STATE}{kind}" in stored), None)
        state = None if kind is None else _of(stored, f"{name}{_STATE}{kind}", 1, "U8")
        if codes is None or absmax is None or table is None or state is None or kind is None:
            return None
        settings = _json(state)
        shape, block = settings.get("shape"), settings.get("blocksize")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
            return None
        count = shape[0] * shape[1]
        if not _is_block(block) or math.prod(codes.info.shape) != -(-count // 2):
            return None
        if absmax.info.shape != (-(-count // block),) or table.info.shape != (16,):
            return None
        nested, parts = _nested(stored, name, absmax, settings)
        if nested is None and absmax.info.dtype != "F32":
            return None
        everything = [codes, absmax, table, state, *parts]
        info = _info(name, (shape[0], shape[1]), kind.upper(), codes)
        return FourBit(info, codes, table, absmax, block, nested), _names(*everything)

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


def _nested(
    stored: Tensors, name: str, absmax: StoredTensor, settings: Mapping[str, Any]
) -> tuple[tuple[StoredTensor, StoredTensor, int, float] | None, list[StoredTensor]]:
    """How absmax itself is quantised (None where it isn't), and the tensors that say so."""
    table, scales = _of(stored, f"{name}.nested_quant_map", 1, "F32"), _of(stored, f"{name}.nested_absmax", 1, "F32")
    size, offset = settings.get("nested_blocksize"), settings.get("nested_offset")
    if table is None or scales is None or absmax.info.dtype != "U8" or table.info.shape != (256,):
        return None, []
    if not _is_block(size) or not isinstance(offset, int | float) or isinstance(offset, bool):
        return None, []
    if scales.info.shape != (-(-absmax.info.shape[0] // size),):
        return None, []
    return (table, scales, size, float(offset)), [table, scales]


@dataclass(frozen=True)
class EightBit(Dequantized):
    """bitsandbytes 8-bit: weight = code SCB[row] / 127."""

    scale: StoredTensor

    @staticmethod
    def found(stored: Tensors, name: str, _: Mapping[str, Any]) -> Found | None:
        codes, module = _of(stored, name, 2, "I8"), name.removesuffix(".weight")
        scale = _of(stored, f"{module}.SCB", 1, "F32")
        if codes is None or scale is None or module == name or scale.info.shape != codes.info.shape[:1]:
            return None
        layout = _of(stored, f"{module}.weight_format", None, "U8")
        if layout is not None and (layout.info.nbytes != 1 or int(integers(layout).reshape(-1)[0]) != 0):
            return None  # the tiled layouts of a GPU's own
        return EightBit(_info(name, codes.info.shape, "INT8", codes), codes, scale), _names(codes, scale, layout)

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

    @staticmethod
    def found(stored: Tensors, name: str, settings: Mapping[str, Any]) -> Found | None:
        grouped, bits = _grouped(stored, name), settings.get("bits")
        if grouped is None or str(settings.get("quant_method", "gptq")).lower() != "gptq":
            return None
        codes, zeros, scales = grouped
        module = name.removesuffix(".qweight")
        groups = _of(stored, f"{module}.g_idx", 1, "I32", "I64")
        if groups is None and "quant_method" not in settings:
            return None  # could be AWQ
        if type(bits) is not int or bits not in (2, 3, 4, 8):
            return None
        (words, out), (count, _) = codes.info.shape, scales.info.shape
        inputs = words * 32 // bits
        if words % bits or out % 32 or count < 1 or scales.info.shape != (count, out) or inputs == 0:
            return None
        if zeros.info.shape != (count, out * bits // 32):
            return None
        if groups.info.shape != (inputs,) if groups is not None else inputs % count:
            return None
        offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
        info = _info(f"{module}.weight", (out, inputs), f"GPTQ{bits}", codes)
        return Gptq(info, codes, zeros, scales, groups, bits, offset), _names(codes, zeros, scales, groups)

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


# AWQ packs eight 4-bit numbers into a word so that column 0, 2, 4, 6, 1, 3, 5, 7 come from the lowest bits upwards.
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])


@dataclass(frozen=True)
class Awq(Dequantized):
    """AWQ, GEMM packing: weight[out, in] = scale[g, out] (code[in, out] - zero[g, out]), 4 bits, along the outputs."""

    zeros: StoredTensor
    scales: StoredTensor

    @staticmethod
    def found(stored: Tensors, name: str, settings: Mapping[str, Any]) -> Found | None:
        grouped = _grouped(stored, name)
        if grouped is None or str(settings.get("quant_method")).lower() != "awq" or settings.get("bits") != 4:
            return None
        codes, zeros, scales = grouped
        (inputs, words), (count, out) = codes.info.shape, scales.info.shape
        if str(settings.get("version", "gemm")).lower() != "gemm" or out != 8 * words or count < 1 or inputs % count:
            return None
        if zeros.info.shape != (count, words) or inputs == 0 or out == 0:
            return None
        info = _info(f"{name.removesuffix('.qweight')}.weight", (out, inputs), "AWQ4", codes)
        return Awq(info, codes, zeros, scales), _names(codes, zeros, scales)

    def _weights(self, rows: Run, columns: Run) -> Float32:
        words = (rows[0] // 8, -(-rows[1] // 8))
        cut = slice(rows[0] - 8 * words[0], rows[1] - 8 * words[0])
        groups = np.arange(*columns) // (self.info.shape[1] // self.scales.info.shape[0])
        code = _spread(integers(self.codes, columns, words), 4, _AWQ_PLACES)[:, cut]
        zero = _spread(integers(self.zeros)[:, slice(*words)], 4, _AWQ_PLACES)[:, cut]
        scale = self.scales.read()[:, slice(*rows)].astype(np.float32, copy=False)
        return _product(scale[groups], code - zero[groups]).T


@dataclass(frozen=True)
class Float8(Dequantized):
    """float8 E4M3 with a factor for each block of ``block`` (rows, columns)."""

    scale: StoredTensor
    block: tuple[int, int]

    @staticmethod
    def found(stored: Tensors, name: str, settings: Mapping[str, Any]) -> Found | None:
        codes = _of(stored, name, 2, "F8_E4M3")
        if codes is None or not name.endswith(".weight"):
            return None
        rows, columns = codes.info.shape
        by_block = _of(stored, f"{name}_scale_inv", 2, *_FLOATS)
        scale = by_block or _of(stored, f"{name}_scale", None, *_FLOATS)
        if scale is None or not rows * columns:
            return None
        block = (rows, columns)
        if by_block is not None:
            sizes = settings.get("weight_block_size", [128, 128])
            if not isinstance(sizes, list) or len(sizes) != 2 or not all(_is_block(size) for size in sizes):
                return None
            block = (sizes[0], sizes[1])
        elif math.prod(scale.info.shape) == rows and scale.info.shape in ((rows,), (rows, 1)):
            block = (1, columns)
        elif math.prod(scale.info.shape) != 1:
            return None
        if math.prod(scale.info.shape) != -(-rows // block[0]) * -(-columns // block[1]):
            return None
        if by_block is not None and scale.info.shape != (-(-rows // block[0]), -(-columns // block[1])):
            return None
        # Of the activations; it says nothing about the weights.
        unused = _of(stored, f"{name.removesuffix('weight')}input_scale", None, *_FLOATS)
        info = _info(name, (rows, columns), "F8_E4M3", codes)
        return Float8(info, codes, scale, block), _names(codes, scale, unused)

    def _weights(self, rows: Run, columns: Run) -> Float32:
        scale = self.scale.read()
        if scale.ndim < 2:
            scale = scale.reshape(-1, 1)
        factors = scale[np.arange(*rows) // self.block[0]][:, np.arange(*columns) // self.block[1]]
        return _product(e4m3()[integers(self.codes, rows, columns)], factors)


def e4m3() -> Float32:
    """The 256 values of float8 E4M3 (finite and NaN, no infinities): bias 7, 448 the largest."""
    pattern = np.arange(256)
    exponent, mantissa = pattern >> 3 & 15, pattern & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(pattern & 127) == 127] = np.nan
    return np.where(pattern > 127, -size, size).astype(np.float32)


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

    @staticmethod
    def found(stored: Tensors, name: str, settings: Mapping[str, Any]) -> Found | None:
        """``weight_packed``, or an int8 ``weight``, with their ``weight_scale``."""
        module = name.removesuffix("_packed")
        packed = module != name
        codes, scales = _of(stored, name, 2, "I32" if packed else "I8"), _of(stored, f"{module}_scale", None, *_FLOATS)
        if codes is None or scales is None or not module.endswith(".weight"):
            return None
        if str(settings.get("quant_method")).lower() != "compressed-tensors":
            return None
        size = _of(stored, f"{module}_shape", 1, "I64", "I32") if packed else None
        shape, bits = (codes.info.shape, None) if not packed else _packed_shape(codes, size, settings)
        if shape is None or not math.prod(shape):
            return None
        out, inputs = shape
        count = scales.info.shape[-1] if len(scales.info.shape) == 2 else 1
        if scales.info.shape not in ((out, count), (1,), (1, 1)) or count < 1 or inputs % count:
            return None
        zeros, groups = stored.get(f"{module}_zero_point"), stored.get(f"{module}_g_idx")
        wanted = ("I8", (out, count)) if bits is None else ("I32", (-(-out * bits // 32), count))
        if zeros is not None and (zeros.info.dtype, zeros.info.shape) != wanted:
            return None
        if groups is not None and (
            _of(stored, groups.info.name, 1, "I32", "I64") is None or groups.info.shape[0] != inputs
        ):
            return None
        unused = [stored.get(f"{module.removesuffix('weight')}{part}") for part in ("input_scale", "input_zero_point")]
        info = _info(module, (out, inputs), f"INT{bits or 8}", codes)
        return Compressed(info, codes, zeros, scales, groups, bits), _names(codes, scales, size, zeros, groups, *unused)

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


def _packed_shape(
    codes: StoredTensor, size: StoredTensor | None, settings: Mapping[str, Any]
) -> tuple[tuple[int, ...] | None, int]:
    """The weights' shape, and the bits of a code, as the shapes tell and the config allows; None where they don't."""
    shape = None if size is None or size.info.shape != (2,) else tuple(integers(size).tolist())
    groups = settings.get("config_groups")
    listed = groups.values() if isinstance(groups, Mapping) else ()
    plans = [group.get("weights") for group in listed if isinstance(group, Mapping)]
    said = [plan.get("num_bits") for plan in plans if isinstance(plan, Mapping)]
    for bits in (2, 4, 8):
        if shape and min(shape) > 0 and bits in said and codes.info.shape == (shape[0], -(-shape[1] * bits // 32)):
            return shape, bits
    return None, 0


# The values of MXFP4's codes (E2M1): sign, two bits of exponent, one of mantissa.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class Mxfp4(Dequantized):
    """MXFP4 experts: (expert, out, groups, 16) bytes of two codes, the lower one first, each group times 2^(scale-127).

    The weights are (expert, in, out), as transformers has them. Experts are read whole.
    """

    scales: StoredTensor

    @staticmethod
    def found(stored: Tensors, name: str, _: Mapping[str, Any]) -> Found | None:
        codes, plain = _of(stored, name, 4, "U8"), name.removesuffix("_blocks")
        scales = _of(stored, f"{plain}_scales", 3, "U8", "F8_E8M0")
        if plain == name or codes is None or scales is None:
            return None
        experts, out, groups, size = codes.info.shape
        if size != 16 or scales.info.shape != (experts, out, groups):
            return None
        return Mxfp4(_info(plain, (experts, groups * 32, out), "MXFP4", codes), codes, scales), _names(codes, scales)

    @property
    def has_blocks(self) -> bool:
        """Never: inputs are the packed axis, and come as rows."""
        return False

    def read(self, start: int = 0, stop: int | None = None) -> FloatArray:
        """The experts, or ``start`` to ``stop`` of them, as float32. Raises BadModel."""
        count, inputs, outputs = self.info.shape
        experts = (start, count if stop is None else stop)
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


# ---- a checkpoint ----------------------------------------------------------------------------------------------------

# What codes are stored as: most checkpoints have no such tensor, and are not looked through.
_CODES = frozenset({"U8", "I8", "I32", "F8_E4M3"})
# Each gives the tensor of weights whose codes have this name, with the names of its whole set; None for another format.
_RULES: tuple[Callable[[Tensors, str, Mapping[str, Any]], Found | None], ...] = tuple(
    each.found for each in (FourBit, EightBit, Gptq, Awq, Float8, Compressed, Mxfp4)
)


def dequantized(stored: Tensors, config: Mapping[str, Any]) -> dict[str, StoredTensor | Dequantized]:
    """The checkpoint with each recognised set of codes and scales as one tensor of weights, in the place of its codes;
    the other tensors of the set stay, marked as its scales.

    Raises BadModel only when a file can't be read (the formats keep some settings in tensors).
    """
    settings = settings_of(config)
    replaced: dict[str, Dequantized] = {}
    parts: dict[str, str] = {}
    for name, tensor in stored.items():
        for rule in _RULES if tensor.info.dtype in _CODES else ():
            found = rule(stored, name, settings)
            if found is not None:
                replaced[name] = found[0]
                parts |= dict.fromkeys(found[1], found[0].info.name)
                break
    result: dict[str, StoredTensor | Dequantized] = {}
    for name, tensor in stored.items():
        if name in replaced:
            result[replaced[name].info.name] = replaced[name]
        elif name in parts:
            result[name] = replace(tensor, info=replace(tensor.info, scales_of=parts[name]))
        else:
            result[name] = tensor
    return result
