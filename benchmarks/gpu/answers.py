"""Tokens a second of ``generate``'s decoding beside transformers' batched ``generate``, and what guidance adds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks import generate
from benchmarks.gpu import Measurement, device, needs
from benchmarks.posttrain import guided

ROWS = (1, 8, 32)


def measure(quick: bool) -> Iterator[Measurement]:
    """A Llama of 1.2 billion random weights in bfloat16."""
    device(quick)
    needs("transformers", "tokenizers")
    for case in ("few_shot", "questions", "samples"):
        yield Measurement(case, partial(decoded, case, quick=quick))
    for rows in ROWS[:1] if quick else ROWS:
        yield Measurement(f"guided_{rows}", partial(guided.measured, rows, "bfloat16", quick=quick))


def decoded(case: str, *, quick: bool) -> dict[str, Any]:
    """The figures of one case of ``benchmarks.generate``."""
    figures: dict[str, Any] = generate.measured([case], "bfloat16", quick=quick, harness=False)[case]
    return figures
