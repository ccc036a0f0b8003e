"""Resolvers that a program has registered (``${half:3}``): its configs mean nothing without them in another process.

A job doesn't run the program's main module again, in which they usually are registered. OmegaConf has no public list of
them; where this one is gone some day, jobs are as well off as under Hydra's other launchers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf.basecontainer import BaseContainer

# Hydra's and OmegaConf's own are there in every process.
_EVERYWHERE = ("oc.", "now", "hydra", "python_version")


def of_the_program() -> dict[str, Callable[..., Any]]:
    """The resolvers that the program has registered, by name."""
    known: dict[str, Callable[..., Any]] = getattr(BaseContainer, "_resolvers", {})
    return {name: resolve for name, resolve in known.items() if not name.startswith(_EVERYWHERE)}


def restore(resolvers: dict[str, Callable[..., Any]]) -> None:
    """Registers them here as they were there."""
    if hasattr(BaseContainer, "_resolvers"):
        BaseContainer._resolvers.update(resolvers)
