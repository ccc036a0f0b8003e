"""Attention to a beginning that all rows of a batch share: its keys and values are kept once and not a copy a row.

With a copy a row, half the time of a step goes into reading the copies. Kept once, the queries of all rows meet it in
one product of matrices (Juravsky et al. 2024, Hydragen). transformers' models call this in place of its own attention
("sdpa") while a beginning is shared. Imports transformers: imported only where a model is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "gpuherd_shared_beginning"
INSTEAD_OF = "sdpa"


@dataclass(eq=False)
class Beginning:
    """Keys and values of a layer, (1, heads, tokens, width), of the tokens that all rows begin with.

    Attributes:
        attended: how often a layer asked it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    attended: int = 0

    def __post_init__(self) -> None:
        # In float32: as it is there once, that costs little, and no product is rounded to half precision.
        self._wide = self.keys[0].float(), self.values[0].float()

    @property
    def length(self) -> int:
        """Its tokens."""
        return int(self.keys.shape[-2])

    def before(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the beginning and behind it, (rows, heads, tokens, width), a copy of it for each row."""
        rows = keys.shape[0]
        return (
            torch.cat([self.keys.expand(rows, -1, -1, -1), keys], dim=-2),
            torch.cat([self.values.expand(rows, -1, -1, -1), values], dim=-2),
        )

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """What one token a row takes from the beginning and from its row: (rows, 1, heads, width).

        Scores are of float32 throughout, whatever the dtype of the rest.

        Args:
            query: (rows, heads, 1, width).
            keys, values: of what stands behind the beginning, (rows, key heads, tokens, width).
            mask: (rows, 1, 1, all tokens) of bool: what counts.
        """
        rows, heads, _, width = query.shape
        key_heads = keys.shape[1]
        asked = (query.float() * scaling).view(rows, key_heads, heads // key_heads, width)
        at_once = asked.transpose(0, 1).reshape(key_heads, -1, width)
        first, values_of_first = self._wide
        of_first = (at_once @ first.mT).view(key_heads, rows, -1, self.length).transpose(0, 1)
        scores = torch.cat([of_first, asked @ keys.float().mT], dim=-1)
        weights = scores.masked_fill_(~mask, -torch.inf).softmax(dim=-1)
        of_first = weights[..., : self.length].transpose(0, 1).reshape(key_heads, -1, self.length)
        taken = (of_first @ values_of_first).view(key_heads, rows, -1, values.shape[-1]).transpose(0, 1)
        taken = taken + weights[..., self.length :] @ values.float()
        return taken.reshape(rows, 1, heads, values.shape[-1]).to(query.dtype)


def tagged(keys: torch.Tensor, beginning: Beginning) -> torch.Tensor:
    """The keys behind a beginning, as a layer's cache hands them to its attention."""
    keys.beginning = beginning  # type: ignore[attr-defined]
    return keys


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **how: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' interface of attention; keys that stand behind no shared beginning go to its own."""
    beginning: Beginning | None = getattr(key, "beginning", None)
    if beginning is not None:
        beginning.attended += 1
        plain = all(how.get(name) is None for name in ("position_bias", "softcap", "s_aux"))
        if plain and query.shape[-2] == 1 and attention_mask is not None and attention_mask.dtype == torch.bool:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return beginning.attend(query, key, value, attention_mask, scale), None
        key, value = beginning.before(key, value)
    taken: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **how
    )
    return taken


def _mask(*sizes: Any, **how: Any) -> torch.Tensor | None:
    """transformers' mask, never left out: so keys that lost their beginning on the way don't fit, and nothing is wrong
    in silence."""
    mask: torch.Tensor | None = sdpa_mask(*sizes, **(how | {"allow_is_causal_skip": False}))
    return mask


@contextmanager
def in_use(config: Any) -> Iterator[None]:
    """Within this the model of this config calls the attention of this module."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
