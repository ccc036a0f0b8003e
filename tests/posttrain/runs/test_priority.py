"""Priorities: earlier rounds first, or what a user's function says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.posttrain.runs.test_plan import one

from gpuherd.errors import UsageError
from gpuherd.posttrain.runs.plan import Phase, plan_steps
from gpuherd.posttrain.runs.priority import JobDescription, description_of, earlier_rounds_first, priority_named


def test_earlier_rounds_go_first_where_the_guides_would_run_later_ones() -> None:
    steps = plan_steps([one(), one("GRPO")], 3, references=False)
    found = [description_of(step, 3) for step in steps]
    ours = sorted(found, key=earlier_rounds_first, reverse=True)
    assert [each.round_idx for each in ours] == sorted(each.round_idx for each in found)
    literal = sorted(found, key=lambda each: each.round_idx * 100, reverse=True)  # "higher priority jobs run first"
    assert literal[0].round_idx == 2
    # What others wait for goes before what nobody needs.
    of_round = [each for each in ours if each.round_idx == 0 and each.algorithm == "PITA"]
    assert [each.phase for each in of_round] == [Phase.COLLECT, Phase.TRAIN, Phase.EVALUATE]


JOB = JobDescription("x", "train", "PITA", "gsm8k", "llama", 1, 2)


def test_a_users_function_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_order.py").write_text(
        "def later(job): return job.round_idx * 100\n"
        "def wrong(job): return 'high'\n"
        "def broken(job): return job.nothing\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert priority_named(None) is earlier_rounds_first
    assert priority_named("my_order.later")(JOB) == 100
    with pytest.raises(UsageError, match="gave 'high' for x; it gives a whole number"):
        priority_named("my_order.wrong")(JOB)
    with pytest.raises(UsageError, match="AttributeError for x"):
        priority_named("my_order.broken")(JOB)
    with pytest.raises(UsageError, match="my_order has no function number"):
        priority_named("my_order.number")
    with pytest.raises(UsageError, match="can't be imported"):
        priority_named("no_such_module_anywhere.f")
    (tmp_path / "my_mistake.py").write_text("x = (")
    with pytest.raises(UsageError, match=r"my_mistake can't be imported: SyntaxError"):
        priority_named("my_mistake.f")
    with pytest.raises(UsageError, match="a dotted name"):
        priority_named("later")
