"""A safetensors file as the safetensors library writes it: its header, and the order of the tensors in it. Pure.

The library sorts tensors by format, widest first, and then by name; its header is JSON without blanks, filled up to a
multiple of eight bytes. A file that is written in pieces by this layout is the same, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

# The library's order of formats, narrowest first.
_FORMATS = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
_RANK = {name: rank for rank, name in enumerate(_FORMATS)}


class Entry(Protocol):
    """What a header says of a tensor."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> str:
        """Its format, by safetensors' name."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        ...


def in_order(entries: Iterable[Entry]) -> list[str]:
    """The names of the tensors in the order in which they lie in the file."""
    return [entry.name for entry in sorted(entries, key=lambda entry: (-_RANK[entry.dtype], entry.name.encode()))]


def header(entries: Sequence[Entry]) -> bytes:
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


def index(shards: Mapping[str, Sequence[Entry]], parameters: int) -> bytes:
    """``model.safetensors.index.json`` for tensors in several files, as transformers writes it.

    Args:
        shards: the tensors of each file.
        parameters: how many weights they hold together.
    """
    weight_map = {entry.name: file for file, entries in shards.items() for entry in entries}
    total = sum(entry.nbytes for entries in shards.values() for entry in entries)
    content = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
