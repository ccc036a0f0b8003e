"""Which measures are computed, and where what they need is taken from."""

from __future__ import annotations

from typing import Any

import pytest

from gpuherd.errors import UsageError
from gpuherd.qa.measures.evidence import EvidenceNeed
from gpuherd.qa.measures.registry import measure_named, measures
from gpuherd.qa.scoring.options import (
    ANSWERS_ALONE,
    MeasureSelection,
    ScoreOptions,
    choose,
    costly_needs,
    requested_needs,
    selected_measures,
    sources,
)
from gpuherd.qa.statistics.files import StatisticMeta, StatisticSpec
from gpuherd.qa.statistics.registry import Has

BOTH = Has(greedy=True, samples=10)
RELEVANCE = StatisticSpec("relevance", "m", "1", {"answers": "greedy", "long_texts": "refuse"})
SAMPLES = StatisticSpec("relevance", "m", "1", {"answers": "samples", "long_texts": "refuse"})
SIMILARITY = StatisticSpec("similarity", "m", "1", {"with_question": True, "long_texts": "refuse"})
ENTAILMENT = StatisticSpec("entailment", "nli", "2", {"by": "nli"})


def there(spec: StatisticSpec, made: str = "2026") -> StatisticMeta:
    return StatisticMeta(spec, "0", "0", 4, {}, (), {}, made)


def chosen(has: Has, planned: dict[str, StatisticSpec] | None = None, **options: Any) -> MeasureSelection:
    asked = ScoreOptions(span="both", **options)
    ones, must = selected_measures(asked.measures, measures())
    return choose(ones, sources(asked, has, planned or {}), must=must)


def names(choice: MeasureSelection) -> set[str]:
    return {each.name for each in choice.measures}


def test_names_families_and_all() -> None:
    known = measures()
    assert selected_measures(["nll"], known) == ((measure_named("nll"),), frozenset({"nll"}))
    assert selected_measures(["rw-g-nll", "token-sar"], known) == (
        (measure_named("token-sar"),),
        frozenset({"token-sar"}),
    )
    family, must = selected_measures(["weighted-nll"], known)
    assert not must and family == tuple(each for each in known if each.name.startswith("weighted-nll:"))
    # An alias names a family too; a name that is exact means itself alone.
    assert {each.name for each in selected_measures(["se"], known)[0]} == {
        each.name for each in selected_measures(["semantic-entropy"], known)[0]
    }
    assert [each.name for each in selected_measures(["p-true"], known)[0]] == ["p-true"]
    assert selected_measures([], known) == (known, frozenset()) == selected_measures(["all"], known)
    alone, must = selected_measures(["log-probs"], known)
    assert (
        not must
        and all(each.needs <= ANSWERS_ALONE for each in alone)
        and "weighted-nll:first-k" in {each.name for each in alone}
    )
    with pytest.raises(UsageError, match="did you mean"):
        selected_measures(["nnll"], known)


def test_without_models_all_that_the_answers_allow() -> None:
    choice = chosen(BOTH)
    assert choice.statistics == ()
    assert {"nll", "semantic-entropy:rao", "u-deg", "lexical-similarity"} <= names(choice)
    left_out = dict(choice.left_out)
    assert "--relevance-model" in left_out["token-sar"] and "--judge" in left_out["p-ik"]
    assert names(choice) | set(left_out) == {each.name for each in measures()}


def test_without_samples_or_greedy_answers_their_measures_are_left_out() -> None:
    greedy = chosen(Has(greedy=True, samples=0))
    assert "nll" in names(greedy) and not any("entropy" in name for name in names(greedy))
    assert "generate with --samples" in dict(greedy.left_out)["u-deg"]
    drawn = chosen(Has(greedy=False, samples=5))
    assert "predictive-entropy" in names(drawn) and "no greedy answers" in dict(drawn.left_out)["nll"]
    with pytest.raises(UsageError, match="no measure can be computed"):
        chosen(Has(greedy=False, samples=0))


def test_a_measure_that_is_named_must_be_possible() -> None:
    with pytest.raises(UsageError, match=r"sar can't be computed: .*--relevance-model"):
        chosen(BOTH, measures=("nll", "sar"))
    assert names(chosen(BOTH, measures=("nll", "all"))) >= {"nll"}
    # Also among others that need not be.
    with pytest.raises(UsageError, match="sar can't be computed"):
        chosen(BOTH, measures=("log-probs", "sar"))
    family = chosen(BOTH, measures=("weighted-nll",))
    assert "weighted-nll:linear-increasing" in names(family) and "weighted-nll:sar-relevance" in dict(family.left_out)


def test_what_is_there_is_used_and_what_is_named_goes_before_it() -> None:
    old = StatisticSpec("relevance", "old", "9", {"answers": "greedy", "long_texts": "refuse"})
    has = Has(True, 10, (there(RELEVANCE, "2025"), there(old, "2026"), there(SAMPLES), there(SIMILARITY)))
    choice = chosen(has)
    assert {"token-sar", "sar", "sentence-sar"} <= names(choice)
    assert choice.sources[EvidenceNeed.RELEVANCE].spec == old, "the latest"
    planned = chosen(has, {"relevance": RELEVANCE})
    assert planned.sources[EvidenceNeed.RELEVANCE].spec == RELEVANCE
    # A similarity of the answers alone is another one.
    assert "sentence-sar" not in names(chosen(has, similarity_without_question=True))


def test_what_was_measured_by_other_conventions_is_not_used_in_silence() -> None:
    cut = StatisticSpec("relevance", "m", "1", {"answers": "greedy", "long_texts": "cut"})
    has = Has(True, 10, (there(cut),))
    assert "token-sar" not in names(chosen(has)) and "token-sar" in names(chosen(has, long_texts="cut"))
    forms = [
        StatisticSpec("p-true", "m", "1", {"form": form, "ideas": ideas, "examples": examples})
        for form, ideas, examples in (("letter", True, [[0, True]]), ("letter", True, []), ("true", False, []))
    ]
    has = Has(True, 10, tuple(map(there, reversed(forms))))
    asked: list[dict[str, Any]] = [
        {"p_true": "letter", "p_true_ideas": True, "p_true_examples": 1, "judge": "x"},
        {"p_true": "letter", "p_true_ideas": True},
        {},
    ]
    for spec, options in zip(forms, asked, strict=True):
        assert chosen(has, **options).sources[EvidenceNeed.P_TRUE].spec == spec
    assert "p-true" not in names(chosen(has, p_true="letter"))


def test_equivalence_and_affinity_by_what_was_asked_for() -> None:
    plain = chosen(BOTH)
    assert plain.sources[EvidenceNeed.EQUIVALENCE].said.startswith("exact")
    assert plain.sources[EvidenceNeed.AFFINITY].said.startswith("jaccard")
    nli = chosen(BOTH, {"entailment": ENTAILMENT}, equivalence="nli", equivalence_model="nli")
    assert nli.sources[EvidenceNeed.EQUIVALENCE].said == f"{ENTAILMENT.name}, strict"
    assert nli.sources[EvidenceNeed.AFFINITY].spec == ENTAILMENT
    assert nli.statistics == (ENTAILMENT,), "both are made of one"
    alike = chosen(
        BOTH, {"similarity": SIMILARITY}, equivalence="embedding", equivalence_threshold=0.8, affinity="similarity"
    )
    assert alike.sources[EvidenceNeed.EQUIVALENCE].said == f"{SIMILARITY.name}, at least 0.8"
    assert alike.sources[EvidenceNeed.AFFINITY].spec == SIMILARITY
    none = chosen(BOTH, equivalence="embedding", affinity="nli")
    assert "--similarity-model" in dict(none.left_out)["semantic-sets"]
    assert "--equivalence nli" in dict(none.left_out)["u-deg"]


def test_the_generator_is_not_begun_unless_somebody_asks() -> None:
    known = measures()
    assert not requested_needs(ScoreOptions(), known) & costly_needs()
    assert requested_needs(ScoreOptions(measures=("all",)), known) >= costly_needs()
    assert requested_needs(ScoreOptions(measures=("p-true",)), [measure_named("p-true")]) == {EvidenceNeed.P_TRUE}
    hidden = StatisticSpec("hidden", "m", "1")
    assert "p-ik" in names(chosen(Has(True, 0, (there(hidden),)), judge="exact"))
    assert "p-ik" not in names(chosen(Has(True, 0, (there(hidden),))))


def test_a_statistic_is_named_by_what_its_values_depend_on() -> None:
    assert RELEVANCE.name == StatisticSpec("relevance", "another name of it", "1", RELEVANCE.settings).name
    assert len({RELEVANCE.name, SAMPLES.name, StatisticSpec("relevance", "m", "2", RELEVANCE.settings).name}) == 3
    assert RELEVANCE.name.startswith("relevance-")


@pytest.mark.parametrize(
    "options",
    [
        {"relevance_kind": "bi-encoder"},
        {"similarity_kind": "bi-encoder"},
        {"equivalence_model": "m"},
        {"equivalence": "nli"},
        {"p_true_examples": 2},
        {"equivalence_rule": "not-contradicting"},
        {"equivalence_threshold": 0.5},
        {"condition_on_question": True},
        {"equivalence": "judge", "condition_on_question": True},
        {"equivalence": "nli", "equivalence_model": "m", "equivalence_threshold": 0.5},
        {"name": "a/b"},
        {"name": ""},
        {"name": "a b"},
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ScoreOptions(**options)
