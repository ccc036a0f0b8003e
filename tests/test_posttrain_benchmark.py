"""What the documents say of a GRPO step beside TRL's is what was measured."""

from __future__ import annotations

import json

from benchmarks.posttrain import _table


def test_the_table_is_made_from_the_results() -> None:
    made = _table.table(json.loads(_table.RESULTS.read_text(encoding="utf-8")))
    page = _table.PAGE.read_text(encoding="utf-8")
    assert page.partition(_table.BEGIN)[2].partition(_table.END)[0].strip() == made
    assert "| 4,096 tokens, without a reference |" in made and "| 45 tokens, with a reference |" in made
