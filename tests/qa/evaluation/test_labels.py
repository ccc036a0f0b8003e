"""Verdicts become labels, or none."""

from __future__ import annotations

from tests.qa.grading.judgings import some_judgments

from gpuherd.qa.evaluation.stage import EXCLUDE, INCORRECT, labels

IDS = [f"q{number}" for number in range(6)]


def test_only_correct_and_incorrect_are_labels() -> None:
    found = labels(IDS, some_judgments("+-0?+-"), "greedy", EXCLUDE)
    assert found.wrong == (False, True, None, None, False, True)
    assert (found.right, found.wrong_ones, found.left_out, found.unjudged) == (2, 2, 2, 0)
    assert (found.counts.not_attempted, found.counts.unparsed) == (1, 1)


def test_not_attempted_can_count_as_wrong_but_unparsed_never_does() -> None:
    found = labels(IDS, some_judgments("+-0?+-"), "greedy", INCORRECT)
    assert found.wrong == (False, True, True, None, False, True)
    assert found.counts.incorrect == 2  # what the judge said stays what it said


def test_order_other_answers_and_other_questions() -> None:
    said = [*some_judgments("-" * 3, ["q2", "q0", "q9"]), *some_judgments("+" * 6, IDS, which="sample-0")]
    found = labels(IDS, said, "greedy")
    assert found.wrong == (True, None, True, None, None, None)
    assert found.unjudged == 4
    assert found.counts.total == 2
