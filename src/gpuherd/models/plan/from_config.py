"""A model's architecture by formula, from its config alone. Pure.

Knows the fields that are not a family's own: the stored precision, limits, remote code, quantisation. The families are
``families``, the parts of multimodal models ``wrapped``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from gpuherd.errors import BadModel
from gpuherd.models.names import shown
from gpuherd.models.plan.architecture import Architecture, Block
from gpuherd.models.plan.families import FAMILIES
from gpuherd.models.plan.fields import Fields, family_defaults
from gpuherd.options import nearest

STORED = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp32"}


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the shapes of such a model are known by formula."""
    return model_type_of(config) in FAMILIES


def model_type_of(config: Mapping[str, Any]) -> str:
    """``model_type``; empty where there is none."""
    found = config.get("model_type")
    return found if isinstance(found, str) else ""


def architecture_of(config: Mapping[str, Any], model: str) -> Architecture:
    """The architecture of the model that transformers builds from this config.

    Args:
        config: a parsed config.json.
        model: how the user named it, for messages.

    Raises:
        BadModel: the family is not known here, or a field is missing or can't be.
    """
    model_type = model_type_of(config)
    if model_type not in FAMILIES:
        raise BadModel(unknown(config, model))
    whole = Fields(config, model, model_type)
    family = FAMILIES[model_type]
    c = family.text(whole)
    split = family_defaults()[c.model_type]["split"]
    blocks = family.blocks(whole, split)
    heads = c.heads if c.get("num_attention_heads") is not None else 0
    return Architecture(
        model=model,
        model_type=model_type,
        class_name=family_defaults()[model_type]["class_name"],
        blocks=blocks,
        hidden_size=c.hidden,
        intermediate_size=family.widest(c),
        vocab_size=c.vocabulary,
        heads=heads,
        is_encoder_decoder=family.is_encoder_decoder,
        stored=stored_precision(config),
        source="config",
        assumptions=(*assumptions_of(config), *quantised_of(config), *images_of(blocks)),
        max_tokens=c.size("max_position_embeddings") if c.get("max_position_embeddings") is not None else None,
        tensor_parallel=bool(split),
        tensor_parallel_limit=gcd(heads, c.key_heads) if split else None,
    )


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
    method = shown(str(settings.get("quant_method", "an unnamed method")))
    return (f"The config says that the weights are stored quantised ({method}); this plan is of plain ones.",)


def images_of(blocks: Sequence[Block]) -> tuple[str, ...]:
    """A sentence where there is a part for images, whose work no plan counts."""
    if any(block.kind == "other" for block in blocks):
        return ("It can read images; the plan is for prompts of text alone, with the image encoder's weights.",)
    return ()


def unknown(config: Mapping[str, Any], model: str) -> str:
    """Why there is no formula for it, and what to do."""
    model_type = model_type_of(config)
    if not model_type:
        return f"{shown(model)}: its config.json has no model_type, so that its architecture is not known"
    near = nearest(model_type, FAMILIES, cutoff=0.8)
    hint = f" (nearest known: {near[0]})" if near else ""
    code = "; it needs code of its own" if isinstance(config.get("auto_map"), Mapping) else ""
    return (
        f"{shown(model)} is of the architecture {shown(model_type)}, whose shapes are not known here{hint}{code}. With "
        "its weights in the folder it can be planned from their headers"
    )
