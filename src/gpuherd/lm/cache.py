"""Keys and values of a batch of rows: a cache that grows in place, and a beginning that all rows share.

transformers' own cache copies all keys and values of a layer for every new token. And with a copy of a shared beginning
a row, half the time of a step goes into reading the copies. Kept once, the queries of all rows meet it in one product
of matrices (Juravsky et al. 2024, Hydragen). transformers' models call this attention in place of their own ("sdpa")
while a beginning is shared. Imports transformers: imported only where a model is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
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


_STEP = 64  # tokens that a layer has room for beyond those that it has to have


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of an attention layer, (rows, heads, tokens, width), as views of tensors with room for more.

    Attributes:
        beginning: what all rows begin with; keys and values are then of what stands behind it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    _room: tuple[torch.Tensor, torch.Tensor] | None = None
    beginning: Beginning | None = None

    def share(self) -> None:
        """What there is, of one row, is from now on the beginning of all rows that come."""
        self.beginning = Beginning(self.keys, self.values)
        self.keys = self.values = self.keys.new_empty(0)
        self._room = None

    def get_seq_length(self) -> int:
        """Tokens of a row, those of the beginning counted."""
        return self._own_length() + (0 if self.beginning is None else self.beginning.length)

    def _own_length(self) -> int:
        return int(super().get_seq_length())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds those of new tokens; all keys and values, those of the beginning apart."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self._own_length()
        after = before + key_states.shape[-2]
        room = self._room
        if room is None or room[0].shape[-2] < after:
            room = (
                _with_capacity(self.keys, key_states, before, after),
                _with_capacity(self.values, value_states, before, after),
            )
            self._room = room
        for place, states in zip(room, (key_states, value_states), strict=True):
            place[:, :, before:after] = states
        self.keys = room[0][:, :, :after]
        self.values = room[1][:, :, :after]
        return (self.keys if self.beginning is None else tagged(self.keys, self.beginning)), self.values

    def keep(self, length: int, slots: torch.Tensor) -> None:
        """Of the tokens behind the first ``length``, those of a shared beginning not counted, keeps these alone: each
        row's ``slots``, (rows, kept), counted from there; they move up to it."""
        after = length + slots.shape[1]
        kept = []
        for place in (self.keys, self.values):
            index = (length + slots)[:, None, :, None].expand(-1, place.shape[1], -1, place.shape[3])
            kept.append(place.gather(2, index))
        if self._room is None:
            self.keys, self.values = (
                torch.cat([place[:, :, :length], states], dim=2)
                for place, states in zip((self.keys, self.values), kept, strict=True)
            )
            return
        for place, states in zip(self._room, kept, strict=True):
            place[:, :, length:after] = states
        self.keys, self.values = (place[:, :, :after] for place in self._room)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows that go on; there is room again when the next token comes."""
        if self._own_length():
            super().reorder_cache(beam_idx)
        self._room = None


def roomy_cache(config: Any) -> DynamicCache:
    """An empty cache of the kinds of layers that this config has; plain attention grows in place."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = RoomyLayer
    return cache


def _with_capacity(old: torch.Tensor, new: torch.Tensor, before: int, after: int) -> torch.Tensor:
    rows, heads, _, width = new.shape
    room = new.new_empty((rows, heads, after + _STEP, width))
    if before:
        room[:, :, :before] = old
    return room
