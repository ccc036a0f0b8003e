"""safetensors files: the header checked (which tensors a file holds, and where), and the header of a file to be
written.

Format: 8 bytes with the header's length (little-endian), the header as JSON (name -> dtype, shape, data_offsets), then
the tensors' bytes without gaps up to the end of the file. The header is checked here so that a damaged file is known
before any GPU is taken. A file that is written in pieces by ``header`` is the library's own, byte for byte.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.stored import FileStamp, StoredTensor, check_shape, opened
from gpuherd.models.tensors.source import TensorInfo, stored_bytes

# ---- reading ---------------------------------------------------------------------------------------------------------

# The limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000


def read_header(path: Path) -> list[StoredTensor]:
    """The file's tensors in the order of the header. Raises MissingModel or BadModel, naming the file."""
    with opened(path) as (fd, stamp):
        if stamp.size == 0:
            raise BadModel(f"{path} is empty")
        prefix = os.pread(fd, 8, 0)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > stamp.size - 8:
            raise BadModel(f"{path} is truncated or no safetensors file: its header does not fit in {stamp.size} bytes")
        if length > MAX_HEADER_BYTES:
            raise BadModel(f"{path} has a header of {length} bytes; the limit is {MAX_HEADER_BYTES}")
        text = os.pread(fd, length, 8)
    return parse_header(text, stamp, 8 + length)


def parse_header(text: bytes, file: FileStamp, data_start: int) -> list[StoredTensor]:
    """The tensors that a header promises, checked against the file's size, in its order. Raises BadModel.

    Args:
        text: the header without its length.
        file: the file, of which only path and size count here.
        data_start: the first byte behind the header.
    """
    header = _parse(text, file.path)
    header.pop("__metadata__", None)
    tensors = [_tensor(name, entry, file, data_start) for name, entry in header.items()]
    _check_layout(tensors, file, data_start)
    return tensors


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as problem:
        raise BadModel(f"{path} has a damaged header: {problem}") from None
    if not isinstance(header, dict):
        raise BadModel(f"{path} has a damaged header: it is no JSON object")
    return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice!r} is listed twice")
    return entries


def _tensor(name: str, entry: Any, file: FileStamp, data_start: int) -> StoredTensor:
    """One entry, checked by itself."""
    where = f"{file.path}: tensor {name!r}"
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise BadModel(f"{where} has a damaged entry in the header") from None
    numbers = (*shape, begin, end)
    if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in numbers):
        raise BadModel(f"{where} has a damaged entry in the header")
    check_shape(where, shape)
    nbytes = stored_bytes(dtype, math.prod(shape))
    if nbytes is None:
        raise BadModel(f"{where} has the unknown format {dtype!r}")
    if end - begin != nbytes:
        raise BadModel(f"{where} of shape {shape} and format {dtype} needs {nbytes} bytes, not {end - begin}")
    return StoredTensor(TensorInfo(name, shape, dtype, nbytes), file, data_start + begin)


def _check_layout(tensors: list[StoredTensor], file: FileStamp, data_start: int) -> None:
    """The tensors must cover the rest of the file, without gaps and overlaps."""
    position = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.info.nbytes)):
        if tensor.offset != position:
            raise BadModel(f"{file.path}: tensor {tensor.info.name!r} overlaps another or leaves a gap")
        position += tensor.info.nbytes
    if position > file.size:
        raise BadModel(f"{file.path} is truncated: it has {file.size} bytes, its header promises {position}")
    if position < file.size:
        raise BadModel(f"{file.path} has {file.size - position} bytes too many after its last tensor")


# ---- writing ---------------------------------------------------------------------------------------------------------

# The library sorts tensors by format, widest first, and then by name; its header is JSON without blanks, filled up to
# a multiple of eight bytes.

# The library's order of formats, narrowest first.
_FORMATS = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
_RANK = {name: rank for rank, name in enumerate(_FORMATS)}


def in_order(entries: Iterable[TensorInfo]) -> list[str]:
    """The names of the tensors in the order in which they lie in the file."""
    return [entry.name for entry in sorted(entries, key=lambda entry: (-_RANK[entry.dtype], entry.name.encode()))]


def header(entries: Sequence[TensorInfo]) -> bytes:
    """The file's first bytes, up to the first tensor's."""
    by_name = {entry.name: entry for entry in entries}
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in in_order(entries):
        entry = by_name[name]
        offsets = [position, position + entry.nbytes]
        content[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        position += entry.nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def index(shards: Mapping[str, Sequence[TensorInfo]], parameters: int) -> bytes:
    """``model.safetensors.index.json`` for tensors in several files, as transformers writes it.

    Args:
        shards: the tensors of each file.
        parameters: how many weights they hold together.
    """
    weight_map = {entry.name: file for file, entries in shards.items() for entry in entries}
    total = sum(entry.nbytes for entries in shards.values() for entry in entries)
    content = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
