"""No completion makes scoring raise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.posttrain.envs.attempts import Attempt, Attempts
from gpuherd.posttrain.envs.registry import SingleTurn
from gpuherd.posttrain.rollout.sampler import scored
from gpuherd.posttrain.types import Problem, Reward, Split
from gpuherd.runs import console

PROBLEMS = [Problem(name, "?") for name in "abc"]
SAID = ["fine", "bad", "fine"]


class Fragile:
    """A task whose rule did not foresee ``bad``."""

    name = "fragile"
    verifiable = True

    def __init__(self, fault: Callable[[], Exception], least: float = 0.0):
        self.fault, self.reward_range = fault, (least, 1.0)

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        return PROBLEMS

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        if "bad" in completions:
            raise self.fault()
        return [Reward(1.0, correct=True) for _ in completions]

    def close(self) -> None:
        """Nothing was started."""


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_warned", set())


def test_what_a_task_did_not_foresee_is_a_wrong_answer_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    task = Fragile(lambda: OverflowError("int too large to convert to float"), least=-0.5)
    found = scored(task, PROBLEMS, SAID)
    assert [each.value for each in found] == [1.0, -0.5, 1.0]
    assert [each.correct for each in found] == [True, False, True]
    assert found[1].note == "scoring failed: OverflowError: int too large to convert to float"
    scored(task, PROBLEMS, SAID)
    told = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(told) == 1, "once a kind"
    assert "fragile, problem b" in told[0].getMessage()
    assert told[0].exc_info is not None, "with the place where it was raised"


def test_faults_that_are_not_the_completions_end_the_training() -> None:
    for fault in (UsageError("the tests are broken"), GpuherdError("no process can be made")):
        with pytest.raises(type(fault)):
            scored(Fragile(lambda fault=fault: fault), PROBLEMS, SAID)  # type: ignore[misc]
    # A reward model has no least reward and no wrong answers.
    with pytest.raises(RuntimeError, match="device"):
        scored(Fragile(lambda: RuntimeError("device lost"), least=-float("inf")), PROBLEMS, SAID)


def test_environments_are_guarded_alike() -> None:
    task = Fragile(RecursionError)
    environments = SingleTurn(task)
    made = [environments.make() for _ in PROBLEMS]
    for each, problem in zip(made, PROBLEMS, strict=True):
        each.reset(problem, 0)
    assert [each.reward for each in environments.step_all(made, SAID)] == [1.0, 0.0, 1.0]

    def judge(problems: Sequence[Problem], texts: Sequence[str]) -> list[Attempt]:
        return [Attempt(each, "") for each in task.rewards(problems, texts)]

    family = Attempts("own", task, judge, 2, (-1.0, 1.0))
    trying = family.make()
    trying.reset(PROBLEMS[0], 0)
    first = trying.step("bad")
    assert (first.done, first.correct, first.if_cut) == (False, False, -1.0)
    assert trying.step("fine").reward == 1.0
