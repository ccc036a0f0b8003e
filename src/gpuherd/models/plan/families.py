"""The families of models whose shapes are known by formula: ``model_type`` of a config -> its layout. Pure.

Names, shapes and roles are those of the model that transformers 5 builds; tests compare every one with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from gpuherd.models.plan.architecture import Block
from gpuherd.models.plan.families_encoder import ENCODER_DECODERS, ENCODERS
from gpuherd.models.plan.families_gpt import GPT_LIKE
from gpuherd.models.plan.families_llama import LLAMA_LIKE
from gpuherd.models.plan.families_mamba import MAMBA
from gpuherd.models.plan.families_mixture import MIXTURES
from gpuherd.models.plan.families_recurrent import RECURRENT
from gpuherd.models.plan.fields import Fields
from gpuherd.models.plan.wrapped import WRAPPED


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
