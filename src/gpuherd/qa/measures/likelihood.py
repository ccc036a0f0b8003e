"""Measures of likelihood: what the model itself gave to the tokens that it chose, plain and by their relevance (SAR).

Sums are ``math.fsum``'s: rounded once, whatever the order and the length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpuherd.qa.measures import given
from gpuherd.qa.measures.evidence import Evidence, EvidenceNeed, ScoredText
from gpuherd.qa.measures.registry import measure

if TYPE_CHECKING:
    from numpy.typing import NDArray


def log_prob(answer: ScoredText) -> float:
    """Log of the probability of the whole answer, in nats."""
    return math.fsum(answer.log_probs)


def mean_log_prob(answer: ScoredText) -> float:
    """The answer's log-prob divided by the number of its tokens, of which there is at least one."""
    return math.fsum(answer.log_probs) / len(answer.log_probs)


@measure(
    "nll",
    needs=[EvidenceNeed.GREEDY],
    source="Aichberger, Schweighofer & Hochreiter 2024 (arXiv 2412.15176): G-NLL; "
    "LM-Polygraph: MaximumSequenceProbability",
    aliases=["g-nll", "msp"],
)
def nll(evidence: Evidence) -> float:
    """Negative log-likelihood of the greedy answer: -sum_i l_i."""
    return -log_prob(given.greedy(evidence))


@measure(
    "ln-nll",
    needs=[EvidenceNeed.GREEDY],
    source="Malinin & Gales 2021 (arXiv 2002.07650), of one answer; LM-Polygraph calls it Perplexity",
)
def length_normalised_nll(evidence: Evidence) -> float:
    """NLL a token of the greedy answer: -(1/N) sum_i l_i."""
    return -mean_log_prob(given.greedy(evidence))


@measure("perplexity", needs=[EvidenceNeed.GREEDY], source="Jelinek, Mercer, Bahl & Baker 1977: exp of the NLL a token")
def perplexity(evidence: Evidence) -> float:
    """Perplexity of the greedy answer: exp(-(1/N) sum_i l_i)."""
    try:
        return math.exp(length_normalised_nll(evidence))
    except OverflowError:
        return math.inf


@measure(
    "mean-token-probability", needs=[EvidenceNeed.GREEDY], source="nllSAR: average token probability, taken from 1"
)
def mean_token_probability(evidence: Evidence) -> float:
    """How far the mean probability of the tokens is from 1: 1 - (1/N) sum_i exp(l_i)."""
    log_probs = given.greedy(evidence).log_probs
    # expm1 keeps the digits of tokens that are all but certain.
    return -math.fsum(map(math.expm1, log_probs)) / len(log_probs)


def log_sum_exp(values: Iterable[float]) -> float:
    """``log(sum(exp(v)))``, exact where the probabilities themselves would underflow: computed about the largest. The
    sum is rounded once, so the order makes no difference.

    Raises ValueError where there are no values.
    """
    logs = tuple(values)
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(each - largest) for each in logs))


# --- shifting attention to relevance (SAR) ----------------------------------------------------------------------------
#
# Duan et al., ACL 2024, arXiv 2307.01379: tokens and sentences count by their relevance. Relevance R(z_i) = 1 -
# |g(x + s, x + s minus z_i)| and similarity g were measured before (``statistics``); nothing here rescales them.

TEMPERATURE = 0.001  # t of the sentence shift, as the paper has it
_DUAN_2024 = "Duan et al. 2024 (arXiv 2307.01379)"


def token_sar_of(answer: ScoredText) -> float:
    """``sum_i R_i (-l_i) / sum_i R_i`` of an answer with tokens; where none is relevant, all are alike.

    Raises Undefined where the relevance is not measured.
    """
    shares = given.relevance(answer)
    total = math.fsum(shares)
    if total == 0:
        return -mean_log_prob(answer)
    return -math.fsum(share / total * value for share, value in zip(shares, answer.log_probs, strict=True))


def sentence_shifted(log_probs: Sequence[float], similarity: NDArray[np.float64]) -> float:
    """``(1/K) sum_k -log(p_k + (1/t) sum_{j != k} g_kj p_j)`` from log-probs (K) and g (K, K), all in logs.

    Probabilities of long answers underflow; their logs do not.
    """
    logs = np.asarray(log_probs, dtype=np.float64)
    with np.errstate(divide="ignore"):  # log 0 is -inf: what is not alike at all adds nothing
        terms = np.log(np.asarray(similarity, dtype=np.float64)) - math.log(TEMPERATURE) + logs[None, :]
    np.fill_diagonal(terms, logs)
    largest = terms.max(axis=1)
    shifted = largest + np.log(np.exp(terms - largest[:, None]).sum(axis=1))
    return -math.fsum(shifted.tolist()) / len(logs)


@measure(
    "token-sar",
    needs=[EvidenceNeed.GREEDY, EvidenceNeed.RELEVANCE],
    source=f"{_DUAN_2024}: tokenSAR; LM-Polygraph: TokenSAR",
    aliases=["rw-g-nll"],
)
def token_sar(evidence: Evidence) -> float:
    """NLL of the greedy answer's tokens, each by its share of the relevance: sum_i R_i (-l_i) / sum_i R_i."""
    return token_sar_of(given.greedy(evidence))


@measure(
    "token-sar:samples",
    needs=[EvidenceNeed.SAMPLES, EvidenceNeed.SAMPLE_RELEVANCE],
    source=f"{_DUAN_2024}: tokenSAR, as jinhaoduan/SAR averages it; nllSAR calls it SAR",
)
def token_sar_of_samples(evidence: Evidence) -> float:
    """Mean Token-SAR of the samples: (1/K) sum_k sum_i R_i (-l_i) / sum_i R_i."""
    answers = given.samples(evidence)
    return math.fsum(map(token_sar_of, answers)) / len(answers)


@measure(
    "sentence-sar", needs=[EvidenceNeed.SAMPLES, EvidenceNeed.SIMILARITY], source=f"{_DUAN_2024}: sentSAR, t = 0.001"
)
def sentence_sar(evidence: Evidence) -> float:
    """Samples speak for one another: (1/K) sum_k -log(p(s_k) + (1/t) sum_{j != k} g(s_k, s_j) p(s_j))."""
    similarity = given.similarity(evidence)
    return sentence_shifted([log_prob(each) for each in given.samples(evidence)], similarity)


@measure(
    "sar",
    needs=[EvidenceNeed.SAMPLES, EvidenceNeed.SAMPLE_RELEVANCE, EvidenceNeed.SIMILARITY],
    source=f"{_DUAN_2024}: SAR, t = 0.001",
)
def sar(evidence: Evidence) -> float:
    """Sentence-SAR of exp(-Token-SAR(s_k)) in place of p(s_k)."""
    similarity = given.similarity(evidence)
    return sentence_shifted([-token_sar_of(each) for each in given.samples(evidence)], similarity)
