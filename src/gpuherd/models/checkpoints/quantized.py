"""Quantised checkpoints: recognises the formats, and puts one tensor of weights in the place of its codes and scales.

Knows the names and shapes of bitsandbytes, GPTQ, AWQ, float8, compressed-tensors and MXFP4 files. A set that is
incomplete or of another form stays as it is, and ``quantised_as`` then names the format, for which the model is
refused. The arithmetic is ``dequantize``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from gpuherd.models.checkpoints.dequantize import (
    Awq,
    Compressed,
    Dequantized,
    EightBit,
    Float8,
    FourBit,
    Gptq,
    Mxfp4,
    integers,
)
from gpuherd.models.checkpoints.stored import StoredTensor
from gpuherd.models.tensors.source import ITEM_BITS, TensorInfo

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
# Methods that transformers can apply to plain weights while it loads them: a config that names one, beside weights
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
    evidence = _evidence(info for info in listed if not info.decoded and info.scales_of is None)
    if method is None:
        return evidence
    # What is turned back into weights on reading is why the config names a method; what is left is plain.
    if evidence is None and (method in _ON_LOADING or any(info.decoded for info in listed)):
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


# ---- which tensors belong together -----------------------------------------------------------------------------------

Tensors = Mapping[str, StoredTensor]
# A matrix of weights, its name, and the names of the tensors that it stands for.
Found = tuple[Dequantized, frozenset[str]]

_FLOATS = ("F16", "BF16", "F32")
# What codes are stored as: most checkpoints have no such tensor, and are not looked through.
_CODES = frozenset({"U8", "I8", "I32", "F8_E4M3"})
# Far above any in use (64 to 4096).
MAX_BLOCK = 1 << 20
_STATE = ".quant_state.bitsandbytes__"


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


def _info(name: str, shape: tuple[int, ...], dtype: str, codes: StoredTensor) -> TensorInfo:
    return TensorInfo(name, shape, dtype, codes.info.nbytes, decoded=True)


def _names(*tensors: StoredTensor | None) -> frozenset[str]:
    return frozenset(tensor.info.name for tensor in tensors if tensor is not None)


def _of(stored: Tensors, name: str, axes: int | None, *dtypes: str) -> StoredTensor | None:
    """The tensor of this name if it has this many axes and one of these formats, and lies in C order."""
    tensor = stored.get(name)
    fits = tensor is not None and tensor.info.dtype in dtypes and tensor.strides is None
    return tensor if fits and tensor is not None and axes in (None, len(tensor.info.shape)) else None


def _four_bit(stored: Tensors, name: str, _: Mapping[str, Any]) -> Found | None:
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


def _eight_bit(stored: Tensors, name: str, _: Mapping[str, Any]) -> Found | None:
    codes, module = _of(stored, name, 2, "I8"), name.removesuffix(".weight")
    scale = _of(stored, f"{module}.SCB", 1, "F32")
    if codes is None or scale is None or module == name or scale.info.shape != codes.info.shape[:1]:
        return None
    layout = _of(stored, f"{module}.weight_format", None, "U8")
    if layout is not None and (layout.info.nbytes != 1 or int(integers(layout).reshape(-1)[0]) != 0):
        return None  # the tiled layouts of a GPU's own
    return EightBit(_info(name, codes.info.shape, "INT8", codes), codes, scale), _names(codes, scale, layout)


def _grouped(stored: Tensors, name: str) -> tuple[StoredTensor, StoredTensor, StoredTensor] | None:
    """qweight, qzeros and scales of one module."""
    module = name.removesuffix(".qweight")
    codes, zeros = _of(stored, name, 2, "I32"), _of(stored, f"{module}.qzeros", 2, "I32")
    scales = _of(stored, f"{module}.scales", 2, *_FLOATS)
    return None if module == name or codes is None or zeros is None or scales is None else (codes, zeros, scales)


def _gptq(stored: Tensors, name: str, settings: Mapping[str, Any]) -> Found | None:
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


def _awq(stored: Tensors, name: str, settings: Mapping[str, Any]) -> Found | None:
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


def _float8(stored: Tensors, name: str, settings: Mapping[str, Any]) -> Found | None:
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


def _compressed(stored: Tensors, name: str, settings: Mapping[str, Any]) -> Found | None:
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


def _packed_shape(
    codes: StoredTensor, size: StoredTensor | None, settings: Mapping[str, Any]
) -> tuple[tuple[int, ...] | None, int]:
    """The weights' shape, and the bits of a code, as the shapes tell and the config allows; None where they don't."""
    shape = None if size is None or size.info.shape != (2,) else tuple(integers(size).tolist())
    groups = settings.get("config_groups")
    plans = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)] if _is_map(groups) else []
    said = [plan.get("num_bits") for plan in plans if isinstance(plan, Mapping)]
    for bits in (2, 4, 8):
        if shape and min(shape) > 0 and bits in said and codes.info.shape == (shape[0], -(-shape[1] * bits // 32)):
            return shape, bits
    return None, 0


def _is_map(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _mxfp4(stored: Tensors, name: str, _: Mapping[str, Any]) -> Found | None:
    codes, plain = _of(stored, name, 4, "U8"), name.removesuffix("_blocks")
    scales = _of(stored, f"{plain}_scales", 3, "U8", "F8_E8M0")
    if plain == name or codes is None or scales is None:
        return None
    experts, out, groups, size = codes.info.shape
    if size != 16 or scales.info.shape != (experts, out, groups):
        return None
    return Mxfp4(_info(plain, (experts, groups * 32, out), "MXFP4", codes), codes, scales), _names(codes, scales)


_RULES: tuple[Callable[[Tensors, str, Mapping[str, Any]], Found | None], ...] = (
    _four_bit, _eight_bit, _gptq, _awq, _float8, _compressed, _mxfp4,
)  # fmt: skip
