"""Checks a classifier in training on lessons that it does not learn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuherd.lm.forward import plan_batches
from gpuherd.posttrain.guidance import losses, tensors
from gpuherd.posttrain.guidance.labels import Lesson
from gpuherd.posttrain.guidance.objective import Objective
from gpuherd.posttrain.guidance.options import Loss, ValueOptions
from gpuherd.posttrain.guidance.quality import Predicted, pairs_in_order, quality

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.trainee import Trainee


def checked(
    trainee: Trainee, lessons: Sequence[Lesson], objective: Objective, options: ValueOptions, amp_dtype: str | None
) -> dict[str, float]:
    """The mean loss and ``quality``'s figures over these lessons, each named ``validation_``...; the same in every
    process. Of ``bradley_terry``, whose level means nothing, the share of comparisons in order instead."""
    found, total, weight = _predicted(trainee, trainee.world.share(lessons), objective, options, amp_dtype)
    parts = trainee.world.gather((found, total, weight))
    whole = math.fsum(each for _, _, each in parts)
    figures = {"loss": math.fsum(each for _, each, _ in parts) / whole} if whole else {}
    lots = [lesson for part, _, _ in parts for lesson in part]
    if objective.loss is Loss.BRADLEY_TERRY:
        figures |= pairs_in_order(lots)
    else:
        ends = (options.V_min, options.V_max) if objective.atoms is not None else (0.0, 1.0)
        figures |= quality([each for lesson in lots for each in lesson], *ends)
    return {f"validation_{name}": value for name, value in figures.items()}


def _predicted(
    trainee: Trainee, lessons: Sequence[Lesson], objective: Objective, options: ValueOptions, amp_dtype: str | None
) -> tuple[list[tuple[Predicted, ...]], float, float]:
    """What is predicted of this process's lessons, their sum of losses and its weight."""
    import torch

    kind = objective.device.partition(":")[0]
    dtype: Any = None if amp_dtype is None else getattr(torch, amp_dtype)
    found: list[tuple[Predicted, ...]] = []
    total = weight = 0.0
    widths = [max(len(each.ids) for each in lesson) for lesson in lessons]
    batches = plan_batches(widths, rows=trainee.steps.micro_batch_size, most_tokens=options.max_batch_num_tokens)
    with trainee.gathered(), torch.inference_mode(), torch.autocast(kind, dtype, enabled=dtype is not None):
        trainee.plain.eval()
        for materials in tensors.loaded(lessons, batches, 0):
            batch = tensors.padded(materials, objective.device)
            z = trainee.plain(batch.ids, batch.mask)
            total += float(objective.of(z, batch))
            weight += objective.weight(materials)
            values = z.float() if objective.loss is Loss.BRADLEY_TERRY else losses.expected(z, objective.atoms)
            rows = iter(zip(values, batch.labelled, batch.target.tolist(), strict=True))
            found += [
                tuple(Predicted(tuple(row[labelled].tolist()), target) for row, labelled, target in _next(rows, lesson))
                for lesson in materials
            ]
    return found, total, weight


def _next(rows: Any, lesson: Sequence[object]) -> list[Any]:
    return [next(rows) for _ in lesson]
