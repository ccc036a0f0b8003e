"""docs/judging.md says what the code does: names, defaults, verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuherd.qa.grading.config import MIN_MASS, SHORT_NAMES, JudgeConfig
from gpuherd.qa.grading.files import RULES
from gpuherd.qa.grading.rules import RULES as WORDS
from gpuherd.qa.grading.verdicts import Verdict

PAGE = (Path(__file__).parents[3] / "docs" / "judging.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "model"), SHORT_NAMES.items())
def test_each_short_name_stands_beside_its_model(name: str, model: str) -> None:
    assert any(f"`llm_{name}`" in line and f"| {model} |" in line for line in PAGE.splitlines())


def test_every_rule_and_verdict_is_explained_with_its_threshold() -> None:
    for rule in RULES:
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{rule.value}` |")]
        threshold = WORDS[rule.value].threshold if rule.value in WORDS else None
        assert threshold is None or f"`--threshold` ({threshold})" in line
    assert all(f"`{verdict.value}`" in PAGE for verdict in Verdict)
    assert f"`--min-mass` ({MIN_MASS}" in PAGE and JudgeConfig().model_threshold == 0.5
