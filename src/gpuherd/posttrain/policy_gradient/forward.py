"""Rollouts as tensors, and one pass of a policy over them: log-probs at the sampling temperature, entropies, values.

Prompts are padded at the left, what follows at the right, so that all answers begin together. Gradients flow. The one
place here that calls a model. Torch inside functions only.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuherd.posttrain.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rollouts.

    Attributes:
        ids, mask: (rows, prompt + tokens) int64: all tokens, and 1 for those that are none of padding.
        answers: (rows, tokens) int64: what follows the prompts.
        by_policy: (rows, tokens) bool: what the policy chose, padding false.
    """

    ids: Tensor
    mask: Tensor
    answers: Tensor
    by_policy: Tensor


def batch_of(rollouts: Sequence[Rollout], device: str) -> Batch:
    """These rollouts on a device. Padding is token 0, which the mask hides."""
    import torch

    left = max(len(each.prompt_ids) for each in rollouts)
    right = max(len(each.ids) for each in rollouts)
    ids, mask, chosen = [], [], []
    for each in rollouts:
        before, behind = left - len(each.prompt_ids), right - len(each.ids)
        ids.append([*[0] * before, *each.prompt_ids, *each.ids, *[0] * behind])
        mask.append([*[0] * before, *[1] * (len(each.prompt_ids) + len(each.ids)), *[0] * behind])
        chosen.append([*each.by_policy, *[False] * behind])
    tokens = torch.tensor(ids, device=device)
    return Batch(
        ids=tokens,
        mask=torch.tensor(mask, device=device),
        answers=tokens[:, left:],
        by_policy=torch.tensor(chosen, dtype=torch.bool, device=device),
    )


def rectangle(rows: Sequence[Sequence[float]], width: int, device: str) -> Tensor:
    """Numbers of each row, (rows, width) float32, 0 behind them."""
    import torch

    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class Pass:
    """What a model says of the tokens of answers, (rows, tokens) each; padding has numbers without meaning.

    Attributes:
        log_probs: of each token, in the softmax of the logits over the temperature.
        entropies: of that softmax, nats; with a gradient only where it was asked for.
        values: of the value head before each token is chosen; None where the model has none.
    """

    log_probs: Tensor
    entropies: Tensor
    values: Tensor | None


def forward(module: Any, batch: Batch, temperature: float, *, entropy_gradient: bool = False) -> Pass:
    """A pass over a batch.

    Args:
        module: transformers' or PEFT's causal model, or ``ValuedPolicy``; wrapped or not.
        temperature: of the sampling: logits are divided by it, as when the tokens were drawn.
    """
    import torch

    logits, values = answer_logits(module, batch, temperature)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = entropies_of(logits if entropy_gradient else logits.detach())
    return Pass(log_probs_of(logits, batch.answers), entropies, values)


def answer_logits(module: Any, batch: Batch, temperature: float) -> tuple[Tensor, Tensor | None]:
    """The logits, over the temperature, that each token of the answers is chosen by, (rows, tokens, vocabulary), and
    the value before it, (rows, tokens), where the model has a value head."""
    import torch

    places = batch.answers.shape[1]
    words: dict[str, Any] = {"input_ids": batch.ids, "attention_mask": batch.mask, "use_cache": False}
    names = _takes(module)
    if "position_ids" in names:
        words["position_ids"] = (batch.mask.cumsum(dim=-1) - 1).clamp_(min=0)
    if "logits_to_keep" in names:
        words["logits_to_keep"] = places + 1
    made = module(**words)
    logits, values = made if isinstance(made, tuple) else (made.logits, None)
    del made  # it would hold the logits beside those over the temperature
    logits = logits[:, -places - 1 : -1]
    if temperature != 1:
        logits = logits / temperature if torch.is_grad_enabled() else logits.div_(temperature)
    return logits, None if values is None else values[:, -places - 1 : -1]


def log_probs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """The natural log of each token's probability: (rows, places) of logits (rows, places, vocabulary), in float32
    where these are narrower."""
    import torch

    chosen = wide(logits.gather(2, ids[..., None])[..., 0])
    # Row by row: never more than one row's logits in float32 at once where they come in half precision.
    return chosen - torch.stack([torch.logsumexp(wide(row), dim=-1) for row in logits])


def entropies_of(logits: Tensor) -> Tensor:
    """The entropy of each softmax, nats: (rows, places) of logits (rows, places, vocabulary), in float32 where these
    are narrower."""
    import torch

    rows = []
    for row in logits:
        log_probs = torch.log_softmax(wide(row), dim=-1)
        rows.append(-(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(dim=-1))
    return torch.stack(rows)


def wide(numbers: Tensor) -> Tensor:
    """In float32 where they are narrower."""
    return numbers.float() if numbers.itemsize < 4 else numbers


def score_rollouts(
    module: Any, rollouts: Sequence[Rollout], temperature: float, device: str, rows: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Log-probs and values of all tokens behind the prompts, of each rollout a list, without gradients; values are
    empty lists where the model has none. ``rows``: so many at a time, those of like lengths together."""
    import torch

    order = sorted(range(len(rollouts)), key=lambda place: _length(rollouts[place]))
    log_probs: list[list[float]] = [[] for _ in rollouts]
    values: list[list[float]] = [[] for _ in rollouts]
    with torch.no_grad():
        for start in range(0, len(order), rows):
            places = order[start : start + rows]
            made = forward(module, batch_of([rollouts[place] for place in places], device), temperature)
            for number, place in enumerate(places):
                length = len(rollouts[place].ids)
                log_probs[place] = made.log_probs[number, :length].tolist()
                if made.values is not None:
                    values[place] = made.values[number, :length].tolist()
    return log_probs, values


def _length(rollout: Rollout) -> int:
    return len(rollout.prompt_ids) + len(rollout.ids)


def _takes(module: Any) -> frozenset[str]:
    """The names of what the model inside all wrappers takes."""
    inner = module
    while (deeper := getattr(inner, "module", None)) is not None:  # DDP
        inner = deeper
    inner = getattr(inner, "policy", inner)  # ValuedPolicy
    if hasattr(inner, "peft_type"):
        inner = inner.get_base_model()
    return frozenset(inspect.signature(type(inner).forward).parameters)
