"""The classifier's torch module, a causal model's body with a linear head that predicts the reward at every token, and
how its rows are read while a policy decodes.

``TreeReading`` keeps keys and values: a step reads the candidates of all rows in one pass (tree attention), and the
chosen one's keys and values stay, so that it is never read again. ``UncachedReading`` keeps tokens alone and reads all
anew: for models whose caches can't do that (states, chunks). Imports torch and transformers: imported only where a
classifier is made or called.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, linear
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from gpuherd.errors import BadModel
from gpuherd.lm.cache import RoomyLayer
from gpuherd.lm.forward import positions_of
from gpuherd.lm.guidance.guide import ClassifierForm, Kind

# ---- the module that is trained --------------------------------------------------------------------------------------


class ValueModel(nn.Module):
    """The module that is trained; ``Classifier`` loads and saves it.

    Attributes:
        body: transformers' model without its head for tokens.
        head: of ``form.width`` numbers (kind V), or of as many for each token of the vocabulary (kind Q).
        vocabulary: ids below this have an embedding.
        takes: the names of what the body's forward takes.
    """

    def __init__(self, body: nn.Module, form: ClassifierForm, width: int):
        """``width``: of the body's last state.

        The head is 0: it predicts p = 1/2, or the uniform distribution of the atoms.
        """
        super().__init__()
        self.body = body
        self.form = form
        embeddings: Any = body.get_input_embeddings()  # type: ignore[operator]
        self.vocabulary = int(embeddings.weight.shape[0])
        out = form.width * (self.vocabulary if form.kind is Kind.Q else 1)
        self.head = nn.Linear(width, out, device=embeddings.weight.device, dtype=embeddings.weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.takes = frozenset(inspect.signature(type(body).forward).parameters)

    @property
    def config(self) -> Any:
        """The body's, transformers'."""
        return self.body.config

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The value of every token behind its prefix: its logits, (rows, tokens) float32, or (rows, tokens, atoms).

        Args:
            ids: (rows, tokens) int64.
            mask: 1 for tokens that count, 0 for padding at either side; all count by default. Values of padding mean
                nothing.
            positions: each token's place in its row; counted from the mask by default.

        A classifier of kind Q tells the first token's value of a row by 0: nothing stands before it.
        """
        mask = torch.ones_like(ids) if mask is None else mask
        positions = positions_of(mask) if positions is None else positions
        states = self.states(ids, mask, positions)
        if self.form.kind is Kind.V:
            return self.values_at(states)
        values = self.values_of(states[:, :-1], ids[:, 1:, None])[:, :, 0]
        values = torch.cat([torch.zeros_like(values[:, :1]), values], dim=1)
        first = (positions == 0).view(*positions.shape, *[1] * (values.dim() - 2))
        return values.masked_fill(first, 0)

    def states(self, ids: torch.Tensor, mask: Any, positions: torch.Tensor, **more: Any) -> torch.Tensor:
        """The body's last states, (rows, tokens, width). ``mask`` and ``more`` as its forward takes them."""
        words = {"input_ids": ids, "attention_mask": mask, "use_cache": False, **more}
        if "position_ids" in self.takes:
            words["position_ids"] = positions
        states: torch.Tensor = self.body(**words)[0]
        return states

    def values_at(self, states: torch.Tensor) -> torch.Tensor:
        """Kind V: the values of the tokens that these are the states of, (...) or (..., atoms), float32."""
        values = _linear(states, self.head.weight, self.head.bias)
        return values if self.form.atoms else values[..., 0]

    def values_of(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Kind Q: the values of tokens behind states (..., width): tokens (..., k) -> (..., k) or (..., k, atoms),
        float32. Only these tokens' rows of the head are used."""
        rows = self.head.weight.view(self.vocabulary, -1)  # (vocabulary, atoms * width)
        weights = embedding(tokens, rows).view(*tokens.shape, self.form.width, -1).float()
        biases = embedding(tokens, self.head.bias.view(self.vocabulary, -1)).float()
        values: torch.Tensor = (weights @ states.float()[..., None, :, None])[..., 0] + biases
        return values if self.form.atoms else values[..., 0]

    def gradient_checkpointing_enable(self, **how: Any) -> None:
        """Transformers', of the body."""
        self.body.gradient_checkpointing_enable(**how)  # type: ignore[operator]

    def gradient_checkpointing_disable(self) -> None:
        """Transformers', of the body."""
        self.body.gradient_checkpointing_disable()  # type: ignore[operator]


def _linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """In float32, whatever the body computes in: of a value in bfloat16 three digits would be left."""
    with torch.autocast(states.device.type, enabled=False):
        return linear(states.float(), weight.float(), bias.float())


def width_of(body: nn.Module, name: str) -> int:
    """The width of a body's last states. It reads four tokens, twice, the last another one.

    Raises BadModel where what follows a token changes its state: a model that reads both ways has no value of a prefix.
    """
    embeddings: Any = body.get_input_embeddings()  # type: ignore[operator]
    vocabulary = int(embeddings.weight.shape[0])
    device = embeddings.weight.device
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0]], device=device) % vocabulary
    words: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    training = body.training
    with torch.no_grad():
        states = body.eval()(**words)[0].float()
    body.train(training)
    if not torch.allclose(states[0, :3], states[1, :3], rtol=1e-2, atol=1e-3 * float(states.abs().max())):
        raise BadModel(f"{name} reads what follows a token too; a classifier is made from a causal language model")
    return int(states.shape[-1])


# ---- rows that the body has read, and candidates for the next place of each, read in one pass ------------------------


def tree_attention_mask(
    mask: torch.Tensor,
    positions: torch.Tensor,
    new_mask: torch.Tensor,
    new_positions: torch.Tensor,
    own: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """Which keys each new token sees: (rows, 1, new, kept + new) of bool. Every token sees itself.

    Args:
        mask: (rows, kept): which of the tokens that are kept count.
        positions: (rows, kept) of them.
        new_mask, new_positions: (rows, new) of the tokens that are read now.
        own: (new, new) of bool: which of the new ones may see which.
        window: a token sees this many back, itself counted; None: all.
    """
    keys = torch.cat([positions, new_positions], dim=1)[:, None, :]
    counted = torch.cat([mask, new_mask], dim=1).bool()[:, None, :]
    kept, new = mask.shape[1], new_mask.shape[1]
    allowed = torch.cat([own.new_ones((new, kept)), own], dim=1)[None]
    seen = allowed & counted
    if window is not None:
        seen = seen & (keys > new_positions[:, :, None] - window)
    itself = torch.zeros((new, kept + new), dtype=torch.bool, device=own.device)
    itself[:, kept:].fill_diagonal_(fill_value=True)
    return (seen | itself)[:, None]


def candidate_mask(pending: int, candidates: int, device: torch.device) -> torch.Tensor:
    """Of so many tokens in a row and the candidates for the place behind them which see which: (new, new) of bool.

    The former see those before them, candidates the former and not each other; each sees itself.
    """
    own = torch.eye(pending + candidates, dtype=torch.bool, device=device)
    own[:pending, :pending] = True
    own[:pending, :pending].tril_()
    own[pending:, :pending] = True
    return own


logger = logging.getLogger(__name__)

_AT_ONCE = 8192  # tokens that a plain reading reads in one pass


class TreeReading:
    """With a cache. A token that is taken and was no candidate is read with the next candidates."""

    def __init__(self, model: ValueModel, rows: int, kinds: LayerKinds):
        """``rows`` of no token yet."""
        self._model, self._kinds = model, kinds
        self._cache = DynamicCache(config=model.config)
        self._cache.layers = [RoomyLayer() for _ in self._cache.layers]
        self._cache.layer_class_to_replicate = RoomyLayer if not self._cache.layers else None
        self.mask = torch.zeros((rows, 0), dtype=torch.long, device=model.head.weight.device)
        self._positions = self.mask
        self._pending = self._pending_mask = self.mask
        self._candidates: torch.Tensor | None = None

    def read(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Reads on, (rows, new) each; the last token's states, (rows, width)."""
        new = torch.cat([self.mask, mask], dim=1)
        positions = positions_of(new)[:, self.mask.shape[1] :]
        seen: Any = new
        if self._kinds.windowed:
            own = candidate_mask(ids.shape[1], 0, ids.device)
            seen = self._attention_mask(mask, positions, own)
        states = self._model.states(ids, seen, positions, use_cache=True, past_key_values=self._cache)
        self.mask, self._positions = new, torch.cat([self._positions, positions], dim=1)
        return states[:, -1]

    def branch(self, candidates: torch.Tensor) -> torch.Tensor:
        """States of candidates (rows, k) for each row's next place, (rows, k, width)."""
        waiting = self._pending.shape[1]
        length = self.mask.sum(dim=1, keepdim=True)
        behind = length + self._pending_mask.sum(dim=1, keepdim=True)
        ids = torch.cat([self._pending, candidates], dim=1)
        mask = torch.cat([self._pending_mask, torch.ones_like(candidates)], dim=1)
        positions = torch.cat([length.expand(-1, waiting), behind.expand(-1, candidates.shape[1])], dim=1)
        seen = self._attention_mask(mask, positions, candidate_mask(waiting, candidates.shape[1], ids.device))
        states = self._model.states(ids, seen, positions, use_cache=True, past_key_values=self._cache)
        self._candidates = candidates
        return states[:, waiting:]

    def take(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Each row's next token, (rows,); ``counts``: of bool, False for rows that have ended. Follows ``branch``."""
        if self._candidates is None:
            raise RuntimeError("a token is taken behind candidates")
        found = self._candidates == tokens[:, None]
        hit = found.any(dim=1)
        waiting, kept = self._pending.shape[1], self.mask.shape[1]
        slots = torch.cat(
            [torch.arange(waiting, device=hit.device).expand(len(hit), -1), waiting + found.long().argmax(1)[:, None]],
            1,
        )
        for layer in self._cache.layers:
            layer.keep(kept, slots)
        length = self.mask.sum(dim=1, keepdim=True)
        behind = length + self._pending_mask.sum(dim=1, keepdim=True)
        self._positions = torch.cat([self._positions, length.expand(-1, waiting), behind], dim=1)
        self.mask = torch.cat([self.mask, self._pending_mask, (hit & counts).long()[:, None]], dim=1)
        missed = counts & ~hit
        wide = 1 if bool(missed.any()) else 0
        self._pending, self._pending_mask = tokens[:, None][:, :wide], missed.long()[:, None][:, :wide]
        self._candidates = None

    def select(self, rows: torch.Tensor) -> None:
        """The rows that go on, in this order; one may be there several times."""
        self._cache.reorder_cache(rows)
        self.mask, self._positions = self.mask.index_select(0, rows), self._positions.index_select(0, rows)
        self._pending, self._pending_mask = (
            self._pending.index_select(0, rows),
            self._pending_mask.index_select(0, rows),
        )
        if self._candidates is not None:
            self._candidates = self._candidates.index_select(0, rows)

    def _attention_mask(self, mask: torch.Tensor, positions: torch.Tensor, own: torch.Tensor) -> Any:
        """The mask as the body takes it."""
        now = (self.mask, self._positions, mask, positions, own)
        return self._kinds.for_layers(lambda window: self._as_attention_takes(tree_attention_mask(*now, window)))

    def _as_attention_takes(self, seen: torch.Tensor) -> torch.Tensor:
        """Of bool for torch's attention; as numbers that are added for the eager one."""
        if getattr(self._model.config, "_attn_implementation", None) == "sdpa":
            return seen
        dtype = self._model.head.weight.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


class UncachedReading:
    """Without a cache: tokens are kept, and read anew with each candidate; no row has padding."""

    def __init__(self, model: ValueModel, rows: int):
        """``rows`` of no token yet."""
        self._model = model
        self._rows: list[list[int]] = [[] for _ in range(rows)]

    def read(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See ``TreeReading``."""
        for row, tokens, counted in zip(self._rows, ids.tolist(), mask.tolist(), strict=True):
            row += [token for token, counts in zip(tokens, counted, strict=True) if counts]
        return torch.cat([self._states([row]) for row in self._rows])

    def branch(self, candidates: torch.Tensor) -> torch.Tensor:
        """See ``TreeReading``."""
        found = []
        for row, tokens in zip(self._rows, candidates.tolist(), strict=True):
            texts = [[*row, token] for token in tokens]
            step = max(1, _AT_ONCE // len(texts[0]))
            found.append(torch.cat([self._states(texts[at : at + step]) for at in range(0, len(texts), step)]))
        return torch.stack(found)

    def take(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """See ``TreeReading``."""
        for row, token, counted in zip(self._rows, tokens.tolist(), counts.tolist(), strict=True):
            if counted:
                row.append(token)

    def select(self, rows: torch.Tensor) -> None:
        """See ``TreeReading``."""
        self._rows = [list(self._rows[place]) for place in rows.tolist()]

    def _states(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """The last token's states of texts of one length."""
        ids = torch.tensor(texts, device=self._model.head.weight.device)
        mask = torch.ones_like(ids)
        return self._model.states(ids, mask, positions_of(mask))[:, -1]


class LayerKinds:
    """What a body's layers see: all before them, or a window of it.

    Attributes:
        windowed: whether there are windows; masks are then passed to every layer.
    """

    def __init__(self, window: int | None, *, by_name: bool):
        """``window``: how far back, where layers see so far alone; ``by_name``: there are full layers too, and the
        body takes a mask of each kind by its name."""
        self._window, self._by_name = window, by_name
        self.windowed = window is not None

    @classmethod
    def of(cls, config: Any) -> LayerKinds | None:
        """Of transformers' config; None where there are layers of other kinds (states, chunks)."""
        inner = config.get_text_config(decoder=True)
        layers = DynamicCache(config=inner).layers
        if any(type(each) not in (DynamicLayer, DynamicSlidingWindowLayer) for each in layers):
            return None
        named = set(getattr(inner, "layer_types", None) or ())
        if not named <= {"full_attention", "sliding_attention"}:
            return None
        sliding = any(type(each) is DynamicSlidingWindowLayer for each in layers)
        return cls(int(inner.sliding_window) if sliding else None, by_name=sliding and bool(named))

    def for_layers(self, mask: Any) -> Any:
        """``mask``: the mask of a layer of a window (None: of none)."""
        if self._by_name:
            return {"full_attention": mask(None), "sliding_attention": mask(self._window)}
        return mask(self._window)


class ReadingMaker:
    """Makes the readings of one classifier, of the kind that its body can."""

    def __init__(self, model: ValueModel, name: str):
        """Tries a tree reading on a few tokens: what comes of it must be what a whole pass says."""
        self._model = model
        self._kinds = LayerKinds.of(model.config) if self._takes_cache() else None
        if self._kinds is None or not self._agrees(self._kinds):
            self._kinds = None
            logger.warning(
                "classifier %s: the layers of a %s keep nothing that candidates could share, so every step reads all "
                "anew, which is slow",
                name,
                type(model.body).__name__,
            )

    @property
    def keeps(self) -> bool:
        """Whether readings keep keys and values."""
        return self._kinds is not None

    def new(self, rows: int) -> TreeReading | UncachedReading:
        """Of rows without a token."""
        if self._kinds is None:
            return UncachedReading(self._model, rows)
        return TreeReading(self._model, rows, self._kinds)

    def _takes_cache(self) -> bool:
        return {"past_key_values", "position_ids"} <= self._model.takes and not getattr(
            self._model.body, "_is_stateful", False
        )

    @torch.inference_mode()
    def _agrees(self, kinds: LayerKinds) -> bool:
        """Whether a tree reading of padded rows has the states of a plain one, a taken token behind them too."""
        device = self._model.head.weight.device
        ids = torch.tensor([[0, 0, 5, 1, 2], [3, 4, 6, 2, 1]], device=device) % self._model.vocabulary
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], device=device)
        candidates = torch.tensor([[1, 2, 3], [4, 2, 6]], device=device) % self._model.vocabulary
        taken, counts = candidates[:, 1], torch.ones(2, dtype=torch.bool, device=device)
        found = []
        for reading in (TreeReading(self._model, 2, kinds), UncachedReading(self._model, 2)):
            try:
                first = reading.read(ids, mask)
                second = reading.branch(candidates)
                reading.take(taken, counts)
                third = reading.branch(candidates)
            except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as problem:
                logger.debug("no tree reading: %r", problem)
                return False
            found.append(torch.cat([first[:, None], second, third], dim=1).float())
        near = 1e-3 if found[0].dtype == self._model.head.weight.dtype else 5e-2
        return bool(((found[0] - found[1]).norm() <= near * found[1].norm()).item())
