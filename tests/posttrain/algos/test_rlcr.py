"""RLCR pays for being right and for knowing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.posttrain.algos.training_work import SAMPLING, curves, same, work
from tests.posttrain.letters import Letters

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.algos.rlcr import ASKED, RLCR, Calibrated, RLCROptions, confidence_in, payment
from gpuherd.posttrain.engine.options import Stopped
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.types import Collecting, Policy, Precision, Problem, Reward, Rollout, Split

FAST = RLCROptions(lr=5e-3, kl_coef=0.0, epochs=2, batch_size=4, samples_per_prompt=4, online=False)


@dataclass
class Sums(Letters):
    """Right is what is the first answer of the problem; ``seen``: prompts and completions that were judged."""

    verifiable: bool = True

    def __post_init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        self.seen += [(problem.prompt, text) for problem, text in zip(problems, completions, strict=True)]
        right = [text.strip() in problem.answers for problem, text in zip(problems, completions, strict=True)]
        return [Reward(float(each), each) for each in right]


@given(st.floats(0, 1), st.floats(0, 1))
def test_telling_the_truth_pays_most(probability: float, stated: float) -> None:
    def expected(q: float) -> float:
        right, wrong = payment(Reward(1.0, True), q).value, payment(Reward(0.0, False), q).value
        return probability * right + (1 - probability) * wrong

    assert expected(probability) == pytest.approx(probability**2, abs=1e-12)
    assert expected(stated) == pytest.approx(probability**2 - (stated - probability) ** 2, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("4 <confidence>0.7</confidence>", 0.7),
        ("<Confidence> 70% </CONFIDENCE> 4", 0.7),
        ("4 <confidence>1</confidence>", 1.0),
        ("4 <confidence>.5</confidence>", 0.5),
        ("4 <confidence>0.7", None),
        ("4 <confidence>7</confidence>", None),
        ("4 <confidence>-0.7</confidence>", None),
        ("4 <confidence>0.7 or so</confidence>", None),
        ("4 <confidence>inf</confidence>", None),
        ("4 <confidence></confidence>", None),
        ("<confidence>0.1</confidence> 4 <confidence>0.9</confidence>", None),
        ("<think>say <confidence>0.1</confidence></think>4 <confidence>0.9</confidence>", 0.9),
        ("4", None),
    ],
)
def test_what_states_a_confidence(text: str, wanted: float | None) -> None:
    assert confidence_in(text) == wanted


def test_the_task_judges_what_is_left_without_the_tag() -> None:
    sums = Sums()
    task = Calibrated(sums, ASKED)
    plain = Problem("p", "2+2=", ("4",))
    asked = task.asked(plain)
    assert asked.prompt.startswith("2+2=") and "<confidence>" in asked.prompt
    found = task.rewards([asked] * 3, ["4<confidence>0.8</confidence>", "5 <confidence>0.8</confidence>", "4"])
    assert [each.value for each in found] == pytest.approx([1 - 0.04, -0.64, -1.0])
    assert [each.correct for each in found] == [True, False, True]
    assert found[0].parts == {"right": 1.0, "confidence": 0.8, "brier": pytest.approx(0.04)}
    assert found[2].note == "no single confidence from 0 to 1 is stated"
    assert sums.seen == [("2+2=", "4"), ("2+2=", "5 "), ("2+2=", "4")]
    assert not task.verifiable and task.reward_range == (-1.0, 1.0)
    assert [each.prompt for each in task.problems(Split.TRAIN, 2, 0)] == [
        each.prompt + ASKED for each in sums.problems(Split.TRAIN, 2, 0)
    ]

    evaluated = RLCR().evaluated(sums)
    assert evaluated.verifiable and evaluated.reward_range == (0.0, 1.0)
    assert [each.value for each in evaluated.rewards([asked] * 2, ["4<confidence>0.1</confidence>", "4"])] == [1, 1]


def test_a_task_without_right_and_wrong_is_refused(policy_model: Path, tmp_path: Path) -> None:
    for refused in (
        lambda: RLCR().evaluated(Letters()),
        lambda: RLCR().train(work(policy_model, tmp_path)),
    ):
        with pytest.raises(UsageError, match="the task letters knows no right and wrong"):
            refused()
    with pytest.raises(UsageError, match="no task"):
        RLCR().train(work(policy_model, tmp_path, task=None))


def answer(problem: Problem, sample: int, text: str, right: bool) -> Rollout:
    ids = tuple(range(20, 24 + sample))
    reward = payment(Reward(float(right), right), confidence_in(text)).value
    log_probs = (-4.6,) * len(ids)
    return Rollout(problem.id, sample, (5, 6), ids, (True,) * len(ids), log_probs, text, reward, right, True)


def test_curves_tell_of_confidence(policy_model: Path, tmp_path: Path) -> None:
    assert algorithm_class("RLCR") is RLCR
    problems = Sums().problems(Split.TRAIN, 8, 0)
    stated = [("4 <confidence>0.9</confidence>", True), ("5 <confidence>0.9</confidence>", False), ("4", True)]
    stated.append(("5 <confidence>0.2</confidence>", False))
    rows = [answer(each, sample, *told) for each in problems for sample, told in enumerate(stated)]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    RLCR(FAST).train(work(policy_model, straight, task=None, rows=(rows,)))
    lines = curves(straight)
    assert len(lines) == 4
    for line in lines:
        assert line["stated"] == pytest.approx(3 / 4)
        assert line["confidence"] == pytest.approx(2.0 / 3)
        assert line["brier"] == pytest.approx((0.01 + 0.81 + 0.04) / 3)
        assert line["ece"] == pytest.approx((abs(1.8 - 1) + 0.2) / 3)
        assert line["reward"] == pytest.approx((0.99 - 0.81 - 1 - 0.04) / 4)
    with pytest.raises(Stopped):
        RLCR(FAST).train(work(policy_model, broken, task=None, rows=(rows,), hooks=Hooks(stopping=lambda: True)))
    RLCR(FAST).train(work(policy_model, broken, task=None, rows=(rows,)))
    assert same(straight / "model", broken / "model") and curves(broken) == lines


def test_problems_ask_for_a_confidence_wherever_answers_are_drawn(policy_model: Path, tmp_path: Path) -> None:
    problems, policy, sums = Sums().problems(Split.TRAIN, 4, 0), Policy(str(policy_model)), Sums()
    options = replace(FAST, instruction=" sure?", max_steps=1)
    collecting = Collecting(sums, problems, policy, policy, 0, SAMPLING, Precision(), "cpu")
    rows = list(RLCR(options).collect(collecting))
    assert len(rows) == 16 and {each.reward for each in rows if isinstance(each, Rollout)} == {-1.0}
    short = min(len(each.prompt_ids) for each in rows)
    assert short == min(len(each.prompt) for each in problems) + len(" sure?")  # a token is a character
    RLCR(replace(options, online=True)).train(work(policy_model, tmp_path, task=sums))
    (line,) = curves(tmp_path)
    assert line["stated"] == 0 and line["reward"] == -1 and "ece" not in line
    assert {prompt for prompt, _ in sums.seen} <= {each.prompt for each in Sums().problems(Split.TRAIN, 8, 0)}


def test_a_conversation_is_asked_in_its_last_message() -> None:
    turns = (("user", "one"), ("assistant", "two"), ("user", "three"))
    asked = Calibrated(Sums(), " sure?").asked(Problem("p", "one two three", ("x",), messages=turns))
    assert asked.messages == (*turns[:2], ("user", "three sure?")) and asked.prompt == "one two three sure?"
    assert Calibrated(Sums(), " sure?").asked(Problem("p", "one", ("x",))).messages == ()
