"""Losses in float64, token by token in plain loops, and the gradients that torch takes of them: what ours are held
against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gpuherd.posttrain.types import Comparison, Rollout


def doubled(folder: Path, kind: str = "AutoModelForCausalLM", **words: Any) -> Any:
    """A model in float64."""
    import transformers

    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float64, **words).eval()


def token_log_probs(model: Any, before: Sequence[int], ids: Sequence[int]) -> list[torch.Tensor]:
    """ln p of each of ``ids`` behind ``before``, one forward pass a sequence, without padding."""
    logits = model(input_ids=torch.tensor([[*before, *ids]])).logits[0]
    found = []
    for place, token in enumerate(ids):
        scores = logits[len(before) + place - 1]
        found.append(scores[token] - torch.logsumexp(scores, 0))
    return found


def margin(model: Any, reference: Any | None, each: Comparison, *, mean: bool = False) -> torch.Tensor:
    """d of a comparison, or ipo's with means over tokens."""
    before = [*each.prompt_ids, *each.context_ids]
    total = torch.zeros((), dtype=torch.float64)
    for sign, ids in ((1, each.chosen_ids), (-1, each.rejected_ids)):
        part = torch.zeros((), dtype=torch.float64)
        for log_prob in token_log_probs(model, before, ids):
            part = part + log_prob
        if reference is not None:
            for log_prob in token_log_probs(reference, before, ids):
                part = part - log_prob.detach()
        total = total + sign * (part / max(1, len(ids)) if mean else part)
    return total


def dpo(model: Any, reference: Any | None, batch: Sequence[Comparison], options: Any) -> torch.Tensor:
    """The loss of ``algos.dpo`` by its docstring."""
    beta, smooth = options.beta, options.label_smoothing
    losses = []
    for each in batch:
        d = margin(model, reference, each, mean=options.loss_type == "ipo")
        if options.loss_type == "sigmoid":
            loss = (1 - smooth) * torch.log1p(torch.exp(-beta * d)) + smooth * torch.log1p(torch.exp(beta * d))
        elif options.loss_type == "hinge":
            loss = (1 - beta * d) if 1 - beta * d > 0 else 0 * d
        else:
            loss = (d - 1 / (2 * beta)) ** 2
        losses.append(loss)
    total = sum(losses, torch.zeros((), dtype=torch.float64)) / len(losses)
    if options.rpo_weight:
        chosen = [
            log_prob
            for each in batch
            for log_prob in token_log_probs(model, [*each.prompt_ids, *each.context_ids], each.chosen_ids)
        ]
        total = total - options.rpo_weight * sum(chosen, torch.zeros((), dtype=torch.float64)) / len(chosen)
    return total


def sft(model: Any, batch: Sequence[Rollout], policy_weight: float, world_weight: float) -> torch.Tensor:
    """The loss of ``algos.sft`` by its docstring."""
    kinds: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for each in batch:
        found = token_log_probs(model, each.prompt_ids, each.ids)
        for own, log_prob in zip(each.by_policy, found, strict=True):
            kinds[own].append(-log_prob)
    total = torch.zeros((), dtype=torch.float64)
    for own, weight in ((True, policy_weight), (False, world_weight)):
        if kinds[own]:
            total = total + weight * sum(kinds[own], torch.zeros((), dtype=torch.float64)) / len(kinds[own])
    return total


def bradley_terry(model: Any, batch: Sequence[Comparison]) -> torch.Tensor:
    """-ln sigmoid of the difference of rewards, the mean over pairs."""
    total = torch.zeros((), dtype=torch.float64)
    for each in batch:
        before = [*each.prompt_ids, *each.context_ids]
        rewards = [
            model(input_ids=torch.tensor([[*before, *ids]])).logits[0, 0]
            for ids in (each.chosen_ids, each.rejected_ids)
        ]
        total = total + torch.log1p(torch.exp(rewards[1] - rewards[0]))
    return total / len(batch)


def gradients(model: Any, loss: Callable[[Any], torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """A loss and its gradients by weight."""
    model.zero_grad()
    value = loss(model)
    torch.autograd.backward(value)
    return float(value.detach()), {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }
