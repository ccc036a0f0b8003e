"""The families of models whose shapes are known by formula: ``model_type`` of a config -> its layout. Pure.

Names, shapes and roles are those of the model that transformers 5 builds; tests compare every one with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any, Protocol

from tests.models.describe.formulas.encoders import ENCODER_DECODERS, ENCODERS
from tests.models.describe.formulas.fields import Fields, family_defaults
from tests.models.describe.formulas.gpt import GPT_LIKE
from tests.models.describe.formulas.llama import LLAMA_LIKE
from tests.models.describe.formulas.mixtures import MIXTURES
from tests.models.describe.formulas.recurrent import MAMBA, RECURRENT
from tests.models.describe.formulas.wrapped import WRAPPED

from gpuherd.errors import BadModel
from gpuherd.models.describe.config import assumptions_of, images_of, model_type_of, quantised_of, stored_precision
from gpuherd.models.describe.description import Architecture, Block
from gpuherd.models.names import quoted
from gpuherd.options import nearest


class Family(Protocol):
    """A family, of whatever form."""

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the prompt goes to an encoder."""
        ...

    @property
    def widest(self) -> Callable[[Fields], int]:
        """The widest that a token goes through, from the config of the language model."""
        ...

    def text(self, c: Fields) -> Fields:
        """The config of the language model, within the whole."""
        ...

    def blocks(self, c: Fields, split: Mapping[str, str]) -> tuple[Block, ...]:
        """All blocks, in the order of computation."""
        ...


FAMILIES: Mapping[str, Family] = {
    **LLAMA_LIKE,
    **MIXTURES,
    **GPT_LIKE,
    **MAMBA,
    **RECURRENT,
    **ENCODER_DECODERS,
    **ENCODERS,
    **WRAPPED,
}


# A model's architecture by formula, from its config alone. Pure.
#
# Knows the fields that are not a family's own: the stored precision, limits, remote code, quantisation. The families
# are ``families``, the parts of multimodal models ``wrapped``.


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
        source="model",
        assumptions=(*assumptions_of(config), *quantised_of(config), *images_of(blocks)),
        max_tokens=c.size("max_position_embeddings") if c.get("max_position_embeddings") is not None else None,
        tensor_parallel=bool(split),
        tensor_parallel_limit=gcd(heads, c.key_heads) if split else None,
    )


def unknown(config: Mapping[str, Any], model: str) -> str:
    """Why there is no formula for it, and what to do."""
    model_type = model_type_of(config)
    if not model_type:
        return f"{quoted(model)}: its config.json has no model_type, so that its architecture is not known"
    near = nearest(model_type, FAMILIES, cutoff=0.8)
    hint = f" (nearest known: {near[0]})" if near else ""
    code = "; it needs code of its own" if isinstance(config.get("auto_map"), Mapping) else ""
    return (
        f"{quoted(model)} is of the architecture {quoted(model_type)}, whose shapes are not known here{hint}{code}. "
        "With its weights in the folder it can be planned from their headers"
    )
