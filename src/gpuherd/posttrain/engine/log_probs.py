"""Log-probs of given tokens under a causal model, without the logits of all positions in memory.

The logits of a sequence of 4,096 tokens over a vocabulary of 152,000 are 2.5 GB in float32, and a plain backward pass
holds them several times. Here the language-model head reads a chunk of hidden states at a time, forward and again
backward, so that no more than a chunk of logits exists; only positions whose tokens are wanted are read at all. A batch
that is one chunk keeps it for its backward pass, and a larger one computes each chunk again. The numbers are those of
the whole logits but for rounding.

The head is read inside the model's own forward pass, in the place of its ``forward``: there DDP and FSDP have its
weight, and everything the model does around it stays. A model that does more to its logits (soft-capping in Gemma 2,
the logit scale of Cohere), or whose head is no plain ``torch.nn.Linear`` (quantised, or under an adapter), is found out
by a pass over two tokens, and has its whole logits computed. Imports torch inside functions only.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import Tensor

# Numbers of a chunk of logits by default: 128 MiB in float32, 220 positions of a vocabulary of 152,000.
CHUNK_NUMBERS = 1 << 25

_plain_heads: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # of heads, whether their model ends with them


class TokenLogProbs(NamedTuple):
    """Of each token of a batch, (rows, tokens) in float32 (float64 for a model in float64); 0 where it is not wanted.

    Attributes:
        log_probs: the natural log of its probability behind the tokens before it.
        entropies: nats, of the distribution that it was chosen from.
        top: 1 where it is the most probable one.
    """

    log_probs: Tensor
    entropies: Tensor
    top: Tensor


class ReadingOptions(TypedDict, total=False):
    """How a batch is read; none has to be given.

    Attributes:
        packing: where several rows stand in one: the position of each token in its own, and what is added to attention
            scores (``data.packing``).
        temperature: logits are divided by it.
        entropy_gradient: entropies have a gradient too.
        chunk: positions whose logits exist at once; by default as many as 128 MiB hold.
    """

    packing: tuple[Tensor, Tensor] | None
    temperature: float
    entropy_gradient: bool
    chunk: int | None


def token_log_probs(
    model: Any, input_ids: Tensor, attention_mask: Tensor, wanted: Tensor, **how: Unpack[ReadingOptions]
) -> TokenLogProbs:
    """One forward pass over a batch that is padded at either side; gradients flow.

    Args:
        model: transformers' or PEFT's causal model, wrapped by DDP, sharded by FSDP, or neither. Processes that share
            the model call this equally often.
        input_ids, attention_mask: (rows, tokens).
        wanted: (rows, tokens) bool: the tokens whose log-probs are to be had. A row's first token has none before it,
            and is never had.
    """
    return forward_log_probs(model, input_ids, attention_mask, wanted, **how)[0]


def forward_log_probs(
    model: Any, input_ids: Tensor, attention_mask: Tensor, wanted: Tensor, **how: Unpack[ReadingOptions]
) -> tuple[TokenLogProbs, Any]:
    """``token_log_probs``, and what the model's forward pass returned besides: for models that have another head
    besides the language model's. Its logits have no meaning."""
    reading = _LogProbs(input_ids, attention_mask, wanted, how)
    packed, made = read(model, reading, input_ids, attention_mask, packing=how.get("packing"))
    return TokenLogProbs(*packed.unbind(dim=-1)), made


def read(
    model: Any,
    reading: Reading,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    packing: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Any]:
    """One forward pass: what a ``Reading`` of the same batch computes of its logits, (rows, tokens, numbers); and what
    the pass returned besides, whose logits have no meaning."""
    head = _head_of(model)
    if _ends_with(model, head):
        with _reads_in_chunks(head, reading):
            made = model(**model_inputs(model, input_ids, attention_mask, packing=packing))
        return _logits_of(made), made
    made = model(**model_inputs(model, input_ids, attention_mask, packing=packing, last=reading.places))
    return reading.of_logits(_logits_of(made)), made


def model_inputs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    packing: tuple[Tensor, Tensor] | None = None,
    last: int | None = None,
) -> dict[str, Any]:
    """The arguments of a forward pass without a cache, by the names that the model takes.

    Args:
        packing: as in ``ReadingOptions``.
        last: logits of so many last positions are enough; models that can't leave others out return all.
    """
    words: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    names = frozenset(inspect.signature(type(_causal(model)).forward).parameters)
    if packing is not None:
        words["position_ids"], words["attention_mask"] = packing
    elif "position_ids" in names:
        words["position_ids"] = (attention_mask.cumsum(dim=-1) - 1).clamp_(min=0)
    if last is not None and "logits_to_keep" in names:
        words["logits_to_keep"] = last
    return words


def padded(rows: Sequence[Sequence[int]], device: str, fill: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of token ids filled up at the right, and 1 for those that are no filling: (rows, tokens) int64 each."""
    import torch

    width = max(map(len, rows))
    ids = [[*row, *[fill] * (width - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class Reading(ABC):
    """Which tokens of a batch are read; a subclass computes some numbers of the logits that each is chosen by.

    Attributes:
        places: the last positions of each row among which all are that predict a wanted token, and one behind them.
    """

    def __init__(self, input_ids: Tensor, attention_mask: Tensor, wanted: Tensor):
        self.shape = tuple(input_ids.shape)
        # A token stands one behind its prediction.
        self._rows, self._columns = (wanted[:, 1:] & attention_mask[:, :-1].bool()).nonzero(as_tuple=True)
        self._targets = input_ids[:, 1:][self._rows, self._columns]
        first = int(self._columns.min()) if len(self._columns) else self.shape[1] - 1
        self.places = self.shape[1] - first

    @abstractmethod
    def computed(self, flat: Tensor, weight: Tensor | None, bias: Tensor | None, vocabulary: int) -> Tensor:
        """(tokens, numbers) of the wanted tokens, row by row. Called inside the model's forward pass.

        Args:
            flat: (tokens, width): the hidden states that the head reads; without a weight the logits themselves.
        """

    def of_hidden(self, head: Any, hidden: Tensor) -> Tensor:
        """(rows, tokens, numbers) of the hidden states that the head would read."""
        return self._placed(hidden[self._rows, self._columns], head.weight, head.bias, head.out_features)

    def of_logits(self, logits: Tensor) -> Tensor:
        """The same of whole logits, of all positions or of the last ``places``."""
        shift = self.shape[1] - logits.shape[1]
        return self._placed(logits[self._rows, self._columns - shift], None, None, logits.shape[-1])

    def _placed(self, flat: Tensor, weight: Tensor | None, bias: Tensor | None, vocabulary: int) -> Tensor:
        found = self.computed(flat, weight, bias, vocabulary)
        places = (self._rows, self._columns + 1)
        return found.new_zeros((*self.shape, found.shape[-1])).index_put(places, found)


class _LogProbs(Reading):
    """What ``TokenLogProbs`` has, in chunks."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor, wanted: Tensor, how: ReadingOptions):
        super().__init__(input_ids, attention_mask, wanted)
        self._temperature, self._chunk = how.get("temperature", 1.0), how.get("chunk")
        self._entropy_gradient = how.get("entropy_gradient", False)

    def computed(self, flat: Tensor, weight: Tensor | None, bias: Tensor | None, vocabulary: int) -> Tensor:
        """Log-prob, entropy, and whether it is the most probable token."""
        import torch

        chunk = self._chunk or max(1, CHUNK_NUMBERS // vocabulary)
        keeps = torch.is_grad_enabled() and len(flat) <= chunk
        how = (self._temperature, self._entropy_gradient, chunk, head_dtype(flat), keeps)
        with torch.autocast(flat.device.type, enabled=False):
            return _function().apply(flat, weight, bias, self._targets, how)  # type: ignore[no-any-return]


def head_dtype(flat: Tensor) -> Any:
    """In what a head computes the logits of these hidden states: as autocast has it, where it is on."""
    import torch

    kind = flat.device.type
    mixed = torch.is_autocast_enabled(kind) and flat.dtype != torch.float64  # autocast leaves float64 as it is
    return torch.get_autocast_dtype(kind) if mixed else flat.dtype


@functools.cache
def _function() -> Any:
    """The function with its own backward pass; made late, as torch is imported late."""
    import torch

    class ChunkedLogProbs(torch.autograd.Function):
        """(positions, 3): log-prob, entropy and whether it is the most probable, of one token each.

        With x the logits over the temperature, p their softmax and H its entropy: d ln p_t / dx = 1_t - p, and
        dH / dx = -p (ln p + H).
        """

        @staticmethod
        def forward(
            ctx: Any, flat: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor, how: Any
        ) -> Tensor:
            temperature, _, chunk, compute, keeps = how
            ctx.log_shares = None
            cast = None if weight is None else weight.to(compute)
            made = torch.zeros((len(flat), 3), dtype=_wide(flat.dtype), device=flat.device)
            sums = made.new_zeros(len(flat))
            for start in range(0, len(flat), chunk):
                part = slice(start, start + chunk)
                scores = chunk_logits(flat[part], cast, bias, temperature, compute)
                sums[part] = scores.logsumexp(dim=-1)
                at = targets[part, None]
                made[part, 2] = (scores.argmax(dim=-1) == at[:, 0]).to(made.dtype)
                made[part, 0] = scores.gather(1, at)[:, 0] - sums[part]
                scores.clamp_(min=torch.finfo(scores.dtype).min)  # a token that can't be has no part in the entropy
                shares = torch.sub(scores, sums[part, None]).exp_()
                made[part, 1] = sums[part] - shares.mul_(scores).sum(dim=-1)
                if keeps:
                    ctx.log_shares = scores.sub_(sums[part, None])
                del scores, shares
            ctx.save_for_backward(flat, weight, bias, targets, sums, made[:, 1].clone())
            ctx.how = how
            return made

        @staticmethod
        def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
            flat, weight, bias, targets, sums, entropies = ctx.saved_tensors
            temperature, entropy_gradient, chunk, compute, _ = ctx.how
            (slope,) = slopes
            cast = None if weight is None else weight.to(compute)
            gradients = HeadGradients(flat, cast, ctx.needs_input_grad, weight, bias)
            for start in range(0, len(flat), chunk):
                part = slice(start, start + chunk)
                scores, ctx.log_shares = ctx.log_shares, None  # overwritten below: a second backward pass has none
                if scores is None:
                    scores = chunk_logits(flat[part], cast, bias, temperature, compute)
                    scores.sub_(sums[part, None])  # ln p
                if entropy_gradient:
                    scores.clamp_(min=torch.finfo(scores.dtype).min)
                    shares = scores.exp()
                    scores.add_(entropies[part, None]).mul_(slope[part, 1, None]).add_(slope[part, 0, None])
                    scores.mul_(shares).neg_()
                    del shares
                else:
                    scores.exp_().mul_(-slope[part, 0, None])
                scores.scatter_add_(1, targets[part, None], slope[part, 0, None])
                scores = gradients.narrowed(scores.div_(temperature))
                gradients.add(part, scores)
                del scores
            return *gradients.all(), None, None

    return ChunkedLogProbs


class HeadGradients:
    """The gradients of hidden states, weight and bias of a head whose logits are computed in chunks, added up.

    Args:
        flat: (tokens, width): the hidden states; without a weight the logits themselves.
        cast: the weight in what logits are computed in.
        needed: which gradients are, of flat, weight and bias.
    """

    def __init__(
        self, flat: Tensor, cast: Tensor | None, needed: Sequence[bool], weight: Tensor | None, bias: Tensor | None
    ):
        import torch

        self._flat, self._cast, self._needed, self._weight, self._bias = flat, cast, needed, weight, bias
        self._of_flat = torch.zeros_like(flat)
        self._of_weight = _zeros(weight) if weight is not None and needed[1] else None
        self._of_bias = _zeros(bias) if bias is not None and needed[2] else None

    def narrowed(self, slopes: Tensor) -> Tensor:
        """The gradient of a chunk's logits, which is in float32 or wider, as ``add`` takes it. Adds to the bias's."""
        if self._of_bias is not None:
            self._of_bias += slopes.sum(dim=0)
        return slopes.to(self._flat.dtype if self._cast is None else self._cast.dtype)

    def add(self, part: slice, slopes: Tensor) -> None:
        """Adds a chunk, of ``narrowed``."""
        if self._cast is None:
            self._of_flat[part] = slopes
            return
        if self._needed[0]:
            self._of_flat[part] = (slopes @ self._cast).to(self._flat.dtype)
        if self._of_weight is not None:
            read = self._flat[part].to(slopes.dtype)
            if slopes.dtype == self._of_weight.dtype:
                self._of_weight.addmm_(slopes.t(), read)
            else:
                self._of_weight += slopes.t() @ read

    def all(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of flat, weight and bias, in their types; None where it isn't needed."""
        return self._of_flat, _like(self._of_weight, self._weight), _like(self._of_bias, self._bias)


def chunk_logits(flat: Tensor, weight: Tensor | None, bias: Tensor | None, temperature: float, compute: Any) -> Tensor:
    """The logits of a chunk over the temperature, anew, in float32 or wider; without a weight they are given.
    ``compute``: of ``head_dtype``."""
    import torch

    if weight is None:
        made = flat.clone()
    else:
        made = torch.nn.functional.linear(flat.to(compute), weight, None if bias is None else bias.to(compute))
    made = made.to(_wide(made.dtype))
    return made if temperature == 1 else made.div_(temperature)


def _wide(dtype: Any) -> Any:
    import torch

    return torch.float32 if dtype.itemsize < 4 else dtype


def _zeros(weight: Tensor) -> Tensor:
    return weight.new_zeros(weight.shape, dtype=_wide(weight.dtype))


def _like(gradient: Tensor | None, weight: Tensor | None) -> Tensor | None:
    return None if gradient is None or weight is None else gradient.to(weight.dtype)


@contextmanager
def _reads_in_chunks(head: Any, reading: Reading) -> Iterator[list[Any]]:
    """While the block runs, the head answers hidden states with what is wanted of their logits, three numbers each.
    Yields what it answered."""
    made: list[Any] = []

    def forward(hidden: Tensor) -> Tensor:
        made.append(reading.of_hidden(head, hidden) if hidden.shape[:2] == reading.shape else hidden)
        return made[-1]  # type: ignore[no-any-return]

    head.forward = forward
    try:
        yield made
    finally:
        del head.forward


def _ends_with(model: Any, head: Any) -> bool:
    """Whether the head is a plain linear map, whose answer the model returns as its logits untouched."""
    import torch

    if type(head) is not torch.nn.Linear:
        return False
    if head not in _plain_heads:
        inner = _unwrapped(model)
        modes = [(each, each.training) for each in inner.modules()]
        inner.eval()  # no dropout, so that no random numbers are spent
        ids = torch.zeros((1, 2), dtype=torch.long, device=head.weight.device)
        wanted = torch.tensor([[False, True]], device=ids.device)
        mask = torch.ones_like(ids)
        reading = _LogProbs(ids, mask, wanted, {})
        try:
            with torch.no_grad(), _reads_in_chunks(head, reading) as made:
                answer = _logits_of(inner(input_ids=ids, attention_mask=mask, use_cache=False))
        finally:
            for each, training in modes:
                each.training = training
        _plain_heads[head] = len(made) == 1 and answer is made[0] and answer.shape == (1, 2, 3)
    return _plain_heads[head]


def _logits_of(made: Any) -> Any:
    return made[0] if isinstance(made, tuple) else made.logits


def _unwrapped(model: Any) -> Any:
    """The model inside of DDP."""
    while (deeper := getattr(model, "module", None)) is not None:
        model = deeper
    return model


def _causal(model: Any) -> Any:
    """transformers' causal model inside of all wrappers: DDP, one with another head, PEFT."""
    inner = _unwrapped(model)
    inner = getattr(inner, "policy", inner)
    return inner.get_base_model() if hasattr(inner, "peft_type") else inner


def _head_of(model: Any) -> Any:
    return _causal(model).get_output_embeddings()
