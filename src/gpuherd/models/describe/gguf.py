"""The architecture of a GGUF model, as transformers loads it: turned back into weights.

Its metadata make a config, of which transformers builds the model; without transformers the headers alone answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel, MissingExtra
from gpuherd.models.checkpoints.gguf import MODEL_TYPE
from gpuherd.models.describe.description import Architecture
from gpuherd.models.describe.headers import of_headers
from gpuherd.models.describe.process import described
from gpuherd.models.names import quoted
from gpuherd.models.tensors.source import TensorInfo

# llama.cpp's name -> model_type, where transformers changes it while it loads (``load_gguf_checkpoint``).
_RENAMED = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\..+")


def is_gguf(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config was made of the metadata of a GGUF file."""
    return config.get("model_type") == MODEL_TYPE


def architecture_of(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], model: str, *, training: bool
) -> Architecture:
    """The architecture, from the metadata as ``gguf_model`` has them and the shapes of the tensors.

    Raises BadModel when transformers can't load the architecture, or the file holds another number of weights than it
    should.
    """
    layers = {int(match[1]) for match in map(_BLOCK.fullmatch, tensors) if match}
    embedding = tensors.get("token_embd.weight")
    named = str(config.get("architecture"))
    model_type = _RENAMED.get(named, named)
    if not _may_load(model_type):
        raise BadModel(
            f"{quoted(model)} is a GGUF file of the architecture {quoted(named)}, which transformers can't load"
        )
    if not layers or embedding is None or len(embedding.shape) != 2:
        raise BadModel(f"{quoted(model)} has no token_embd.weight or no layers: it is no whole model")
    fields = {
        **{key: value for key, value in config.items() if key != "architecture"},
        "model_type": model_type,
        "num_hidden_layers": max(layers) + 1,
        "vocab_size": embedding.shape[0],
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    try:
        built = described(fields, model, training=training)
    except MissingExtra as problem:
        # Turned back into weights while it is loaded, whatever the file stores.
        return replace(of_headers(fields, tensors, model), stored=None, stored_method=None).with_remarks(f"{problem}.")
    stored = sum(prod(info.shape) for info in tensors.values() if not info.name.startswith("rope_"))
    if stored != built.parameters:
        raise BadModel(
            f"{quoted(model)}: its metadata and its weights disagree: {built.parameters} numbers are expected of the "
            f"architecture {quoted(named)}, the file holds {stored}"
        )
    remark = (
        "A GGUF model is turned back into weights when transformers loads it: planned as those weights, with the "
        "windows of attention that are usual in its family."
    )
    return replace(built, source="weights", stored=None).with_remarks(remark)


def _may_load(model_type: str) -> bool:
    """Whether transformers' table of GGUF architectures names it: a look at its file; True where it isn't installed."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return True
    table = Path(found.origin).parent / "integrations" / "ggml.py"
    name = model_type.removesuffix("_text")
    return not table.is_file() or f'"{name}": {{' in table.read_text("utf-8", errors="replace")
