"""The next token of each row, and its log-prob under the model itself: the most probable one, or a draw.

A draw depends on the row's key alone, never on the batch: the random numbers of an answer are the same on every
machine, in every batch, shard and order.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from gpuherd.lm.backend import Decoding

Key = tuple[int, int]  # two signed 32-bit numbers


def draw_key(seed: int, question: str, sample: int, step: int) -> Key:
    """What one token of one answer is drawn by: the same on every machine, in every batch, shard and order.

    64 bits of a BLAKE2b digest of the four. ``race`` draws with it.

    >>> draw_key(0, "q1", 0, 0) == draw_key(0, "q1", 0, 0) != draw_key(0, "q1", 1, 0)
    True
    """
    counter = f"{seed} {sample} {step} {question}".encode("utf-8", "surrogatepass")
    first, second = struct.unpack("<ii", hashlib.blake2b(counter, digest_size=8).digest())
    return first, second


_MOST_NUMBERS = 1 << 26  # logits that are worked on at a time: 256 MB in float32, twice that for a draw
_GROUP = 128  # tokens that race as one first: so a draw takes some hundreds of random numbers and not a vocabulary's


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
    law = log_probs if guided is None else guided
    if len(keys) == logits.shape[0]:
        ids = race(warped(law, how), list(keys.values()))
    else:
        ids = law.argmax(dim=-1)
        if keys:
            rows = torch.tensor(list(keys), device=logits.device)
            ids[rows] = race(warped(law[rows], how), list(keys.values()))
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


def race(log_weights: torch.Tensor, keys: Sequence[Key]) -> torch.Tensor:
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
