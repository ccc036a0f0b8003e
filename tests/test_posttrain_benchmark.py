"""What the documents say of a GRPO step beside TRL's, of RLCR beside GRPO, of rollouts by vLLM, was measured."""

from __future__ import annotations

import json

import pytest
from benchmarks.posttrain import _table


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("GRPO", ("| 4,096 tokens, without a reference |", "| 45 tokens, with a reference |")),
        ("calibration", ("| base |", "| GRPO, seed 2 |", "| RLCR, seed 2 |")),
        ("vllm_rollouts", ("| transformers |", "| vLLM |")),
    ],
)
def test_the_table_is_made_from_the_results(name: str, rows: tuple[str, ...]) -> None:
    made = _table.TABLES[name](json.loads(_table.RESULTS.read_text(encoding="utf-8")))
    begin, end = _table.marks(name)
    page = _table.PAGE.read_text(encoding="utf-8")
    assert page.partition(begin)[2].partition(end)[0].strip() == made
    assert all(row in made for row in rows)
