"""What post-training costs: guided decoding over plain decoding, a GRPO step over TRL's, collection by two workers,
rollouts by vLLM and by transformers; and what RLCR brings over GRPO.

python -m benchmarks posttrain                      all of them
python -m benchmarks.posttrain guided collect       some of them, in place of older figures of theirs
"""

from __future__ import annotations

import importlib
from typing import Any

PARTS = ("guided", "grpo", "collect", "calibration", "vllm_rollouts")


def run(*, quick: bool) -> dict[str, Any]:
    """The figures of each part."""
    return {part: figures_of(part, quick=quick) for part in PARTS}


def figures_of(part: str, *, quick: bool) -> dict[str, Any]:
    """Those of one."""
    figures: dict[str, Any] = importlib.import_module(f"benchmarks.posttrain.{part}").run(quick=quick)
    return figures
