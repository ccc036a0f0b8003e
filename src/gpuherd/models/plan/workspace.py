"""Bytes that a GPU needs for a moment beside weights and cache, while prompts are read and while answers grow. Pure.

What a block needs is a tuple of ``Line``s, one for each stage of its computation: bytes that are there whatever the
batch, and bytes for each sequence. A GPU needs the greatest of all lines of its blocks, because blocks are computed one
after the other and free what they took: depth doesn't count.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.models.plan.architecture import Architecture, Block
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.workload import Workload

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Line:
    """``fixed + each x batch`` bytes."""

    fixed: int
    each: int

    def at(self, batch: int) -> int:
        """Bytes for so many sequences."""
        return self.fixed + self.each * batch


@dataclass(frozen=True, slots=True)
class Stages:
    """What one block needs at its stages: while the prompt is read, and for one more token."""

    prompt: tuple[Line, ...] = ()
    token: tuple[Line, ...] = ()


def stages_of(block: Block, architecture: Architecture, workload: Workload, precision: Precision) -> Stages:
    """What a block needs, of the batch of ``workload`` independent."""
    number = precision.number_bytes
    if block.kind == "layer":
        token = number * (3 * architecture.intermediate_size + 4 * architecture.hidden_size)
    else:
        token = number * 4 * architecture.hidden_size
    head = architecture.vocab_size * (number + _FLOAT32) if block.kind == "head" else 0
    return Stages((Line(0, token * workload.prompt_tokens + head),), (Line(0, token + head),))
