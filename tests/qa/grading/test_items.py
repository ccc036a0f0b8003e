"""Which answers are judged, and about which a model is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.qa.grading.conftest import answered

from gpuherd.errors import UsageError
from gpuherd.lm.backend import Finish, Generation
from gpuherd.qa.evaluation.stage import labels
from gpuherd.qa.grading.files import RULES
from gpuherd.qa.grading.stage import distinct_cases, items_of, judge_by_rule, spread
from gpuherd.qa.grading.verdicts import Judgment, Ruling, Verdict
from gpuherd.qa.record import Question

ASKED = Question("q", "Where?", ("Paris",))
ROWS = [
    answered(0, ASKED, " Paris ", ("Paris", "Rome", "Paris")),
    answered(1, Question("other", "Where?", ("Rome",)), "", ("Paris", "I don't know", "Rome")),
]


def test_answers_are_chosen_by_name() -> None:
    greedy, which = items_of(ROWS, None)
    assert which == "greedy" and [(each.which, each.text) for each in greedy] == [("greedy", "Paris"), ("greedy", "")]
    samples, _ = items_of(ROWS, "samples")
    assert [each.which for each in samples] == ["sample-0", "sample-1", "sample-2"] * 2
    everything, _ = items_of(ROWS, "all")
    assert len(everything) == 8 and everything[4].which == "greedy"


@pytest.mark.parametrize(
    ("said", "judged"),
    [
        ("<think>Rome? No.</think>\n\nParis", "Paris"),
        ("Rome? No.</think>Paris", "Paris"),  # where the template has opened the thought
        ("<think>Paris</think>", ""),
        ("<think>Rome? No, Par", ""),
        ("Paris </think> Rome </think> Oslo", "Oslo"),
    ],
)
def test_thoughts_are_not_judged(said: str, judged: str) -> None:
    items, _ = items_of([answered(0, ASKED, said)], None)
    assert items[0].text == judged


@pytest.mark.parametrize("finish", [Finish.NAN, Finish.LENGTH])  # the latter as versions before wrote it
def test_numbers_that_broke_down_are_no_answer_and_no_attempt(finish: Finish) -> None:
    broken = Generation((4,), (None,), "Paris", (5,), finish)
    rows = [replace(ROWS[0], greedy=broken, samples=()), answered(1, ROWS[1].question, "Paris")]
    items, _ = items_of(rows, None)
    for kind in RULES:
        nan, whole = judge_by_rule(kind, items)
        assert nan.verdict is Verdict.NAN and whole.verdict is not Verdict.NAN and "NaN" in str(nan.note)
    asked = distinct_cases(items)
    assert asked.of_item == (None, 0)
    spread_ones = spread(items, asked, [Ruling(Verdict.CORRECT)])
    assert [each.verdict for each in spread_ones] == [Verdict.NAN, Verdict.CORRECT]
    for wrongly in ("exclude", "incorrect"):
        found = labels([items[0].question.id], spread_ones, "greedy", wrongly)
        assert found.wrong == (None,) and found.counts.nan == 1 and found.unjudged == 0


def test_a_run_without_such_answers_says_which_there_are() -> None:
    only_samples = [answered(0, ASKED, None, ("Paris",))]
    assert items_of(only_samples, None)[1] == "samples"
    with pytest.raises(UsageError, match=r"no greedy answers; --answers samples"):
        items_of(only_samples, "greedy")
    with pytest.raises(UsageError, match=r"no samples; --answers greedy"):
        items_of([answered(0, ASKED, "Paris")], "samples")
    assert items_of([], None) == ([], "samples")


def test_a_model_is_asked_once_about_equal_answers_and_never_about_none() -> None:
    items, _ = items_of(ROWS, "all")
    asked = distinct_cases(items)
    assert [(each.question.id, each.text) for each in asked.cases] == [
        ("q", "Paris"),
        ("q", "Rome"),
        ("other", "Paris"),
        ("other", "Rome"),
    ], "the same answer to another question is another case"
    assert asked.of_item == (0, 0, 1, 0, None, 2, None, 3)
    judged = spread(items, asked, [Ruling(Verdict.CORRECT, p_correct=0.5)] * len(asked.cases))
    assert [(each.id, each.which) for each in judged] == [(item.question.id, item.which) for item in items]
    assert judged[4] == Judgment("other", "greedy", Verdict.NOT_ATTEMPTED, note="empty; the judge was not asked")
    assert judged[6].verdict is Verdict.NOT_ATTEMPTED and "doesn't know" in str(judged[6].note)
    assert all(judged[place].p_correct == 0.5 for place in (0, 1, 2, 3, 5, 7))
