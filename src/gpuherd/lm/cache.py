"""A cache that grows in place: transformers' own copies all keys and values of a layer for every token that comes.

Imports transformers: imported only where a model is called.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from gpuherd.lm.beginning import Beginning, tagged

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
                _with_room(self.keys, key_states, before, after),
                _with_room(self.values, value_states, before, after),
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


def _with_room(old: torch.Tensor, new: torch.Tensor, before: int, after: int) -> torch.Tensor:
    rows, heads, _, width = new.shape
    room = new.new_empty((rows, heads, after + _STEP, width))
    if before:
        room[:, :, :before] = old
    return room
