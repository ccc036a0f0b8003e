"""Rollouts as tensors, and one pass of a policy over them: log-probs at the sampling temperature, entropies, values.

Prompts are padded at the left, what follows at the right, so that all answers begin together. Gradients flow. The one
place here that calls a model, and no more than a chunk of its logits is in memory (``engine.log_probs``). Torch inside
functions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuherd.posttrain.engine.log_probs import forward_log_probs
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
    """What a model says of the tokens of answers, (rows, tokens) each.

    Attributes:
        log_probs: of each token, in the softmax of the logits over the temperature; 0 where it is not wanted.
        entropies: of that softmax, nats, 0 where it is not wanted; with a gradient where ``entropy_gradient`` is set.
        values: of the value head before each token is chosen, padding has numbers without meaning; None where the model
            has none.
    """

    log_probs: Tensor
    entropies: Tensor
    values: Tensor | None


def forward(
    module: Any, batch: Batch, temperature: float, wanted: Tensor | None = None, *, entropy_gradient: bool = False
) -> Pass:
    """A pass over a batch.

    Args:
        module: transformers' or PEFT's causal model, or ``ValuedPolicy``; wrapped or not.
        temperature: of the sampling: logits are divided by it, as when the tokens were drawn.
        wanted: (rows, tokens) bool, the tokens of the answers whose log-probs are computed; all by default.
    """
    import torch

    places = batch.answers.shape[1]
    answers = batch.mask[:, -places:].bool()
    of_prompts = torch.zeros_like(batch.mask[:, :-places], dtype=torch.bool)
    chosen = torch.cat([of_prompts, answers if wanted is None else answers & wanted], dim=1)
    found, made = forward_log_probs(
        module, batch.ids, batch.mask, chosen, temperature=temperature, entropy_gradient=entropy_gradient
    )
    values = made[1][:, -places - 1 : -1] if isinstance(made, tuple) else None
    return Pass(found.log_probs[:, -places:], found.entropies[:, -places:], values)


def forward_spare(module: Any, device: str) -> None:
    """A pass over one token whose result is not used: processes that share a module divided by FSDP do equally many."""
    forward(module, batch_of([Rollout("", 0, (0,), (0,), (True,), (None,), "", 0.0, None, True)], device), 1.0)


def score_rollouts(
    module: Any, rollouts: Sequence[Rollout], temperature: float, device: str, rows: int, passes: int = 0
) -> tuple[list[list[float]], list[list[float]]]:
    """Log-probs and values of all tokens behind the prompts, of each rollout a list, without gradients; values are
    empty lists where the model has none.

    Args:
        rows: so many at a time, those of like lengths together.
        passes: so many at least, the last ones spare.
    """
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
        for _ in range(-(-len(order) // rows), passes):
            forward_spare(module, device)
    return log_probs, values


def _length(rollout: Rollout) -> int:
    return len(rollout.prompt_ids) + len(rollout.ids)
