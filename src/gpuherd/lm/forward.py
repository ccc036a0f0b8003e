"""The one place that calls a causal model: what its forward takes, the cache it keeps, masks and positions; and which
prompts go together in a batch.

A ``BatchReading`` is a batch of rows of tokens that the model has read. It can read on, and its rows can be repeated,
put in order and left out, whatever cache the model keeps. Models without a cache of transformers' kind read everything
again at each step: slow, and right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from gpuherd.errors import BadModel, UsageError
from gpuherd.runs.worker import is_out_of_memory

if TYPE_CHECKING:
    import torch


T = TypeVar("T")

_CACHE_NAMES = ("past_key_values", "cache_params")


@dataclass(eq=False)
class CausalModel:
    """A module that predicts the next token.

    Attributes:
        module: transformers' causal model; PEFT's is taken apart (``causal_model``), its adapters stay active.
        device: where token ids go.
    """

    module: Any
    device: str

    @cached_property
    def takes(self) -> frozenset[str]:
        """The names of what its forward takes."""
        return _taken(self.module)

    @cached_property
    def cache_name(self) -> str | None:
        """Under which name it takes a cache that holds all that it keeps; None where it does not."""
        supported = getattr(self.module, "_supports_default_dynamic_cache", None)
        name = next((each for each in _CACHE_NAMES if each in self.takes), None)
        return name if name is not None and supported is not None and supported() and self._keeps_all(name) else None

    def _keeps_all(self, name: str) -> bool:
        """Whether what the model must know of earlier tokens lies in the cache, so that rows can be repeated there.

        RecurrentGemma's cache has places for states, and the states lie in its modules: so a model with such places
        reads two tokens to see.
        """
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self.module.config)
        if not any(cache.is_linear):
            return True
        with torch.inference_mode():
            self.module(
                input_ids=torch.zeros((1, 2), dtype=torch.long, device=self.device), use_cache=True, **{name: cache}
            )
        return bool(cache.has_previous_state())

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether what it keeps of a text is a state that every token passes through, padding too."""
        cache = self.new_cache()
        return bool(getattr(self.module, "_is_stateful", False)) or (cache is not None and any(cache.is_linear))

    @cached_property
    def takes_padding(self) -> bool:
        """Whether rows of unequal lengths can go together without a change to any of them."""
        return self.cache_name is not None and not self.is_recurrent

    @cached_property
    def window(self) -> int | None:
        """The fewest tokens that a layer of it sees back, where some see only a few."""
        cache = self.new_cache()
        layers = [] if cache is None else cache.layers
        return min((each.sliding_window for each in layers if getattr(each, "is_sliding", False)), default=None)

    def goes_on_behind_a_gap(self, length: int) -> bool:
        """Whether rows of this length (the gap counted) may have masked places between tokens that they share and
        their own: where positions are passed, and every layer sees all of it."""
        return self.takes_padding and "position_ids" in self.takes and (self.window is None or length <= self.window)

    @cached_property
    def shares_prefix(self) -> bool:
        """Whether what all rows begin with can be kept once, and not a copy a row: where its layers call the attention
        that they are given, by what their cache returned. The model reads a few tokens to see."""
        import torch

        from gpuherd.lm.cache import INSTEAD_OF, RoomyLayer

        config = self.module.config
        if not self.takes_padding or getattr(config, "_attn_implementation", None) != INSTEAD_OF:
            return False
        reading = BatchReading(self, 1)
        with torch.inference_mode():
            one = torch.ones((1, 1), dtype=torch.long, device=self.device)
            reading.read(one, one)
            reading.share(2)
            layers = [each for each in reading.layers if isinstance(each, RoomyLayer)]
            try:
                for width in (2, 1):
                    reading.read(one.repeat(2, width), one.repeat(2, width))
            except (RuntimeError, ValueError, TypeError, AttributeError) as problem:
                if is_out_of_memory(problem):
                    raise
                return False
        return bool(layers) and all(each.beginning is not None and each.beginning.attended == 2 for each in layers)

    @cached_property
    def most_positions(self) -> int | None:
        """The most tokens of prompt and answer together, None where the config does not say."""
        config = self.module.config.get_text_config(decoder=True)
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0:
                return value
        return None

    def new_cache(self) -> Any | None:
        """An empty cache of the kinds of layers that the model has, None where it takes none."""
        from gpuherd.lm.cache import roomy_cache

        return None if self.cache_name is None else roomy_cache(self.module.config)

    def logits(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any | None, keep: int
    ) -> torch.Tensor:
        """The raw logits of the last ``keep`` places, (rows, keep, vocabulary), on whatever device they come out."""
        words: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
        if self.takes_padding:  # of the others some apply the mask of all tokens to the new ones alone
            words["attention_mask"] = mask
        if "position_ids" in self.takes:
            words["position_ids"] = positions
        if "logits_to_keep" in self.takes:
            words["logits_to_keep"] = keep
        if cache is not None and self.cache_name is not None:
            words[self.cache_name] = cache
        with self._attention(cache):
            logits: torch.Tensor = self.module(**words).logits
        return logits[:, -keep:]

    def _attention(self, cache: Any | None) -> AbstractContextManager[None]:
        """In which the module is called with this cache."""
        from gpuherd.lm.cache import in_use

        shared = cache is not None and any(getattr(each, "beginning", None) is not None for each in cache.layers)
        return in_use(self.module.config) if shared else nullcontext()

    def states(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The last layer's states, (rows, tokens, width): what the head would make logits of."""
        body = self.module.base_model
        words: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if self.takes_padding:
            words["attention_mask"] = mask
        if "position_ids" in _taken(body):
            words["position_ids"] = positions
        states: torch.Tensor = body(**words)[0]
        return states


def causal_model(module: Any, device: str | None = None) -> CausalModel:
    """The module as it is called here; ``device``: where ids go, that of its embedding by default.

    Raises BadModel for what is no model that predicts the next token: an encoder-decoder model, an adapter of prompts.
    """
    if hasattr(module, "peft_type"):
        inner = module.get_base_model()
        if module.active_peft_config.is_prompt_learning:
            raise BadModel(f"a {module.peft_type.value} adapter learns prompts, and these are put without; use LoRA")
        module = inner
    if getattr(module.config, "is_encoder_decoder", False):
        raise BadModel(
            f"{type(module).__name__} has an encoder and a decoder; answers are decoded from models that only decode"
        )
    if device is None:
        device = str(module.get_input_embeddings().weight.device)
    return CausalModel(module, device)


def _taken(module: Any) -> frozenset[str]:
    """The names of what a module's forward takes; its class's, since hooks may have wrapped its own."""
    return frozenset(inspect.signature(type(module).forward).parameters)


def padded(model: CausalModel, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, (rows, longest) int64, padded at the left by token 0, which the mask hides."""
    import torch

    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=model.device), torch.tensor(mask, device=model.device)


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """The place of each token among the tokens of its row that count, from 0."""
    return (mask.cumsum(dim=-1) - 1).clamp_(min=0)


class BatchReading:
    """Rows of tokens that a model has read so far.

    Attributes:
        mask: (rows, tokens) int64: 1 for tokens that count.
    """

    def __init__(self, model: CausalModel, rows: int, *, keeping: bool = True):
        """``rows``: how many there will be, of no token yet. ``keeping``: whether it may read on from a cache."""
        import torch

        self._model = model
        self._cache = model.new_cache() if keeping else None
        self.mask = torch.zeros((rows, 0), dtype=torch.long, device=model.device)
        self._ids = self.mask  # all of them, where nothing is kept but them

    def read(self, ids: torch.Tensor, mask: torch.Tensor, keep: int = 1) -> torch.Tensor:
        """Reads on, (rows, new) each; the logits behind the last ``keep`` tokens, (rows, keep, vocabulary)."""
        import torch

        self.mask = torch.cat([self.mask, mask], dim=1)
        positions = positions_of(self.mask)
        if self._cache is not None:
            return self._model.logits(ids, self.mask, positions[:, -ids.shape[1] :], self._cache, keep)
        self._ids = torch.cat([self._ids, ids], dim=1)
        return self._model.logits(self._ids, self.mask, positions, None, keep)

    @property
    def layers(self) -> Sequence[Any]:
        """Those of the cache, transformers' own; none where nothing is kept."""
        return () if self._cache is None else self._cache.layers

    def repeat(self, rows: int) -> None:
        """The one row there is becomes so many, kept once where the model can."""
        if self._cache is not None and self._model.shares_prefix:
            self.share(rows)
        else:
            self.select([0] * rows)

    def share(self, rows: int) -> None:
        """``repeat`` for a model that keeps beginnings once."""
        from gpuherd.lm.cache import RoomyLayer

        first = self.mask.new_zeros(rows)
        self.mask = self.mask.index_select(0, first)
        for layer in self.layers:
            if isinstance(layer, RoomyLayer):
                layer.share()
            else:
                layer.reorder_cache(first)

    def select(self, rows: Sequence[int]) -> None:
        """The rows that go on, in this order; one may be there several times."""
        import torch

        index = torch.tensor(rows, device=self._model.device)
        self.mask = self.mask.index_select(0, index)
        if self._cache is None:
            self._ids = self._ids.index_select(0, index)
        else:
            # Of all that caches offer, the one that layers of every kind have: attention, sliding, states.
            self._cache.reorder_cache(index)


# ---- batches: prompts of like lengths, longest first, and smaller ones where memory runs out. Pure. ------------------


def plan_batches(lengths: Sequence[int], *, rows: int, most_tokens: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Places in ``lengths``, divided into batches: longest first, so that what does not fit shows at once.

    Equal lengths keep their order, so that equal inputs give equal batches.

    Args:
        lengths: tokens of each prompt.
        rows: the most prompts of a batch.
        most_tokens: the most tokens of a batch, padding counted; a prompt that is longer goes alone. No bound if None.

    >>> plan_batches([3, 9, 3, 8], rows=2)
    ((1, 3), (0, 2))
    >>> plan_batches([3, 9, 3, 8], rows=4, most_tokens=12)
    ((1,), (3,), (0, 2))
    """
    if rows < 1 or (most_tokens is not None and most_tokens < 1):
        raise UsageError("a batch has one row and one token at least")
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        wide = lengths[batch[0]] if batch else 0  # the first is the longest
        if batch and (len(batch) == rows or (most_tokens is not None and wide * (len(batch) + 1) > most_tokens)):
            batches.append(tuple(batch))
            batch = []
        batch.append(place)
    return (*batches, tuple(batch)) if batch else tuple(batches)


def halved(batch: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two halves of a batch that was too large, the first the larger where they differ.

    >>> halved((4, 1, 7))
    ((4, 1), (7,))
    """
    middle = (len(batch) + 1) // 2
    return tuple(batch[:middle]), tuple(batch[middle:])


def halving(
    batches: Iterable[Sequence[int]],
    work: Callable[[Sequence[int]], Sequence[T]],
    smaller: Callable[[Sequence[int], int], object] = lambda *_: None,
) -> dict[int, T]:
    """What ``work`` makes of each place: a batch at a time, each halved where memory runs out; one that can't be halved
    raises. ``smaller`` is called with a batch that did not fit, and how many of it are tried next."""
    waiting, found = list(batches), dict[int, T]()
    while waiting:
        batch = waiting.pop(0)
        try:
            found.update(zip(batch, work(batch), strict=True))
        except (RuntimeError, MemoryError) as problem:
            if len(batch) == 1 or not is_out_of_memory(problem):
                raise
        else:
            continue
        # Outside the handler: a traceback keeps the tensors of the failed batch alive.
        release()
        waiting[:0] = halved(batch)
        smaller(batch, len(waiting[0]))
    return found


def release() -> None:
    """Gives back the memory of a batch that did not fit."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def pieces(count: int, most: int | None) -> Iterator[range]:
    """``count`` places in a row, so many at a time.

    >>> [list(each) for each in pieces(5, 2)]
    [[0, 1], [2, 3], [4]]
    """
    step = max(1, count if most is None else most)
    for start in range(0, count, step):
        yield range(start, min(count, start + step))


def common_prefix(token_ids: Sequence[Sequence[int]]) -> int:
    """How many tokens all of these begin with; at least one is left to each for its own.

    >>> common_prefix([(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3)])
    2
    """
    first = token_ids[0]
    same = min(len(each) for each in token_ids) - 1
    for other in token_ids[1:]:
        same = next((place for place in range(same) if other[place] != first[place]), same)
    return same
