"""Models that stay in memory from one use to the next: a job that samples in many small pieces loads each once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_KEPT: ContextVar[dict[Hashable, Any] | None] = ContextVar("kept models", default=None)


@contextmanager
def keeping_models() -> Iterator[None]:
    """While it lasts, what is loaded through ``kept`` stays in memory and is found again."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept(key: Hashable, load: Callable[[], T]) -> T:
    """What ``load`` gives; where models are kept, what it gave for this key before."""
    there = _KEPT.get()
    if there is None:
        return load()
    if key not in there:
        there[key] = load()
    found: T = there[key]
    return found
