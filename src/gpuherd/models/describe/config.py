"""What a config.json says of a model beside the shapes that transformers reads off it: its type, the precision and
method of storage, code of its own, and the usual fields for where nothing but headers is there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuherd.models.describe.description import Block
from gpuherd.models.names import quoted

STORED = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp32"}
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
# Far above any model that exists, and small enough that no product of a few of them is slow to handle.
_MOST = 1 << 40
# The names that configs have for the same field.
_NAMES = {
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
    "key_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "head_dim": ("head_dim", "kv_channels", "d_kv", "head_size"),
    "intermediate": ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "hidden_dim"),
    "tokens": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}


def model_type_of(config: Mapping[str, Any]) -> str:
    """``model_type``; empty where there is none."""
    found = config.get("model_type")
    return found if isinstance(found, str) else ""


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config of the language model inside a multimodal model's config, None where there is none."""
    return next((config[key] for key in _TEXT_PARTS if isinstance(config.get(key), Mapping)), None)


def number_of(config: Mapping[str, Any], what: str) -> int | None:
    """A whole number above 0 from the first field that has one: ``heads``, ``key_heads``, ``hidden``, ``head_dim``,
    ``intermediate`` or ``tokens``."""
    values = (config.get(name) for name in _NAMES[what])
    return next((value for value in values if type(value) is int and 0 < value < _MOST), None)


def stored_precision(config: Mapping[str, Any]) -> str | None:
    """The precision that the config names, as ``Precision`` has it; None where it names none."""
    for key in ("dtype", "torch_dtype"):
        named = config.get(key)
        if isinstance(named, str):
            return STORED.get(named.removeprefix("torch."))
    return None


def assumptions_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the config leaves open, as sentences."""
    if isinstance(config.get("auto_map"), Mapping):
        return ("The model brings code of its own (auto_map); the plan is of the code in transformers.",)
    return ()


def quantised_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence where the config says that its weights are stored as codes, whose size it doesn't tell."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return ()
    method = quoted(str(settings.get("quant_method", "an unnamed method")))
    return (f"The config says that the weights are stored quantised ({method}); this plan is of plain ones.",)


def images_of(blocks: Sequence[Block]) -> tuple[str, ...]:
    """A sentence where there is a part for images, whose work no plan counts."""
    if any(block.kind == "other" for block in blocks):
        return ("It can read images; the plan is for prompts of text alone, with the image encoder's weights.",)
    return ()
