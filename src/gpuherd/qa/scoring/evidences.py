"""Makes of an answered question and its statistics what measures look at. Pure; rules of ends, clusters and graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuherd.qa.encoders.entailment import Relation, Rule, clusters, mean_the_same
from gpuherd.qa.judging.math_answers import same_results
from gpuherd.qa.judging.rules import normalised
from gpuherd.qa.measures.evidence import Answer, Evidence
from gpuherd.qa.record import Answered, Generation
from gpuherd.qa.span import Span, part_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rules:
    """By which conventions evidence is made.

    Attributes:
        with_end: the token that ended an answer is one of its tokens.
        equivalence: ``exact``, ``math``, ``relations`` or ``similarity``; None: not wanted.
        rule: when relations make two answers one meaning.
        threshold: from which similarity on two answers are one meaning.
        affinity: ``jaccard``, ``relations`` or ``similarity``; None: not wanted.
        span: which part of a generation counts, text and tokens alike.
    """

    with_end: bool = True
    equivalence: str | None = "exact"
    rule: Rule = Rule.STRICT
    threshold: float = 0.9
    affinity: str | None = "jaccard"
    span: Span = "answer"


@dataclass(frozen=True, slots=True)
class Measured:
    """The rows of one question in each statistic that is used; None where that is not used."""

    relevance: Row | None = None
    sample_relevance: Row | None = None
    similarity: Row | None = None
    equivalence: Row | None = None
    affinity: Row | None = None
    p_true: Row | None = None
    p_ik: float | None = None


def evidence_of(answered: Answered, measured: Measured, rules: Rules) -> Evidence:
    """All that is known of a question.

    An answer whose log-probs are not all finite is none; where that is a sample, there are no samples: what is computed
    of the others would be of another distribution.
    """
    greedy = None
    if answered.greedy is not None:
        greedy = answer_of(answered.greedy, rules.with_end, _relevance(measured.relevance, 0), rules.span)
    samples = [
        answer_of(each, rules.with_end, _relevance(measured.sample_relevance, number), rules.span)
        for number, each in enumerate(answered.samples)
    ]
    whole = tuple(each for each in samples if each is not None)
    if len(whole) < len(samples):
        whole = ()
    texts = [each.text for each in whole]
    return Evidence(
        id=answered.question.id,
        greedy=greedy,
        samples=whole,
        similarity=_matrix(measured.similarity) if texts else None,
        clusters=_clusters(texts, measured.equivalence, rules),
        affinity=_affinity(texts, measured.affinity, rules),
        p_true=None if measured.p_true is None else measured.p_true["log_p"],
        p_ik=measured.p_ik,
    )


def answer_of(
    generation: Generation, with_end: bool, relevance: Sequence[float] | None = None, span: Span = "answer"
) -> Answer | None:
    """The part of a generation that a span names, as measures see it; None where a log-prob of the generation is not
    finite. An answer that a stop string or the length ended has no token that ended it."""
    part = part_of(generation, span)
    log_probs = [generation.log_probs[at] for at in part.tokens]
    ended = with_end and part.has_end and generation.end_id is not None
    if ended:
        log_probs.append(generation.end_log_prob)
    finite = tuple(each for each in log_probs if each is not None)
    if generation.is_nan or len(finite) < len(log_probs):
        return None
    weights = None if relevance is None else (*relevance, *([0.0] if ended else []))
    return Answer(finite, part.text, weights)


def jaccard(first: str, second: str) -> float:
    """Shared words of all words, in lower case, divided at white space (Lin et al. 2024); 1 for equal texts.

    >>> jaccard("in Paris", "Paris it is")
    0.25
    """
    if first == second:
        return 1.0
    one, other = set(first.lower().split()), set(second.lower().split())
    return len(one & other) / max(1, len(one | other))


def relation_matrix(row: Row) -> list[list[Relation]] | None:
    """The relation of each ordered pair of samples; equal texts entail each other. None where one is not known."""
    if row["relations"] is None:
        return None
    places: Sequence[int] = row["texts"]
    table = [
        [Relation(1.0, 0.0, 0.0) if each is None else Relation(*each) for each in line] for line in row["relations"]
    ]
    return [[table[one][other] for other in places] for one in places]


def _relevance(row: Row | None, place: int) -> Sequence[float] | None:
    values = None if row is None else row["relevance"]
    return None if values is None else values[place]


def _clusters(texts: Sequence[str], row: Row | None, rules: Rules) -> tuple[int, ...] | None:
    if not texts or rules.equivalence is None:
        return None
    if rules.equivalence == "exact":
        plain = [normalised(text) for text in texts]
        return clusters(len(texts), lambda one, other: plain[one] == plain[other])
    if rules.equivalence == "math":
        return clusters(len(texts), same_results(texts))
    if row is None:
        return None
    if rules.equivalence == "similarity":
        matrix = row["matrix"]
        if matrix is None:
            return None
        return clusters(
            len(texts), lambda one, other: texts[one] == texts[other] or matrix[one][other] >= rules.threshold
        )
    relations = relation_matrix(row)
    if relations is None:
        return None
    return clusters(
        len(texts),
        lambda one, other: (
            texts[one] == texts[other] or mean_the_same(relations[one][other], relations[other][one], rules.rule)
        ),
    )


def _affinity(texts: Sequence[str], row: Row | None, rules: Rules) -> NDArray[np.float64] | None:
    import numpy as np

    if not texts or rules.affinity is None:
        return None
    if rules.affinity == "jaccard":
        return np.array([[jaccard(one, other) for other in texts] for one in texts])
    if row is None:
        return None
    if rules.affinity == "similarity":
        return _matrix(row)
    relations = relation_matrix(row)
    if relations is None:
        return None
    return np.clip([[each.entailment for each in line] for line in relations], 0.0, 1.0)


def _matrix(row: Row | None) -> NDArray[np.float64] | None:
    """g of each pair, symmetric; a sample is similar to itself, whatever a cross-encoder says of it."""
    import numpy as np

    if row is None or row["matrix"] is None:
        return None
    matrix = np.array(row["matrix"], dtype=np.float64)
    np.fill_diagonal(matrix, 1.0)
    return matrix
