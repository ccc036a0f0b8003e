"""The audit of a judging: what it counts, and that it catches judges that are broken on purpose and no others."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.qa.grading.audit import Audit, audit
from gpuherd.qa.grading.label_quality import JudgeVerdicts, WarningKind, agreement
from gpuherd.qa.grading.verdicts import Judgment, Verdict

C, W, N, U = Verdict.CORRECT, Verdict.INCORRECT, Verdict.NOT_ATTEMPTED, Verdict.UNPARSED


def judged(
    name: str, verdicts: Sequence[Verdict], kind: str = "model", p: Sequence[float] | None = None
) -> JudgeVerdicts:
    return JudgeVerdicts(
        name,
        kind,
        [
            Judgment(f"q{number}", "greedy", verdict, p_correct=None if p is None else p[number])
            for number, verdict in enumerate(verdicts)
        ],
    )


def flipped(verdicts: Sequence[Verdict], every: int) -> list[Verdict]:
    return [(W if each is C else C) if number % every == 0 else each for number, each in enumerate(verdicts)]


def kinds(found: Audit) -> list[WarningKind]:
    return [each.kind for each in found.warnings]


TRUTH = [C if number % 3 else W for number in range(120)]  # 80 right, 40 wrong
EXACT = [C if each is C and number % 5 else W for number, each in enumerate(TRUTH)]  # misses every fifth


def test_a_good_judge_has_counts_kappa_and_no_warning() -> None:
    found = audit(judged("llm", flipped(TRUTH, 17)), [judged("exact", EXACT, "exact")])
    assert found.warnings == ()
    assert found.counts.total == found.counts.labelled == 120
    (beside,) = found.agreements
    assert beside.both_correct + beside.only_this + beside.only_other + beside.both_incorrect == 120
    assert beside.kappa.value is not None and beside.kappa.value > 0.4
    assert beside.agreed.count == beside.both_correct + beside.both_incorrect
    assert found.yes_rate.interval is not None and found.yes_rate.value is not None
    assert found.yes_rate.value in found.yes_rate.interval


def test_a_judge_that_always_says_yes_is_caught() -> None:
    found = audit(judged("llm", [C] * 120), [judged("exact", EXACT, "exact")])
    assert kinds(found)[:2] == [WarningKind.SAYS_ONE_THING, WarningKind.EXTREME_RATE]
    assert WarningKind.ONE_CLASS in kinds(found)
    assert found.agreements[0].kappa.value is None
    assert found.agreements[0].kappa.reason == "llm calls all 120 correct"


def test_a_judge_that_always_says_no_is_caught() -> None:
    found = audit(judged("llm", [W] * 120), [judged("exact", EXACT, "exact")])
    assert kinds(found)[:2] == [WarningKind.SAYS_ONE_THING, WarningKind.EXTREME_RATE]
    assert found.warnings[0].text.startswith("llm calls all 120 answers incorrect")


def test_392_of_400_is_caught_whatever_came_before() -> None:
    rule = judged("contains", [C if number % 4 == 0 else W for number in range(400)], "contains")
    first = judged("monday", [C] * 5 + [W] * 395)
    second = judged("tuesday", [W] * 8 + [C] * 392)
    found = audit(second, [first, rule])
    assert WarningKind.EXTREME_RATE in kinds(found)
    assert WarningKind.FLIPPED in kinds(found)
    assert WarningKind.FEW_OF_A_CLASS in kinds(found)
    few = next(each.text for each in found.warnings if each.kind is WarningKind.FEW_OF_A_CLASS)
    assert "only 8 wrong among 400" in few and "0.20" in few
    assert WarningKind.EXTREME_RATE in kinds(audit(first, [second, rule]))


def test_a_judge_that_throws_a_coin_is_caught() -> None:
    coin = random.Random(3)
    found = audit(
        judged("llm", [coin.choice((C, W)) for _ in range(400)]),
        [judged("exact", [C if number % 3 else W for number in range(400)], "exact")],
    )
    assert kinds(found) == [WarningKind.CHANCE_AGREEMENT]


def test_weak_agreement_that_is_sure_is_no_chance() -> None:
    """A kappa of 0.15 over thousands of answers: a loose relation, and yet one."""
    rule = [C if number % 2 else W for number in range(4000)]
    mine = [each if number % 40 < 23 else (W if each is C else C) for number, each in enumerate(rule)]
    found = audit(judged("llm", mine), [judged("exact", rule, "exact")])
    assert found.agreements[0].kappa.value == pytest.approx(0.15, abs=0.03)
    assert found.warnings == ()


def test_two_judges_that_differ_a_little_are_one_standard() -> None:
    """Twenty of 400 answers flipped, all one way: surely not chance, and only five points."""
    one = [C if number % 2 else W for number in range(400)]
    other = [C if number % 20 == 0 else each for number, each in enumerate(one)]
    found = audit(judged("llm", other), [judged("llm-2", one)])
    assert found.agreements[0].mcnemar_p is not None and found.agreements[0].mcnemar_p < 1e-5
    assert found.warnings == ()


def test_swapped_verdict_words_are_caught() -> None:
    found = audit(judged("llm", flipped(TRUTH, 1)), [judged("exact", EXACT, "exact")])
    assert kinds(found) == [WarningKind.INVERTED]


def test_a_few_answers_are_no_reason_to_doubt_a_judge() -> None:
    """Contrary to a rule on all of ten answers, or by chance: with as few as that it can happen to any judge."""
    for mine in (flipped(TRUTH[:10], 1), [C, W] * 5):
        found = audit(judged("llm", mine), [judged("exact", TRUTH[:10], "exact")])
        assert kinds(found) == [WarningKind.FEW_OF_A_CLASS]


def test_probabilities_that_do_not_move_are_caught() -> None:
    verdicts = flipped(TRUTH, 11)
    p = [0.501 if each is C else 0.499 for each in verdicts]
    assert kinds(audit(judged("llm", verdicts, p=p), [])) == [WarningKind.SAYS_ONE_THING]
    sure = [0.9 if each is C else 0.1 for each in verdicts]
    assert kinds(audit(judged("llm", verdicts, p=sure), [])) == []


def test_a_lenient_judge_of_free_text_is_left_alone() -> None:
    """No letter-by-letter match, but the words are there: nothing is wrong with a judge that sees it."""
    found = audit(
        judged("llm", [C] * 115 + [W] * 15),
        [judged("exact", [W] * 130, "exact"), judged("contains", [C] * 110 + [W] * 20, "contains")],
    )
    assert found.warnings == ()


def test_the_nearest_rule_and_the_best_one_count() -> None:
    """97 % correct is far from what ``exact`` says, and ``exact`` says it by chance; ``contains`` agrees in both."""
    mine = [W if number % 30 == 0 else C for number in range(180)]
    contains = [W if number % 30 == 0 or number % 45 == 1 else C for number in range(180)]
    exact = [C if number % 9 == 0 else W for number in range(180)]
    found = audit(judged("llm", mine), [judged("exact", exact, "exact"), judged("contains", contains, "contains")])
    by_rule = {each.other: each.kappa.value or 0 for each in found.agreements}
    assert by_rule["exact"] < 0.1 < 0.6 < by_rule["contains"]
    assert kinds(found) == [WarningKind.FEW_OF_A_CLASS]


def test_a_few_without_label_are_no_reason_for_a_warning() -> None:
    some = [U] * 5 + [N] * 20 + TRUTH[:75]
    assert audit(judged("llm", some), []).warnings == ()
    assert kinds(audit(judged("llm", [U, *some[:99]]), [])) == [WarningKind.UNPARSED]
    assert kinds(audit(judged("llm", [N, *some[:99]]), [])) == [WarningKind.NOT_ATTEMPTED]


def test_rules_are_not_warned_of_against_each_other() -> None:
    exact, contains = judged("exact", [W] * 40 + [C] * 10, "exact"), judged("contains", [C] * 40 + [W] * 10, "contains")
    assert audit(exact, [contains]).warnings == ()


def test_not_attempted_and_unparsed_are_no_labels() -> None:
    mine = judged("llm", [C, W, N, U, C, U])
    theirs = judged("exact", [C, C, W, C, N, U], "exact")
    beside = agreement(mine, theirs)
    assert (beside.both_correct, beside.only_this, beside.only_other, beside.both_incorrect) == (1, 0, 1, 0)
    assert beside.left_out == 4
    found = audit(mine, [theirs])
    assert (found.counts.correct, found.counts.incorrect, found.counts.not_attempted, found.counts.unparsed) == (
        2,
        1,
        1,
        2,
    )
    assert found.yes_rate.of == 3
    assert {WarningKind.UNPARSED, WarningKind.FEW_OF_A_CLASS} <= set(kinds(found))
    assert [each.id for each in found.disagreements] == ["q1"]


def test_only_answers_that_both_judged_are_compared() -> None:
    mine = JudgeVerdicts("llm", "model", [Judgment("q0", "greedy", C), Judgment("q0", "sample-0", W)])
    theirs = JudgeVerdicts("exact", "exact", [Judgment("q0", "sample-0", W), Judgment("q9", "greedy", W)])
    beside = agreement(mine, theirs)
    assert (beside.labelled, beside.both_incorrect, beside.left_out) == (1, 1, 0)


def test_nothing_judged_and_nothing_labelled_are_said() -> None:
    assert kinds(audit(judged("llm", []), [])) == [WarningKind.NOTHING]
    found = audit(judged("llm", [U] * 30), [judged("exact", [C] * 30, "exact")])
    assert kinds(found) == [WarningKind.ONE_CLASS, WarningKind.UNPARSED]
    assert found.agreements[0].kappa.reason == "no answer has a label of both"
    assert found.agreements[0].rates is None


def test_the_most_telling_disagreement_comes_first() -> None:
    mine = judged("llm", [C, W, C, W, C], p=[0.6, 0.1, 0.99, 0.2, 0.8])
    exact = judged("exact", [W, W, W, C, C], "exact")
    squad = judged("squad", [W, C, W, C, C], "squad")
    rows = audit(mine, [squad, exact]).disagreements
    # An exact match that is called incorrect; then those that all contradict, the surest first; then the half ones.
    assert [each.id for each in rows] == ["q3", "q2", "q0", "q1"]
    assert rows[0].others == (("squad", C), ("exact", C))


@given(
    st.lists(st.sampled_from(list(Verdict)), max_size=40),
    st.lists(st.sampled_from(list(Verdict)), max_size=40),
    st.sampled_from(["model", "exact"]),
)
def test_any_verdicts_can_be_audited_and_written(mine: list[Verdict], theirs: list[Verdict], kind: str) -> None:
    one, other = judged("one", mine), judged("other", theirs, kind)
    found = audit(one, [other])
    assert found.counts.total == len(mine)
    beside, back = agreement(one, other), agreement(other, one)
    assert (beside.only_this, beside.only_other) == (back.only_other, back.only_this)
    assert beside.kappa.value == pytest.approx(back.kappa.value)
    assert len(found.disagreements) == beside.only_this + beside.only_other
    values = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert values["counts"]["unparsed"] == mine.count(U)
    assert values["yes_rate"]["of"] == found.counts.labelled


def test_a_lenient_judge_is_caught_where_all_rules_agree() -> None:
    """71 % against 29.7 % of all five rules: neither extreme nor by chance, and wrong."""
    truth = [C if number % 1000 < 297 else W for number in range(1000)]
    mine = [C if number % 1000 < 710 else W for number in range(1000)]
    rules = [judged(kind, truth, kind) for kind in ("exact", "contains", "squad", "rouge", "math")]
    found = audit(judged("llm", mine), rules)
    assert kinds(found) == [WarningKind.APART]
    (warned,) = found.warnings
    assert (
        "71.0%" in warned.text and "29.7%" in warned.text and "413 are correct by it alone, 0 by exact" in warned.text
    )
    strict = [C if number % 1000 < 80 else W for number in range(1000)]
    assert WarningKind.APART in kinds(audit(judged("llm", strict), rules)), "and one that is too strict"


def test_of_rules_that_part_a_judge_beyond_them_is_not_told() -> None:
    """Long answers: no letters in common, some words; and a judge that sees more."""
    rates = {"exact": 0, "rouge": 40, "contains": 160}
    rules = [judged(kind, [C] * right + [W] * (400 - right), kind) for kind, right in rates.items()]
    assert audit(judged("llm", [C] * 248 + [W] * 152), rules).warnings == ()


def test_of_two_standards_the_one_that_differs_from_the_rest_is_named() -> None:
    truth = [C if number % 2 else W for number in range(400)]
    lenient = judged("a-lenient", [C if number % 4 == 0 else each for number, each in enumerate(truth)])
    good, third = judged("good", flipped(truth, 40)), judged("third", flipped(truth, 50))
    rule = judged("contains", truth, "contains")
    texts = []
    for mine, others in ((good, [lenient, third, rule]), (lenient, [good, third, rule])):
        flips = [each.text for each in audit(mine, others).warnings if each.kind is WarningKind.FLIPPED]
        warned = [each for each in flips if "good" in each]
        texts += warned
        assert len(warned) == 1 and "a-lenient is the one that differs from the rest" in warned[0]
    assert texts[0] == texts[1], "told alike from both sides, so that it can be told once"
    alone = audit(good, [lenient])
    assert "no third judge" in alone.warnings[0].text
