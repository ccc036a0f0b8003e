"""A GPU as the planner sees it: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that a plan may use. Bytes.

    Attributes:
        label: what people call it: ``0``, ``3:1``.
        name: ``NVIDIA A100-SXM4-40GB``, or what was asked for: ``40GB``.
        total: all of its memory.
        free: what may be used of it now; less than ``total`` where others use the rest.
        capability: CUDA compute capability, None where it is not known.
        uuid: of a GPU that is really there.
        alone: a MIG instance: CUDA never uses two of those in one process.
    """

    label: str
    name: str
    total: int
    free: int
    capability: tuple[int, int] | None = None
    uuid: str | None = None
    alone: bool = False
