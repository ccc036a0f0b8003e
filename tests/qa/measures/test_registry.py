"""Columns of scores: what each measure needs, what it says where that isn't there; nothing passes for certain."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.qa.measures.made import evidence

from gpuherd.errors import UsageError
from gpuherd.qa.measures import given
from gpuherd.qa.measures.evidence import Evidence, EvidenceNeed, ScoredText
from gpuherd.qa.measures.registry import NOT_FINITE, Measure, compute, measures, value_of

EVERY = [each.name for each in measures()]


def without(question: Evidence, need: EvidenceNeed) -> Evidence:
    """The question as if that had not been measured."""
    return dataclasses.replace(question, **_ABSENT[need](question))


def _no_relevance(answer: ScoredText | None) -> ScoredText | None:
    return None if answer is None else dataclasses.replace(answer, relevance=None)


_ABSENT: dict[EvidenceNeed, Any] = {
    EvidenceNeed.GREEDY: lambda question: {"greedy": None},
    EvidenceNeed.SAMPLES: lambda question: {"samples": (), "similarity": None, "clusters": None, "affinity": None},
    EvidenceNeed.RELEVANCE: lambda question: {"greedy": _no_relevance(question.greedy)},
    EvidenceNeed.SAMPLE_RELEVANCE: lambda question: {"samples": tuple(map(_no_relevance, question.samples))},
    EvidenceNeed.SIMILARITY: lambda question: {"similarity": None},
    EvidenceNeed.EQUIVALENCE: lambda question: {"clusters": None},
    EvidenceNeed.AFFINITY: lambda question: {"affinity": None},
    EvidenceNeed.P_TRUE: lambda question: {"p_true": None},
    EvidenceNeed.P_IK: lambda question: {"p_ik": None},
}


@pytest.mark.parametrize("each", measures(), ids=lambda each: each.name)
def test_a_measure_looks_at_what_it_names_and_at_nothing_else(each: Measure) -> None:
    question = evidence(7)
    only = question
    for need in set(EvidenceNeed) - each.needs:
        only = without(only, need)
    scores = compute([each.name], [question, only])
    first, second = scores.columns[each.name]
    assert first is not None and first == second
    for needed in map(EvidenceNeed, each.needs):
        lacking = compute([each.name], [without(question, needed)])
        assert lacking.columns[each.name] == (None,), f"it says that it needs {needed}"


@pytest.mark.parametrize("each", measures(), ids=lambda each: each.name)
def test_a_measure_says_what_it_is_and_where_it_is_from(each: Measure) -> None:
    assert each.summary and not each.summary.endswith(".")
    assert each.source


def test_empty_answers_are_undefined_never_certain() -> None:
    empty = ScoredText((), "", ())
    full = evidence(3, samples=3)
    question = dataclasses.replace(full, greedy=empty, samples=(empty, *full.samples[1:]))
    scores = compute(EVERY, [question])
    defined = {name for name in EVERY if scores.columns[name] != (None,)}
    assert defined == {
        *("discrete-semantic-entropy", "semantic-sets", "lexical-similarity", "u-deg", "u-eigv", "eccentricity"),
        *("p-true", "p-true:nll", "p-ik"),
    }
    assert scores.undefined["nll"] == {given.NO_TOKENS: 1}
    assert scores.undefined["sar"] == {given.SAMPLE_WITHOUT_TOKENS: 1}
    assert scores.undefined["p-ik"] == {}


def test_an_answer_of_its_end_token_alone_is_as_likely_as_that() -> None:
    question = Evidence("q", greedy=ScoredText((-0.7,), "", (0.0,)))
    assert compute(["nll", "token-sar"], [question]).columns == {"nll": (0.7,), "token-sar": (0.7,)}


def test_one_sample_has_nothing_to_be_compared_with() -> None:
    alone = evidence(5, samples=1)
    scores = compute(EVERY, [alone])
    pairwise = {name for name in EVERY if given.ONE_SAMPLE in scores.undefined[name]}
    assert pairwise == {
        *("sentence-sar", "sar", "lexical-similarity", "u-deg", "u-eigv", "eccentricity", "semantic-sets"),
        *("semantic-entropy:rao", "semantic-entropy:mc", "semantic-entropy:mc-unique", "semantic-entropy:kuhn"),
        "discrete-semantic-entropy",
    }
    assert scores.columns["predictive-entropy"] == pytest.approx((-math.fsum(alone.samples[0].log_probs),))


def test_samples_without_a_word_are_no_more_unlike_than_alike() -> None:
    """ROUGE knows ASCII letters and digits alone: of answers in another script it says nothing, not 0."""
    answers = {"same": ("北京", "北京"), "other": ("北京", "上海"), "empty": ("", ""), "mixed": ("北京", "Beijing")}
    questions = [
        Evidence(name, samples=tuple(ScoredText((-1.0,), text) for text in texts)) for name, texts in answers.items()
    ]
    scores = compute(["lexical-similarity"], questions)
    assert scores.columns["lexical-similarity"] == (None, None, None, 0.0)
    assert scores.undefined["lexical-similarity"] == {given.NO_WORDS: 3}


def test_token_sar_is_of_the_greedy_answer_or_of_the_samples() -> None:
    """Official SAR averages over samples, LM-Polygraph and RW-G-NLL look at the greedy answer."""
    samples = (ScoredText((-1.0, -3.0), "a b", (1.0, 0.0)), ScoredText((-5.0,), "c", (0.5,)))
    question = Evidence("q", greedy=ScoredText((-2.0,), "a", (0.3,)), samples=samples)
    assert compute(["token-sar", "token-sar:samples"], [question]).columns == {
        "token-sar": (2.0,),
        "token-sar:samples": (3.0,),
    }
    alone = dataclasses.replace(question, samples=samples[:1])
    assert compute(["token-sar:samples"], [alone]).columns["token-sar:samples"] == (1.0,)


def test_relevances_that_are_all_zero_leave_the_tokens_alike() -> None:
    answers = tuple(ScoredText((-1.0, -3.0), text, (0.0, 0.0)) for text in "ab")
    question = Evidence("q", greedy=answers[0], samples=answers, similarity=np.eye(2))
    columns = compute(["token-sar", "sar", "weighted-nll:sar-relevance"], [question]).columns
    assert [column[0] for column in columns.values()] == pytest.approx([2.0, 2.0, 2.0])


def test_samples_that_have_nothing_in_common_speak_for_themselves() -> None:
    question = dataclasses.replace(evidence(11, samples=4), similarity=np.eye(4), affinity=np.eye(4))
    columns = compute(["sentence-sar", "predictive-entropy", "u-eigv", "u-deg"], [question]).columns
    assert columns["sentence-sar"] == pytest.approx(columns["predictive-entropy"])
    assert columns["u-eigv"] == pytest.approx((4.0,))
    assert columns["u-deg"] == (0.75,)


def test_a_sample_that_is_bound_to_none_is_a_meaning_of_its_own() -> None:
    affinity = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    question = dataclasses.replace(evidence(12, samples=3), affinity=affinity)
    columns = compute(["u-eigv", "eccentricity"], [question]).columns
    assert columns["u-eigv"] == pytest.approx((2.0,))
    assert columns["eccentricity"] == pytest.approx((1.0,))


def test_an_eigenvalue_on_the_bound_is_beyond_it_whatever_its_rounding() -> None:
    """Two samples with affinity a have the eigenvalues 0 and 2a/(1 + a), here 0.9."""
    affinity = np.array([[1.0, 9 / 11], [9 / 11, 1.0]])
    question = dataclasses.replace(evidence(13, samples=2), affinity=affinity)
    assert compute(["eccentricity"], [question]).columns["eccentricity"] == pytest.approx((0.0,), abs=1e-12)


def test_duplicates_count_again_but_where_it_is_said() -> None:
    """LM-Polygraph's issue 223: the probability of a cluster passes 1 where the same answer was drawn twice."""
    same = ScoredText((math.log(0.9),), "Paris")
    question = Evidence("q", samples=(same, same), clusters=(0, 0))
    columns = compute(["se:mc", "se:mc-unique", "se:rao"], [question]).columns
    assert columns["semantic-entropy:mc"] == pytest.approx((-math.log(1.8),))
    assert columns["semantic-entropy:mc-unique"] == pytest.approx((-math.log(0.9),))
    assert columns["semantic-entropy:rao"] == (0.0,)
    # The same text by other tokens, less likely: the first sample stands for it.
    other = dataclasses.replace(question, samples=(same, ScoredText((-2.0, -3.0), "Paris")))
    assert compute(["se:mc-unique"], [other]).columns["semantic-entropy:mc-unique"] == pytest.approx((-math.log(0.9),))


def test_a_long_sample_beside_a_short_one_neither_underflows_nor_overflows() -> None:
    samples = (ScoredText((-1.0,), "Paris"), ScoredText((-1.0,) * 2000, "a long story"))
    question = Evidence("q", samples=samples, similarity=np.array([[1.0, 0.5], [0.5, 1.0]]))
    # The short one alone counts, for itself once and for the long one 0.5 / 0.001 times.
    expected = (1.0 + (1.0 - math.log(500))) / 2
    assert compute(["sentence-sar"], [question]).columns["sentence-sar"] == pytest.approx((expected,))


def test_what_no_float_can_hold_is_undefined() -> None:
    question = Evidence("q", greedy=ScoredText((-800.0,), "x"))
    scores = compute(["perplexity", "nll"], [question])
    assert scores.columns == {"perplexity": (None,), "nll": (800.0,)}
    assert scores.undefined["perplexity"] == {NOT_FINITE: 1}
    endless = Measure("endless", lambda evidence: math.inf, frozenset(), "here", "always infinite")
    assert str(value_of(endless, question)) == NOT_FINITE


def test_certainty_is_zero_without_a_sign() -> None:
    question = Evidence("q", greedy=ScoredText((0.0, 0.0), "x"))
    columns = compute(["nll", "ln-nll", "mean-token-probability"], [question]).columns
    for name, (value,) in columns.items():
        assert value == 0 and math.copysign(1, value) == 1, name


def test_a_probability_that_rounding_took_above_one_is_as_near_to_one_as_float32_can_tell() -> None:
    columns = compute(["p-true", "p-true:nll"], [Evidence("q", p_true=value) for value in (1e-7, 0.0, -1e-12)]).columns
    assert list(columns["p-true:nll"]) == pytest.approx([2**-25] * 3, rel=1e-7)
    assert list(columns["p-true"]) == pytest.approx([-25 * math.log(2)] * 3, rel=1e-7)


@hypothesis.given(st.lists(st.floats(-900, 0), min_size=2, max_size=20))
def test_p_true_and_its_nll_keep_one_order(logs: list[float]) -> None:
    known = [-40.0, -60.0, -100.0, -800.0, -1e-6, *logs]
    columns = compute(["p-true", "p-true:nll"], [Evidence(str(at), p_true=log) for at, log in enumerate(known)]).columns
    odds, nll = columns["p-true"], columns["p-true:nll"]
    for one in range(len(known)):
        for other in range(len(known)):
            first, second, less, more = odds[one], odds[other], nll[one], nll[other]
            assert first is not None and second is not None and less is not None and more is not None
            # Strictly, but for logs that differ in the last digits of a float64.
            assert first < second or not less < more * (1 - 1e-12) - 1e-12


def partitions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum, the largest part first."""
    if total == 0:
        yield ()
    for part in range(min(total, most), 0, -1):
        for rest in partitions(total - part, part):
            yield (part, *rest)


def entropy_of(sizes: Sequence[int]) -> float:
    clusters = tuple(number for number, size in enumerate(sizes) for _ in range(size))
    answers = tuple(ScoredText((-1.0,), "x") for _ in clusters)
    (value,) = compute(["discrete-semantic-entropy"], [Evidence("q", samples=answers, clusters=clusters)]).columns[
        "discrete-semantic-entropy"
    ]
    assert value is not None
    return value


@pytest.mark.parametrize("count", [2, 8, 10, 16, 20])
def test_discrete_entropies_that_are_equal_are_equal_to_the_bit(count: int) -> None:
    found: dict[int, set[float]] = {}
    for sizes in partitions(count, count):
        value = entropy_of(sizes)
        found.setdefault(math.prod(size**size for size in sizes), set()).add(value)
        shares = [size / count for size in sizes]
        assert value == pytest.approx(-math.fsum(share * math.log(share) for share in shares), rel=1e-14, abs=1e-15)
    assert all(len(values) == 1 for values in found.values())
    assert len({next(iter(values)) for values in found.values()}) == len(found), "and others are not"


def test_discrete_entropy_depends_on_shares_alone_and_takes_many_samples() -> None:
    assert entropy_of((3, 3, 3)) == entropy_of((1, 1, 1)) and entropy_of((4, 2)) == entropy_of((2, 1))
    assert entropy_of((1,) * 400) == pytest.approx(math.log(400), rel=1e-14)
    assert math.copysign(1, entropy_of((5,))) == 1 and entropy_of((5,)) == 0


def test_columns_are_in_the_order_asked_each_once_by_its_exact_name() -> None:
    questions = [evidence(seed) for seed in range(3)]
    scores = compute(["se:rao", "g-nll", "msp", "rw-g-nll"], questions)
    assert list(scores.columns) == ["semantic-entropy:rao", "nll", "token-sar"]
    assert scores.ids == ("question-0", "question-1", "question-2")
    assert scores.defined("nll") == 3
    with pytest.raises(UsageError, match="semantic-entropy:rao"):
        compute(["semantic-entropy:ra"], questions)


def test_no_questions_have_empty_columns() -> None:
    assert compute(["nll"], []).columns == {"nll": ()}
    assert compute([], [evidence(0)]).ids == ("question-0",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"similarity": np.eye(3)}, r"similarity of shape \(3, 3\) for 2 samples"),
        ({"affinity": np.full((2, 2), 1.01)}, r"affinity beyond \[0, 1\]"),
        ({"affinity": np.full((2, 2), np.nan)}, r"affinity beyond \[0, 1\]"),
        ({"clusters": (0,)}, "1 cluster numbers for 2 samples"),
        ({"p_ik": 1.5}, "no probability"),
        ({"p_true": 0.1}, "no log of a probability"),
        ({"greedy": ScoredText((-1.0, -2.0), "x", (0.5,))}, "the greedy answer has 2 tokens and the relevance of 1"),
        ({"greedy": ScoredText((-1.0,), "x", (1.5,))}, "relevance beyond"),
        ({"greedy": ScoredText((math.nan,), "x")}, "not finite"),
        ({"greedy": ScoredText((-1.0, 0.1), "x")}, "the greedy answer has a token of a probability above 1"),
        ({"similarity": np.array([[1.0, 0.5], [0.4, 1.0]])}, "depends on their order"),
    ],
)
def test_measurements_that_do_not_fit_their_answers_are_refused(change: dict[str, Any], message: str) -> None:
    question = dataclasses.replace(evidence(1, samples=2), **change)
    with pytest.raises(given.BadEvidence, match=message):
        compute(["nll"], [question])


NEW_MEASURE = """
import sys
from gpuherd.qa.measures.evidence import Evidence, EvidenceNeed, ScoredText, Undefined
from gpuherd.qa.measures.registry import compute, measure, measures

@measure("longest", needs=[EvidenceNeed.GREEDY], source="here", aliases=["long"])
def longest(evidence: Evidence) -> float:
    "Number of tokens."
    if evidence.greedy is None:
        raise Undefined("no answer")
    return float(len(evidence.greedy.log_probs))

questions = [Evidence("a", greedy=ScoredText((-1.0, -2.0), "x")), Evidence("b")]
scores = compute(["long", "nll"], questions)
assert scores.columns == {"longest": (2.0, None), "nll": (3.0, None)}, scores
assert scores.undefined["longest"] == {"no answer": 1}
assert "longest" in [each.name for each in measures()]
try:
    measure("other", needs=[], source="here", aliases=["nll"])(longest)
except ValueError as problem:
    assert "nll" in str(problem)
else:
    raise SystemExit("a name was given twice")
heavy = {"torch", "transformers", "scipy", "pandas", "sklearn"} & set(sys.modules)
assert not heavy, heavy
"""


def test_a_new_measure_is_one_function_and_none_of_them_imports_torch() -> None:
    done = subprocess.run([sys.executable, "-c", NEW_MEASURE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
