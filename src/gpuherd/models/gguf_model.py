"""A model from its GGUF files: all shards' tensors, and its metadata in the words of a config.json.

Knows what the converter of llama.cpp writes: the names of the metadata, shards by number, and that fused projections
are already put one behind the other, whatever the architecture stored. Query and key rows of rotary models come in
another order than in the original, which no spectrum sees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models import gguf_file
from gpuherd.models.gguf_file import GgufTensor
from gpuherd.models.stored import StoredTensor

# What matrices and fused layouts are told apart by.
MODEL_TYPE = "gguf"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def read_model(path: Path) -> tuple[dict[str, Any], list[list[StoredTensor | GgufTensor]]]:
    """The config and each file's tensors, of the file and of all shards that belong to it.

    Raises MissingModel (a shard too) or BadModel.
    """
    headers = [gguf_file.read_header(shard) for shard in shards(path)]
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
