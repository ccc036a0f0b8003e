"""A job that says which model it loads, in place of how many GPUs it needs: what it says, and what comes of it.

Plain data. Who plans is no business of this room, which knows no models: it is given a ``Planner``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelUse:
    """What a job says of the model that it loads; None is what was not said. The words are the planner's to judge.

    Attributes:
        model: a known name, a Hugging Face id, a folder or a file.
        dtype: how the weights lie in memory.
        batch, prompt_tokens, new_tokens: sequences at once, and how long they are.
        parallel: how it goes over several GPUs.
        gpus: at least and at most so many GPUs.
        memory_mb: what it asks to be free on each, whatever the plan needs.
    """

    model: str
    dtype: str | None = None
    batch: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    parallel: str | None = None
    gpus: tuple[int, int] | None = None
    memory_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What such a job asks for: GPUs, and MB free on each. ``family`` is one name for all jobs of which the same is
    said; ``sentence`` tells people."""

    gpus: int
    memory_mb: int
    family: str
    sentence: str


# Raises a GpuherdError for a model that is not to be had, or that fits nowhere.
Planner = Callable[[ModelUse], Need]
