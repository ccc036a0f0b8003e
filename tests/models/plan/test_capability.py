"""What a GPU's capability allows."""

from __future__ import annotations

import pytest

from gpuherd.models.plan.capability import attention_for, verdict
from gpuherd.models.plan.precision import Precision


@pytest.mark.parametrize(
    ("precision", "capability", "possible", "slow"),
    [
        ("bf16", (8, 0), True, False),
        ("bf16", (7, 5), True, True),
        ("bf16", (6, 1), False, True),
        ("fp16", (7, 0), True, False),
        ("fp16", (6, 0), True, True),
        ("fp16", (5, 2), False, True),
        ("int8", (7, 5), True, False),
        ("int8", (7, 0), True, True),
        ("int8", (5, 2), False, True),
        ("nf4", (9, 0), True, False),
        ("nf4-dq", (5, 0), False, True),
        ("fp32", (5, 0), True, False),
        ("bf16", None, True, False),
        ("as-stored", (8, 0), True, False),
    ],
)
def test_precisions(precision: str, capability: tuple[int, int] | None, possible: bool, slow: bool) -> None:
    told = verdict(Precision(precision), capability)
    assert told.possible == possible
    assert bool(told.sentence) == slow


def test_attention() -> None:
    assert attention_for((8, 6)) == "flash_attention_2"
    assert attention_for((7, 5)) == attention_for(None) == "sdpa"
