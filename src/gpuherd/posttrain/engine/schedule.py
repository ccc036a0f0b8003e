"""The learning rate at a step, of the step's number alone: nothing has to be kept to go on exactly. Pure."""

from __future__ import annotations

import math

from gpuherd.posttrain.engine.options import OptimiserOptions, Scheduler


def learning_rate(options: OptimiserOptions, step: int, total_steps: int) -> float:
    """The learning rate of a step, counted from 0, as transformers' schedules have it for one warm-up.

    It rises linearly over the ``warmup_steps`` first steps (step 0 has 1 / warmup_steps of it, not 0: no step is lost),
    then goes down so that it would be 0 at ``total_steps``; constant stays.

    >>> [learning_rate(OptimiserOptions(1.0, scheduler=Scheduler.LINEAR, warmup_steps=2), s, 6) for s in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    if options.scheduler == Scheduler.CONSTANT:
        return options.learning_rate
    gone = (step - options.warmup_steps) / max(1, total_steps - options.warmup_steps)
    left = max(0.0, 1.0 - gone)
    if options.scheduler == Scheduler.COSINE:
        left = (1.0 - math.cos(math.pi * left)) / 2
    return options.learning_rate * left
