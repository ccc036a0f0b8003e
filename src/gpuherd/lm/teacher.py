"""Log-probs of tokens that are given, not decoded: continuations to choose among, answers that were made before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuherd.lm.forward import CausalModel, Reading, padded

if TYPE_CHECKING:
    import torch

MOST_NUMBERS = 1 << 26  # logits at a time: 256 MB in float32


def weigh(
    model: CausalModel,
    reading: Reading,
    logits: torch.Tensor,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
) -> list[tuple[float | None, ...]]:
    """Log-probs of each continuation behind each prompt; ``logits`` (prompts, vocabulary) are those behind the prompts,
    which ``reading`` has read."""
    import torch

    starts = [each[0] for each in continuations]
    found: list[list[float]] = torch.log_softmax(logits, dim=-1, dtype=torch.float32)[:, starts].tolist()
    longer = [place for place, each in enumerate(continuations) if len(each) > 1]
    if longer:
        rest = _behind_first(model, reading, prompts, [continuations[place] for place in longer])
        for row, more in zip(found, rest, strict=True):
            for place, each in zip(longer, more, strict=True):
                row[place] = math.fsum((row[place], *each))
    return [tuple(value if math.isfinite(value) else None for value in row) for row in found]


def log_probs(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    most_numbers: int = MOST_NUMBERS,
) -> list[tuple[float | None, ...]]:
    """The log-prob of each token of each answer, None where not finite. ``most_numbers``: logits made at a time."""
    rows = _forced(model, prompts, answers, most_numbers)
    return [tuple(value if math.isfinite(value) else None for value in row) for row in rows]


def _behind_first(
    model: CausalModel, reading: Reading, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> list[list[list[float]]]:
    """For each prompt and continuation the log-probs of its second and later tokens."""
    if not model.takes_padding:
        # A state can't always read on by several tokens at once.
        return [
            [_forced(model, [prompt], [continuation], MOST_NUMBERS)[0][1:] for continuation in continuations]
            for prompt in prompts
        ]
    import torch

    reading.select([row for row in range(len(prompts)) for _ in continuations])
    width = max(map(len, continuations)) - 1
    # Padded at the right: nothing is read behind it.
    ids = torch.tensor([[*each[:-1], *[0] * (width + 1 - len(each))] for each in continuations], device=model.device)
    mask = torch.tensor([[1] * (len(each) - 1) + [0] * (width + 1 - len(each)) for each in continuations])
    logits = reading.read(ids.repeat(len(prompts), 1), mask.to(model.device).repeat(len(prompts), 1), keep=width)
    targets = [[*each[1:], *[0] * (width + 1 - len(each))] for each in continuations] * len(prompts)
    values = _picked(logits, targets)
    count = len(continuations)
    cut = [row[: len(continuations[number % count]) - 1] for number, row in enumerate(values)]
    return [cut[start : start + count] for start in range(0, len(cut), count)]


def _forced(
    model: CausalModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], most_numbers: int
) -> list[list[float]]:
    """The log-prob of each token of each answer. Whole texts are padded at the left, so that the answers' ends lie
    below each other; logits are made of few places at a time."""
    longest = max(map(len, answers))
    if longest == 0:
        return [[] for _ in answers]
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    ids, mask = padded(model, whole)
    wide = ids.shape[1]
    reading = Reading(model, len(whole), keeping=model.takes_padding)
    picked: list[list[float]] = [[] for _ in whole]
    vocabulary = model.module.config.get_text_config(decoder=True).vocab_size
    at_once = max(1, most_numbers // (len(whole) * vocabulary)) if model.takes_padding else longest
    start, read = wide - longest, 0  # of the next target; what was read
    while start < wide:
        end = min(wide, start + at_once)
        logits = reading.read(ids[:, read : end - 1], mask[:, read : end - 1], keep=end - start)
        for row, more in zip(picked, _picked(logits, ids[:, start:end].tolist()), strict=True):
            row += more
        start, read = end, end - 1
    return [row[longest - len(answer) :] for row, answer in zip(picked, answers, strict=True)]


def _picked(logits: torch.Tensor, targets: Sequence[Sequence[int]]) -> list[list[float]]:
    """The log-probs of the targets, (rows, places) each, of logits (rows, places, vocabulary)."""
    import torch

    chosen = torch.tensor(targets, device=logits.device)[..., None]
    values: list[list[float]] = (
        torch.log_softmax(logits, dim=-1, dtype=torch.float32).gather(2, chosen)[..., 0].tolist()
    )
    return values
