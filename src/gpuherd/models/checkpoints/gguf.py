"""GGUF files: the header checked (metadata, which tensors a file holds, and where), quantised numbers, and the model.

Format (version 2 and 3): ``GGUF``, version, counts of tensors and of metadata; the metadata (key, type, value); for
each tensor name, sizes with the fastest axis first, type, and offset from the aligned start of the data. The header is
read here, not by the ``gguf`` library's reader, which maps the whole file and trusts it. The types' names and block
sizes and the arithmetic of every quantised type are the library's.

The model is all shards' tensors, and its metadata in the words of a config.json, as the converter of llama.cpp writes
them: fused projections are already put one behind the other, whatever the architecture stored. Query and key rows of
rotary models come in another order than in the original, which no spectrum sees.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gpuherd.errors import BadModel, MissingExtra, MissingModel
from gpuherd.models.checkpoints.quantized import Dequantized, Float32, integers_of
from gpuherd.models.checkpoints.stored import FileStamp, StoredTensor, check_shape, opened
from gpuherd.models.tensors.source import ITEM_BYTES, Run, TensorInfo

# Vocabularies take 5 to 20 MB.
MAX_HEADER_BYTES = 100_000_000
# Longer texts and lists of the metadata (templates, vocabularies) say nothing about the weights.
MAX_KEPT = 4096
_CHUNK = 1 << 20
# struct's letter for each scalar type by its number; 8 is text, 9 a list.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


class MissingGguf(BadModel, MissingExtra):
    """A GGUF file was given where the ``gguf`` library is not installed."""


@dataclass(frozen=True)
class GgufTensor(Dequantized):
    """A quantised tensor: rows of blocks.

    Attributes:
        kind: the type's number.
        block: numbers in a block.
        block_bytes: bytes of a block.
    """

    kind: int
    block: int
    block_bytes: int

    @property
    def offset(self) -> int:
        """Byte of the first block."""
        return self.codes.offset

    def _blocks(self, columns: Run) -> Run:
        return columns[0] // self.block, -(-columns[1] // self.block)

    def _decoded_width(self, columns: Run) -> int:
        first, last = self._blocks(columns)
        return (last - first) * self.block

    def _weights(self, rows: Run, columns: Run) -> Float32:
        first, last = self._blocks(columns)
        row_bytes = self.info.shape[-1] // self.block * self.block_bytes
        raw = integers_of(self.codes, self.offset, rows, (first * self.block_bytes, last * self.block_bytes), row_bytes)
        return _dequantised(raw, self.kind)[:, columns[0] - first * self.block : columns[1] - first * self.block]


def _dequantised(raw: np.ndarray[Any, np.dtype[np.uint8]], kind: int) -> Float32:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    weights: Float32 = dequantize(raw, GGMLQuantizationType(kind))
    return weights


def read_header(path: Path) -> tuple[dict[str, Any], list[StoredTensor | GgufTensor]]:
    """The metadata (short values only) and the tensors in the order of the file.

    Raises MissingModel or BadModel, naming the file; MissingGguf where the library is absent.
    """
    types = _types()
    with opened(path) as (fd, stamp):
        cursor = _Cursor(fd, stamp)
        if stamp.size == 0:
            raise BadModel(f"{path} is empty")
        if cursor.take(4) != b"GGUF":
            raise BadModel(f"{path} is no GGUF file")
        version = cursor.number("I")
        if version not in (2, 3):
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in (2, 3)
            what = "was written for a big-endian machine" if swapped else f"has the unknown version {version}"
            raise BadModel(f"{path} {what}; it can't be read here")
        tensors, entries = cursor.number("Q"), cursor.number("Q")
        metadata = {}
        for _ in range(entries):
            key = cursor.text()
            metadata[key] = _value(cursor, cursor.number("I"))
        listed = [_entry(cursor) for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise BadModel(f"{path} has a damaged header: an alignment of {alignment!r}")
        start = -(-cursor.position // alignment) * alignment
    found = [_tensor(entry, types, stamp, start) for entry in listed]
    _check_layout(found, stamp)
    return metadata, found


class _Cursor:
    """Reads the header from front to back, a chunk at a time, and never beyond the file or the limit."""

    def __init__(self, fd: int, file: FileStamp) -> None:
        self._fd = fd
        self._file = file
        self._buffer = b""
        self._start = 0
        self.position = 0

    @property
    def path(self) -> Path:
        """The file's."""
        return self._file.path

    def take(self, count: int) -> bytes:
        begin = self.position - self._start
        self.skip(count)
        if not 0 <= begin <= begin + count <= len(self._buffer):
            begin, self._start = 0, self.position - count
            self._buffer = os.pread(self._fd, max(_CHUNK, count), self._start)
            if len(self._buffer) < count:
                raise BadModel(self._problem())
        return self._buffer[begin : begin + count]

    def skip(self, count: int) -> None:
        """Passes over bytes; they must be in the file."""
        if self.position + count > min(self._file.size, MAX_HEADER_BYTES):
            raise BadModel(self._problem())
        self.position += count

    def number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(letter)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def _problem(self) -> str:
        if self._file.size > MAX_HEADER_BYTES:
            return f"{self._file.path} has a damaged header, or one of more than {MAX_HEADER_BYTES} bytes"
        return f"{self._file.path} is truncated or damaged: its header does not fit in {self._file.size} bytes"


def _value(cursor: _Cursor, kind: int) -> Any:
    """One value of the metadata; None for a long text, and for a list that is long or not of numbers."""
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _TEXT:
        length = cursor.number("Q")
        if length <= MAX_KEPT:
            return cursor.take(length).decode("utf-8", "replace")
        cursor.skip(length)
        return None
    if kind != _LIST:
        raise BadModel(f"{cursor.path} has a damaged header: metadata of the unknown type {kind}")
    of, count = cursor.number("I"), cursor.number("Q")
    if of == _TEXT:
        for _ in range(count):
            cursor.skip(cursor.number("Q"))
        return None
    if of not in _SCALARS:
        raise BadModel(f"{cursor.path} has a damaged header: a list of the unknown type {of}")
    size = struct.calcsize(_SCALARS[of])
    if count > MAX_KEPT:
        cursor.skip(count * size)
        return None
    return list(struct.unpack(f"<{count}{_SCALARS[of]}", cursor.take(count * size)))


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape with the slowest axis first, type and offset."""
    name, axes = cursor.text(), cursor.number("I")
    if axes > 8:
        raise BadModel(f"{cursor.path} has a damaged header: tensor {name!r} has {axes} axes")
    sizes = [cursor.number("Q") for _ in range(axes)]
    return name, tuple(reversed(sizes)), cursor.number("I"), cursor.number("Q")


def _tensor(
    entry: tuple[str, tuple[int, ...], int, int], types: Mapping[int, _Type], file: FileStamp, start: int
) -> StoredTensor | GgufTensor:
    name, shape, kind, offset = entry
    where = f"{file.path}: tensor {name!r}"
    if kind not in types:
        raise BadModel(f"{where} has the unknown type {kind}; a newer version of the gguf library may know it")
    check_shape(where, shape)
    dtype, block, block_bytes = types[kind]
    if shape and shape[-1] % block:
        raise BadModel(f"{where} of type {dtype} has rows of {shape[-1]}, no whole blocks of {block}")
    nbytes = math.prod(shape) // block * block_bytes
    if start + offset + nbytes > file.size:
        raise BadModel(f"{file.path} is truncated: tensor {name!r} reaches beyond its end")
    if dtype in ITEM_BYTES:
        return StoredTensor(TensorInfo(name, shape, dtype, nbytes), file, start + offset)
    if not _can_dequantise(kind, block_bytes):
        raise BadModel(f"{where} is stored as {dtype}, which the gguf library can't turn into weights")
    info = TensorInfo(name, shape, dtype, nbytes, dequantized=True)
    return GgufTensor(info, StoredTensor(info, file, start + offset), kind, block, block_bytes)


def _check_layout(tensors: list[StoredTensor | GgufTensor], file: FileStamp) -> None:
    """No name twice, and no two tensors over the same bytes: a few bytes could claim any amount of work."""
    end, names = 0, set()
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.info.name in names:
            raise BadModel(f"{file.path} has a damaged header: {tensor.info.name!r} is listed twice")
        if tensor.offset < end and tensor.info.nbytes:
            raise BadModel(f"{file.path}: tensor {tensor.info.name!r} overlaps another")
        names.add(tensor.info.name)
        end = max(end, tensor.offset + tensor.info.nbytes)


# A type of numbers as the library knows it: its name, and how many numbers take how many bytes.
_Type = tuple[str, int, int]


def _types() -> Mapping[int, _Type]:
    """The types by number. Raises MissingGguf."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError:
        raise MissingGguf("GGUF files want the gguf library, which is missing: pip install 'gpuherd[gguf]'") from None
    return {int(kind): (kind.name, block, size) for kind, (block, size) in GGML_QUANT_SIZES.items()}


@cache
def _can_dequantise(kind: int, block_bytes: int) -> bool:
    """Whether the library has the arithmetic of this type; it knows the sizes of more."""
    try:
        _dequantised(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


# ---- the model -------------------------------------------------------------------------------------------------------

# What distinguishes matrices and fused layouts.
MODEL_TYPE = "gguf"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def read_model(path: Path) -> tuple[dict[str, Any], list[list[StoredTensor | GgufTensor]]]:
    """The config and each file's tensors, of the file and of all shards that belong to it.

    Raises MissingModel (a shard too) or BadModel.
    """
    headers = [read_header(shard) for shard in shards(path)]
    metadata = headers[0][0]
    tensors = [tensor for _, found in headers for tensor in found]
    count = metadata.get("split.count")
    if type(count) is int and count > 1 and len(headers) != count:
        raise BadModel(f"{path} is one of {count} shards, but not named like model-00001-of-{count:05d}.gguf")
    _refuse_scales(path, {tensor.info.name for tensor in tensors})
    return config_of(metadata, (tensor.info.name for tensor in tensors)), [found for _, found in headers]


def shards(path: Path) -> Sequence[Path]:
    """All files of the model that this file belongs to, in order. Raises MissingModel when one is not there."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 0 < int(match["number"]) <= count:
        raise BadModel(f"{path} has a number that is no shard's")
    found = [path.with_name(f"{match['stem']}-{number:05d}-of-{match['count']}.gguf") for number in range(1, count + 1)]
    for number, shard in enumerate(found, 1):
        if not shard.exists():
            raise MissingModel(f"{path.parent}: shard {number} of {count} is not in the folder")
    return found


def config_of(metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The metadata that say how tensors are fused and tied, under the names that a config.json has for them.

    Values that differ from layer to layer (lists) are left out, so that what depends on them stays whole.
    """
    architecture = metadata.get("general.architecture")
    present = set(names)

    def number(key: str) -> int | None:
        value = metadata.get(f"{architecture}.{key}")
        return value if type(value) is int and value > 0 else None

    heads, width = number("attention.head_count"), number("embedding_length")
    found = {
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": number("attention.key_length") or (width // heads if heads and width else None),
        "hidden_size": width,
        "intermediate_size": number("feed_forward_length"),
    }
    return {
        "model_type": MODEL_TYPE,
        "architecture": architecture,
        # The converter writes no head where it is the embedding.
        "tie_word_embeddings": "token_embd.weight" in present and "output.weight" not in present,
        **{key: value for key, value in found.items() if value is not None},
    }


def _refuse_scales(path: Path, names: set[str]) -> None:
    """BitNet and NVFP4 files keep one factor for a whole matrix in a tensor of its own, ``.scale``."""
    for name in sorted(names):
        if name.endswith(".scale") and f"{name.removesuffix('.scale')}.weight" in names:
            raise BadModel(f"{path} keeps the scale of its weights apart ({name!r}), which can't be applied here")
