"""Bytes on one GPU of a model that generates answers. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes on one GPU, by what they are for."""

    weights: int = 0
    quantisation: int = 0
    cache: int = 0
    workspace: int = 0
    context: int = 0
    reserve: int = 0

    @property
    def total(self) -> int:
        """All of them, the reserve too."""
        return self.weights + self.quantisation + self.cache + self.workspace + self.context + self.reserve
