"""How gpuherd's errors look in a Hydra program: one line, as Hydra tells its own, and no stack of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import CompactHydraException

from gpuherd.errors import GpuherdError


class JobFailed(RuntimeError):
    """A job of the sweep has ended without telling how: it was killed, ran too long, or could not start."""


@contextmanager
def as_hydra_tells() -> Iterator[None]:
    """Errors that gpuherd raises on purpose become such that Hydra prints as they are."""
    try:
        yield
    except GpuherdError as problem:
        raise CompactHydraException(f"gpuherd: {problem}") from None
