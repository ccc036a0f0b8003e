"""Access to the evidence of a question: a value, or the reason why the measure is undefined.

The reasons are counted by scorings, so each is one sentence, the same for every question.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from gpuherd.errors import GpuherdError
from gpuherd.qa.measures.evidence import Evidence, ScoredText, Undefined

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")

NO_GREEDY = "there is no greedy answer with finite log-probs"
NO_SAMPLES = "there are no samples with finite log-probs"
ONE_SAMPLE = "one sample has no other to be compared with"
NO_TOKENS = "the answer has no tokens"
SAMPLE_WITHOUT_TOKENS = "a sample has no tokens"
NO_WORDS = "no sample has a word that ROUGE compares (ASCII letters and digits)"
NO_RELEVANCE = "the relevance of the tokens is not measured"
NO_SIMILARITY = "the similarity of the samples is not measured"
NO_CLUSTERS = "it is not measured which samples mean the same"
NO_AFFINITY = "the affinity of the samples is not measured"
NO_P_TRUE = "P(True) is not measured"
NO_P_IK = "P(IK) is not measured"

_NEARLY_ONE = math.log1p(-(2.0**-25))  # the log of the largest probability that float32 tells from 1
ROUNDING = 1e-5  # by which float32 figures may differ from what they are: the log of a probability from at most 0, say


class BadEvidence(GpuherdError):
    """The values measured for a question do not fit its answers."""


def greedy(evidence: Evidence) -> ScoredText:
    """The greedy answer, which has tokens. Raises Undefined."""
    if evidence.greedy is None:
        raise Undefined(NO_GREEDY)
    if not evidence.greedy.log_probs:
        raise Undefined(NO_TOKENS)
    return evidence.greedy


def samples(evidence: Evidence) -> tuple[ScoredText, ...]:
    """The samples, at least one, each with tokens. Raises Undefined: one without would have the probability 1."""
    if not evidence.samples:
        raise Undefined(NO_SAMPLES)
    if not all(each.log_probs for each in evidence.samples):
        raise Undefined(SAMPLE_WITHOUT_TOKENS)
    return evidence.samples


def texts(evidence: Evidence) -> tuple[str, ...]:
    """The texts of at least two samples; an empty text is one. Raises Undefined."""
    return tuple(each.text for each in _of_pairs(evidence, evidence.samples, NO_SAMPLES))


def relevance(answer: ScoredText) -> tuple[float, ...]:
    """The relevance of each of the answer's tokens. Raises Undefined."""
    return _measured(answer.relevance, NO_RELEVANCE)


def similarity(evidence: Evidence) -> NDArray[np.float64]:
    """g of each pair of at least two samples, (K, K). Raises Undefined."""
    return _of_pairs(evidence, evidence.similarity, NO_SIMILARITY)


def clusters(evidence: Evidence) -> tuple[int, ...]:
    """The cluster of each of at least two samples. Raises Undefined."""
    return _of_pairs(evidence, evidence.clusters, NO_CLUSTERS)


def affinity(evidence: Evidence) -> NDArray[np.float64]:
    """a of each ordered pair of at least two samples, (K, K). Raises Undefined."""
    return _of_pairs(evidence, evidence.affinity, NO_AFFINITY)


def log_p_true(evidence: Evidence) -> float:
    """log p("True"), below 0: a probability that float32 calls 1 is 1 - 2^-25, half of its last digit away. Raises
    Undefined."""
    return min(_measured(evidence.p_true, NO_P_TRUE), _NEARLY_ONE)


def p_ik(evidence: Evidence) -> float:
    """The probe's probability that the model knows. Raises Undefined."""
    return _measured(evidence.p_ik, NO_P_IK)


def _measured(value: T | None, reason: str) -> T:
    if value is None:
        raise Undefined(reason)
    return value


def _of_pairs(evidence: Evidence, value: T | None, reason: str) -> T:
    """What is of at least two samples."""
    if not evidence.samples:
        raise Undefined(NO_SAMPLES)
    if len(evidence.samples) < 2:
        raise Undefined(ONE_SAMPLE)
    return _measured(value, reason)


def check(evidence: Evidence) -> None:
    """Raises BadEvidence where statistics have another shape or range than ``Evidence`` says."""
    import numpy as np

    named = {f"sample {number}": each for number, each in enumerate(evidence.samples)}
    if evidence.greedy is not None:
        named["the greedy answer"] = evidence.greedy
    for name, answer in named.items():
        _check_answer(evidence.id, name, answer)
    count = len(evidence.samples)
    for what, matrix in (("similarity", evidence.similarity), ("affinity", evidence.affinity)):
        if matrix is None:
            continue
        if matrix.shape != (count, count):
            raise BadEvidence(f"question {evidence.id!r}: {what} of shape {matrix.shape} for {count} samples")
        if not bool(np.all((matrix >= 0) & (matrix <= 1))):
            raise BadEvidence(f"question {evidence.id!r}: {what} beyond [0, 1]")
    if evidence.similarity is not None and not np.allclose(evidence.similarity, evidence.similarity.T, 0, ROUNDING):
        raise BadEvidence(f"question {evidence.id!r}: the similarity of two samples depends on their order")
    if evidence.clusters is not None and len(evidence.clusters) != count:
        raise BadEvidence(f"question {evidence.id!r}: {len(evidence.clusters)} cluster numbers for {count} samples")
    if evidence.p_ik is not None and not 0 <= evidence.p_ik <= 1:
        raise BadEvidence(f"question {evidence.id!r}: P(IK) = {evidence.p_ik} is no probability")
    if evidence.p_true is not None and not evidence.p_true <= ROUNDING:
        raise BadEvidence(f"question {evidence.id!r}: log P(True) = {evidence.p_true} is no log of a probability")


def _check_answer(question: str, name: str, answer: ScoredText) -> None:
    if not all(map(math.isfinite, answer.log_probs)):
        raise BadEvidence(f"question {question!r}: {name} has log-probs that are not finite")
    if max(answer.log_probs, default=0.0) > ROUNDING:
        raise BadEvidence(f"question {question!r}: {name} has a token of a probability above 1")
    if answer.relevance is None:
        return
    if len(answer.relevance) != len(answer.log_probs):
        raise BadEvidence(
            f"question {question!r}: {name} has {len(answer.log_probs)} tokens and the relevance of "
            f"{len(answer.relevance)}"
        )
    if not all(0 <= each <= 1 for each in answer.relevance):
        raise BadEvidence(f"question {question!r}: {name} has a relevance beyond [0, 1]")
