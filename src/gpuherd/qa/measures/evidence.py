"""The evidence that measures are computed from, for one question: numbers and texts. Frozen data, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from gpuherd.lm.backend import Generation
from gpuherd.qa.record import Answered
from gpuherd.qa.span import Span, part_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Undefined(Exception):
    """A measure has no value for this question; the message is the reason, the same for all such questions."""


class EvidenceNeed(StrEnum):
    """A kind of evidence that a measure can need; ``scoring`` knows where each is taken from."""

    GREEDY = "greedy"  # the greedy answer's tokens and log-probs
    SAMPLES = "samples"  # sampled answers with theirs; what compares them is not defined for one alone
    RELEVANCE = "relevance"  # of each token of the greedy answer
    SAMPLE_RELEVANCE = "sample-relevance"  # of each token of each sample
    SIMILARITY = "similarity"  # of each pair of samples, in [0, 1]
    EQUIVALENCE = "equivalence"  # which samples mean the same
    AFFINITY = "affinity"  # of each ordered pair of samples: the graph of U_Deg and its kin
    P_TRUE = "p-true"  # the model's own probability that its answer is true
    P_IK = "p-ik"  # a probe of the hidden state behind the prompt, trained on other questions' labels


@dataclass(frozen=True, slots=True)
class ScoredText:
    """An answer as measures see it: by the rule of the scoring with or without the token that ended it.

    Attributes:
        log_probs: of its tokens, all finite; may be empty.
        text: stripped of white space at both ends.
        relevance: of each of these tokens, R(z_i) in [0, 1]; that of the end token is 0, since it takes no text away.
            None where not measured.
    """

    log_probs: tuple[float, ...]
    text: str
    relevance: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of one question. What was not measured is None (or no samples).

    Attributes:
        greedy: the greedy answer.
        samples: K sampled answers.
        similarity: g(s_k, s_j), float64, (K, K), symmetric, in [0, 1], ones on the diagonal.
        clusters: for each sample the number of its cluster of equal meaning, from 0, in order of first appearance.
        affinity: a(s_k, s_j), float64, (K, K), in [0, 1], not always symmetric (an NLI model's entailment).
        p_true: log p("True") as ``scoring`` documents it.
        p_ik: probability that the model knows the answer, in [0, 1].
        others: what else statistics measured, by the need that they give.
    """

    id: str
    greedy: ScoredText | None = None
    samples: tuple[ScoredText, ...] = ()
    similarity: NDArray[np.float64] | None = None
    clusters: tuple[int, ...] | None = None
    affinity: NDArray[np.float64] | None = None
    p_true: float | None = None
    p_ik: float | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    def with_values(self, values: Mapping[str, Any]) -> Evidence:
        """The same with what statistics give, by need: those that are fields, and others."""
        named = {_FIELDS[EvidenceNeed(need)]: value for need, value in values.items() if need in _FIELDS}
        others = {need: value for need, value in values.items() if need not in _FIELDS}
        return replace(self, **named, others={**self.others, **others})


# The needs whose values are fields; the relevance is the answers' own.
_FIELDS = {
    EvidenceNeed.SIMILARITY: "similarity",
    EvidenceNeed.EQUIVALENCE: "clusters",
    EvidenceNeed.AFFINITY: "affinity",
    EvidenceNeed.P_TRUE: "p_true",
    EvidenceNeed.P_IK: "p_ik",
}


def answers_of(
    answered: Answered,
    with_end: bool,
    span: Span,
    relevance: Sequence[Sequence[float]] | None = None,
    sample_relevance: Sequence[Sequence[float]] | None = None,
) -> Evidence:
    """The answers to a question, as measures see them.

    An answer whose log-probs are not all finite is none; where that is a sample, there are no samples: what is computed
    of the others would be of another distribution.
    """
    greedy = None
    if answered.greedy is not None:
        greedy = answer_of(answered.greedy, with_end, None if relevance is None else relevance[0], span)
    samples = [
        answer_of(each, with_end, None if sample_relevance is None else sample_relevance[number], span)
        for number, each in enumerate(answered.samples)
    ]
    finite = tuple(each for each in samples if each is not None)
    return Evidence(answered.question.id, greedy, finite if len(finite) == len(samples) else ())


def answer_of(
    generation: Generation, with_end: bool, relevance: Sequence[float] | None = None, span: Span = "answer"
) -> ScoredText | None:
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
    return ScoredText(finite, part.text, weights)
