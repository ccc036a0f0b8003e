"""Decodes answers to a batch of prompts, the greedy one and the drawn ones of a prompt together, from one reading; and
chooses the next token of each row, with its log-prob under the model itself.

The prompts are read once; their cache is then repeated for each answer. Of each step a token and a float32 log-prob a
row are kept, never the logits. Rows that have ended are taken out when they are many.

A draw depends on the row's key alone, never on the batch: the random numbers of an answer are the same on every
machine, in every batch, shard and order.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuherd.lm.backend import Decoding, Finish, Generation, GuidedTokens, PromptTokens
from gpuherd.lm.forward import BatchReading
from gpuherd.lm.tokens import Detokenizer, cut

if TYPE_CHECKING:
    from array import array

    import torch

    from gpuherd.lm.guidance.guidance import Guiding
    from gpuherd.lm.guidance.guide import GuidedDistribution

# ---- the next token of each row: the most probable one, or a draw ----------------------------------------------------

Key = tuple[int, int]  # two signed 32-bit numbers


def draw_key(seed: int, question: str, sample: int, step: int) -> Key:
    """What one token of one answer is drawn by: the same on every machine, in every batch, shard and order.

    64 bits of a BLAKE2b digest of the four. ``gumbel_max`` draws with it.

    >>> draw_key(0, "q1", 0, 0) == draw_key(0, "q1", 0, 0) != draw_key(0, "q1", 1, 0)
    True
    """
    counter = f"{seed} {sample} {step} {question}".encode("utf-8", "surrogatepass")
    first, second = struct.unpack("<ii", hashlib.blake2b(counter, digest_size=8).digest())
    return first, second


_MOST_NUMBERS = 1 << 26  # logits that are worked on at a time: 256 MB in float32, twice that for a draw
_GROUP = 128  # tokens that compete as one first: so a draw takes some hundreds of random numbers and not a vocabulary's


def choose(
    logits: torch.Tensor, keys: Mapping[int, Key], how: Decoding, guided: torch.Tensor | None = None
) -> tuple[list[int], list[float | None]]:
    """A token for each row, and the natural log of its probability in the softmax of the raw logits (over the
    temperature, where ``how.tempered``), in float32.

    Args:
        logits: (rows, vocabulary), any float dtype.
        keys: of the rows that are drawn; the others take the most probable token, the first of equals.
        how: temperature, top_k and top_p of the draws.
        guided: (rows, vocabulary) float32 log-probs that tokens are chosen by, in place of the model's own.

    Returns:
        Tokens, and log-probs that are float32 numbers; None where a row's logits are no distribution (NaN, +inf): its
        token is then that of the largest finite number.
    """
    at_once = max(1, _MOST_NUMBERS // logits.shape[-1])
    ids: list[int] = []
    log_probs: list[float | None] = []
    for start in range(0, logits.shape[0], at_once):
        some = logits[start : start + at_once]
        here = {row - start: keys[row] for row in range(start, start + some.shape[0]) if row in keys}
        by = None if guided is None else guided[start : start + at_once]
        some_ids, some_log_probs = _choose(some, here, how, by)
        ids += some_ids
        log_probs += some_log_probs
    return ids, log_probs


def _choose(
    logits: torch.Tensor, keys: Mapping[int, Key], how: Decoding, guided: torch.Tensor | None
) -> tuple[list[int], list[float | None]]:
    import torch

    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    scores = log_probs if guided is None else guided
    if len(keys) == logits.shape[0]:
        ids = gumbel_max(warped(scores, how), list(keys.values()))
    else:
        ids = scores.argmax(dim=-1)
        if keys:
            rows = torch.tensor(list(keys), device=logits.device)
            ids[rows] = gumbel_max(warped(scores[rows], how), list(keys.values()))
    values = log_probs.gather(1, ids[:, None])[:, 0]
    if how.tempered and how.temperature != 1:
        values = values / how.temperature - (log_probs / how.temperature).logsumexp(dim=-1)
    # A row with one NaN or +inf has a softmax of NaN alone.
    told = values.tolist()
    if not all(map(math.isfinite, told)):
        finite = logits.float().nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        ids = torch.where(values.isfinite(), ids, finite.argmax(dim=-1))
    return ids.tolist(), [value if math.isfinite(value) else None for value in told]


def warped(log_probs: torch.Tensor, how: Decoding) -> torch.Tensor:
    """Log weights of a draw, float32, not normalised: of temperature, then top_k, then top_p; -inf: never drawn.

    top_k keeps the k most probable and what is as probable as the last of them; top_p (Holtzman et al. 2020) keeps the
    fewest of the most probable tokens that have the mass p together, at least one.
    """
    import torch

    scores = log_probs if how.temperature == 1 else log_probs / how.temperature
    if 0 < how.top_k < scores.shape[-1]:
        least = scores.topk(how.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if how.top_p < 1:
        ordered, order = torch.softmax(scores, dim=-1).sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
        left_out = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, before >= how.top_p)
        scores = scores.masked_fill(left_out, -torch.inf)
    return scores


def gumbel_max(log_weights: torch.Tensor, keys: Sequence[Key]) -> torch.Tensor:
    """One token a row, (rows,) int64, each with a probability in proportion to its weight.

    First a group of neighbours wins by its sum of weights, then one of its tokens. Each that races has a waiting time,
    exponential with its weight as rate, and the first wins (the Gumbel-max trick: Yellott 1977). A rounding error
    changes a draw only where the first two are as near as that. (Were a row's number to fall in a token's share of the
    summed distribution, inverse transform, the errors of all tokens before it would move it.)
    """
    import torch

    rows, vocabulary = log_weights.shape
    groups = -(-vocabulary // _GROUP)
    shares = (log_weights - log_weights.amax(dim=-1, keepdim=True)).exp_()
    shares = torch.nn.functional.pad(shares, (0, groups * _GROUP - vocabulary)).view(rows, groups, _GROUP)
    waiting = exponentials(keys, groups + _GROUP, log_weights.device)
    group = (waiting[:, :groups] / shares.sum(dim=-1)).argmin(dim=-1)
    members = shares[torch.arange(rows, device=group.device), group]
    return group * _GROUP + (waiting[:, groups:] / members).argmin(dim=-1)


def exponentials(keys: Sequence[Key], count: int, device: Any) -> torch.Tensor:
    """(keys, count) float32 numbers of the exponential distribution of mean 1: of each key its own, the same on every
    device but for rounding.

    A counter-based generator (Salmon et al. 2011): a key and a number are mixed by 32-bit multiplications and shifts
    (the constants are those of Wellons' hash prospector, low bias). 31 bits make a number between 2e-10 and 17: float32
    rounds the highest 64 of them to 1, whose time never comes, so that a token without any weight could win.
    """
    import torch

    mixed = _mixed(torch.arange(count, dtype=torch.int32, device=device))
    pairs = torch.tensor(keys, dtype=torch.int32, device=device)
    bits = _mixed(_mixed(mixed[None] ^ pairs[:, :1]) ^ pairs[:, 1:])
    uniform = (bits & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """32 bits of which each depends on all that there were; one to one."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = bits ^ ((bits >> shift) & ((1 << (32 - shift)) - 1))
        bits = bits.mul_(factor)
    return bits ^ ((bits >> 15) & 0x1FFFF)


# ---- answers, a token a step -----------------------------------------------------------------------------------------

AnswerKey = tuple[int, int | None]

_CROWDED = 0.75  # of the rows: with fewer left than this the others are taken out, which costs a copy of the cache


@dataclass(eq=False, slots=True)
class DecodingRow:
    """An answer as it comes.

    Attributes:
        prompt: its place in the batch.
        sample: the answer's number, None for the greedy one.
        most: the most tokens of it, the one that ends it counted.
        log_probs: 4 bytes a token.
        broken: places of tokens whose log-probs are not finite.
        guided: of each token, the end token too, its log-prob under the guided distribution, and that one's KL there.
    """

    prompt: int
    sample: int | None
    most: int
    growing: Detokenizer
    log_probs: array[float]
    broken: set[int] = field(default_factory=set)
    guided: list[tuple[float | None, float | None]] = field(default_factory=list)
    end_id: int | None = None
    end_log_prob: float | None = None
    stop_at: int | None = None
    ended: bool = False

    def take(self, token_id: int, log_prob: float | None, how: Decoding) -> None:
        """The next token; decides whether the answer ends by it."""
        if token_id in how.end_ids:
            self.end_id, self.end_log_prob, self.ended = token_id, log_prob, True
            return
        if log_prob is None:
            self.broken.add(len(self.log_probs))
        self.log_probs.append(0.0 if log_prob is None else log_prob)
        self.growing.add(token_id)
        # A token that no distribution gave makes no stop string.
        self.stop_at = None if log_prob is None else self.growing.find(how.stop)
        # Behind logits that are no distribution there is nothing to go on with.
        self.ended = self.stop_at is not None or log_prob is None or len(self.log_probs) >= self.most

    def generation(self) -> Generation:
        """The answer, cut before its stop string."""
        text, ends = self.growing.divided()
        if self.stop_at is not None:
            text, ends = cut(text, ends, self.stop_at)
        kept = enumerate(self.log_probs[: len(ends)])
        log_probs = tuple(None if place in self.broken else each for place, each in kept)
        return Generation(
            token_ids=tuple(self.growing.token_ids[: len(ends)]),
            log_probs=log_probs,
            text=text,
            ends=ends,
            finish=self._finish(log_probs),
            end_id=self.end_id,
            end_log_prob=self.end_log_prob,
            guided=self._guided(len(ends)),
        )

    def _finish(self, log_probs: Sequence[float | None]) -> Finish:
        """Decoding stops at the first log-prob that is not finite."""
        if None in log_probs or (self.end_id is not None and self.end_log_prob is None):
            return Finish.NAN
        return Finish.EOS if self.end_id is not None else Finish.LENGTH if self.stop_at is None else Finish.STOP

    def _guided(self, tokens: int) -> GuidedTokens | None:
        if not self.guided:
            return None
        log_probs, kl = zip(*self.guided, strict=True)
        end = (None, None) if self.end_id is None else self.guided[-1]
        return GuidedTokens(log_probs[:tokens], kl[:tokens], *end)


def decode(
    reading: BatchReading,
    logits: torch.Tensor,
    prompts: Sequence[PromptTokens],
    most: Sequence[int],
    wanted: Sequence[AnswerKey],
    how: Decoding,
    tokenizer: Any,
    guiding: Guiding | None = None,
) -> list[Generation]:
    """The answers that are wanted, in their order.

    Args:
        reading: of the prompts, a row each.
        logits: behind each prompt, (prompts, vocabulary).
        prompts: their ids, for the draws.
        most: the most tokens of an answer to each.
        wanted: of each answer its prompt's place, and its number, None for the greedy one.
        guiding: a classifier that has read the prompts too, a row each, and chooses the tokens.
    """
    from array import array

    rows = [DecodingRow(prompt, sample, most[prompt], Detokenizer(tokenizer), array("f")) for prompt, sample in wanted]
    owners = [prompt for prompt, _ in wanted]
    if owners != list(range(len(prompts))):
        if len(prompts) == 1:
            reading.repeat(len(owners))
        else:
            reading.select(owners)
        logits = logits[owners]
        if guiding is not None:
            guiding.select(owners)
    _run(reading, logits, rows, prompts, how, guiding)
    return [row.generation() for row in rows]


def _run(
    reading: BatchReading,
    logits: torch.Tensor,
    rows: Sequence[DecodingRow],
    prompts: Sequence[PromptTokens],
    how: Decoding,
    guiding: Guiding | None,
) -> None:
    import torch

    there = list(rows)  # those that the reading has, in its order; some may have ended
    step = 0
    while True:
        keys = {
            place: draw_key(how.seed, prompts[row.prompt].id, row.sample, step)
            for place, row in enumerate(there)
            if row.sample is not None and not row.ended
        }
        guided = None if guiding is None else guiding.distribution(logits)
        ids, log_probs = choose(logits, keys, how, None if guided is None else guided.scores(logits.shape[1]))
        if guided is not None:
            _note(guided, ids, there)
        for row, token_id, log_prob in zip(there, ids, log_probs, strict=True):
            if not row.ended:
                row.take(token_id, log_prob, how)
        going = [place for place, row in enumerate(there) if not row.ended]
        if not going:
            return
        if guiding is not None:
            guiding.take(ids, [not row.ended for row in there])
        if len(going) < _CROWDED * len(there):
            reading.select(going)
            if guiding is not None:
                guiding.select(going)
            there = [there[place] for place in going]
            ids = [ids[place] for place in going]
        # Rows that have ended read on, and what they read does not count: their positions stay within the model's.
        mask = torch.tensor([[0 if row.ended else 1] for row in there], device=reading.mask.device)
        logits = reading.read(torch.tensor(ids, device=mask.device)[:, None], mask)[:, -1]
        step += 1


def _note(guided: GuidedDistribution, ids: Sequence[int], rows: Sequence[DecodingRow]) -> None:
    """What the guided distribution says of the tokens that were chosen."""
    import torch

    log_probs = guided.of(torch.tensor(ids, device=guided.kl.device))
    for row, *told in zip(rows, log_probs.tolist(), guided.kl.tolist(), strict=True):
        if not row.ended:
            log_prob, kl = (value if math.isfinite(value) else None for value in told)
            row.guided.append((log_prob, kl))
