"""Every measure against its formula as the paper writes it, probabilities and all, in 50 digits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import combinations

import mpmath
import numpy as np
import pytest
import scipy.linalg
from rouge_score.rouge_scorer import RougeScorer
from tests.qa.measures.made import evidence

from gpuherd.qa.measures.evidence import Evidence, ScoredText
from gpuherd.qa.measures.registry import compute, measures

LONG = range(1000, 1006)  # answers of 2,000 tokens, whose probabilities are far below the least float64


@pytest.fixture(autouse=True)
def _fifty_digits() -> Iterator[None]:
    with mpmath.workdps(50):
        yield


@functools.cache
def random_questions(count: int) -> tuple[Evidence, ...]:
    return tuple(map(evidence, range(count)))


@functools.cache
def long_questions(count: int) -> tuple[Evidence, ...]:
    return tuple(evidence(seed, samples=3, tokens=2000) for seed in LONG[:count])


@functools.cache
def p(answer: ScoredText) -> mpmath.mpf:
    """The probability of an answer, as the product of its tokens'."""
    return mpmath.fprod(mpmath.exp(mpmath.mpf(each)) for each in answer.log_probs)


@functools.cache
def p_normalised(answer: ScoredText) -> mpmath.mpf:
    return p(answer) ** (mpmath.mpf(1) / len(answer.log_probs))


@functools.cache
def p_relevant(answer: ScoredText) -> mpmath.mpf:
    """SAR's p': each token's probability to the power of its share of the relevance."""
    assert answer.relevance is not None
    total = mpmath.fsum(answer.relevance)
    return mpmath.fprod(
        mpmath.exp(mpmath.mpf(value)) ** (mpmath.mpf(share) / total)
        for value, share in zip(answer.log_probs, answer.relevance, strict=True)
    )


def sentence_sar(question: Evidence, probability: Callable[[ScoredText], mpmath.mpf]) -> mpmath.mpf:
    """Duan et al., eq. for E_S with t = 0.001, mean over the samples."""
    assert question.similarity is not None
    ps = [probability(each) for each in question.samples]
    shifted = [
        own
        + mpmath.fsum(mpmath.mpf(question.similarity[k, j]) * other for j, other in enumerate(ps) if j != k)
        / mpmath.mpf("0.001")
        for k, own in enumerate(ps)
    ]
    return -mpmath.fsum(map(mpmath.log, shifted)) / len(ps)


def cluster_sums(question: Evidence, ps: list[mpmath.mpf]) -> list[mpmath.mpf]:
    assert question.clusters is not None
    return [
        mpmath.fsum(value for value, own in zip(ps, question.clusters, strict=True) if own == cluster)
        for cluster in range(max(question.clusters) + 1)
    ]


def rao(question: Evidence) -> mpmath.mpf:
    ps = [p_normalised(each) for each in question.samples]
    shares = [each / mpmath.fsum(ps) for each in cluster_sums(question, ps)]
    return -mpmath.fsum(share * mpmath.log(share) for share in shares)


def monte_carlo(question: Evidence, *, unique: bool = False) -> mpmath.mpf:
    assert question.clusters is not None
    ps = [p(each) for each in question.samples]
    if unique:
        seen: set[tuple[int, str]] = set()
        for place, (cluster, sample) in enumerate(zip(question.clusters, question.samples, strict=True)):
            if (cluster, sample.text) in seen:
                ps[place] = mpmath.mpf(0)
            seen.add((cluster, sample.text))
    sums = cluster_sums(question, ps)
    return -mpmath.fsum(mpmath.log(sums[cluster]) for cluster in question.clusters) / len(ps)


def kuhn(question: Evidence) -> mpmath.mpf:
    """The loop of lorenzkuhn/semantic_uncertainty: each cluster's logsumexp minus 5, their mean with a minus."""
    sums = cluster_sums(question, [p_normalised(each) for each in question.samples])
    return -mpmath.fsum(mpmath.log(each) - 5 for each in sums) / len(sums)


def discrete(question: Evidence) -> mpmath.mpf:
    assert question.clusters is not None
    sizes = np.bincount(question.clusters) / mpmath.mpf(len(question.clusters))
    return -mpmath.fsum(share * mpmath.log(share) for share in sizes)


def lexical(question: Evidence) -> float:
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    texts = [each.text for each in question.samples]
    return -float(np.mean([scorer.score(first, second)["rougeL"].fmeasure for first, second in combinations(texts, 2)]))


def normalised_laplacian(question: Evidence) -> np.ndarray:
    assert question.affinity is not None
    weights = (question.affinity + question.affinity.T) / 2
    root = scipy.linalg.inv(scipy.linalg.sqrtm(np.diag(weights.sum(axis=1))))
    found: np.ndarray = np.eye(len(weights)) - root @ weights @ root
    return found


def u_deg(question: Evidence) -> float:
    assert question.affinity is not None
    count = len(question.samples)
    degrees = np.diag(((question.affinity + question.affinity.T) / 2).sum(axis=1))
    return float(np.trace(count * np.eye(count) - degrees)) / count**2


def u_eigv(question: Evidence) -> float:
    eigenvalues = scipy.linalg.eigh(normalised_laplacian(question), eigvals_only=True)
    return sum(max(0.0, 1 - float(each)) for each in eigenvalues)


def eccentricity(question: Evidence) -> float:
    """Lin et al.: v_j holds sample j's coordinates in the small eigenvectors; the norm of all v_j - mean v."""
    eigenvalues, vectors = scipy.linalg.eigh(normalised_laplacian(question))
    coordinates = vectors[:, eigenvalues < 0.9 - 1e-9]
    return float(np.sqrt(sum(np.sum((each - coordinates.mean(axis=0)) ** 2) for each in coordinates)))


def greedy(question: Evidence) -> ScoredText:
    assert question.greedy is not None
    return question.greedy


FORMULAS: dict[str, Callable[[Evidence], mpmath.mpf | float]] = {
    "nll": lambda question: -mpmath.log(p(greedy(question))),
    "ln-nll": lambda question: -mpmath.log(p_normalised(greedy(question))),
    "perplexity": lambda question: 1 / p_normalised(greedy(question)),
    "mean-token-probability": lambda question: (
        1
        - mpmath.fsum(mpmath.exp(mpmath.mpf(each)) for each in greedy(question).log_probs)
        / len(greedy(question).log_probs)
    ),
    "token-sar": lambda question: -mpmath.log(p_relevant(greedy(question))),
    "token-sar:samples": lambda question: (
        -mpmath.fsum(mpmath.log(p_relevant(each)) for each in question.samples) / len(question.samples)
    ),
    "sentence-sar": lambda question: sentence_sar(question, p),
    "sar": lambda question: sentence_sar(question, p_relevant),
    "predictive-entropy": lambda question: (
        -mpmath.fsum(mpmath.log(p(each)) for each in question.samples) / len(question.samples)
    ),
    "ln-predictive-entropy": lambda question: (
        -mpmath.fsum(mpmath.log(p_normalised(each)) for each in question.samples) / len(question.samples)
    ),
    "semantic-entropy:rao": rao,
    "semantic-entropy:mc": monte_carlo,
    "semantic-entropy:mc-unique": lambda question: monte_carlo(question, unique=True),
    "semantic-entropy:kuhn": kuhn,
    "discrete-semantic-entropy": discrete,
    "semantic-sets": lambda question: float(len(set(question.clusters or ()))),
    "lexical-similarity": lexical,
    "u-deg": u_deg,
    "u-eigv": u_eigv,
    "eccentricity": eccentricity,
    "p-true": lambda question: mpmath.log(1 / mpmath.exp(mpmath.mpf(question.p_true)) - 1),
    "p-true:nll": lambda question: -mpmath.mpf(question.p_true),
    "p-ik": lambda question: 1 - mpmath.mpf(question.p_ik),
}


OF_LOG_PROBS = [name for name in FORMULAS if not name.startswith(("lexical", "u-", "p-", "ecc"))]


def compare(name: str, questions: tuple[Evidence, ...]) -> None:
    column = compute([name], questions).columns[name]
    for question, ours in zip(questions, column, strict=True):
        assert ours == pytest.approx(float(FORMULAS[name](question)), rel=1e-10, abs=1e-10), question.id


@pytest.mark.parametrize("name", FORMULAS)
def test_a_measure_is_what_its_paper_says(name: str) -> None:
    compare(name, random_questions(20))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMULAS)
def test_a_measure_is_what_its_paper_says_on_two_hundred_questions(name: str) -> None:
    compare(name, random_questions(200))


@pytest.mark.parametrize("name", OF_LOG_PROBS)
def test_answers_of_two_thousand_tokens_are_no_different(name: str) -> None:
    compare(name, long_questions(1))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_LOG_PROBS)
def test_no_long_answers_are_different(name: str) -> None:
    compare(name, long_questions(6))


def test_the_long_answers_would_underflow() -> None:
    """What the logs are for: as float64 each probability would be 0, and its log minus infinity."""
    assert all(float(p(sample)) == 0 for question in long_questions(1) for sample in question.samples)


def test_each_measure_has_a_formula_here() -> None:
    """The weightings have a test of their own."""
    assert {each.name for each in measures() if not each.name.startswith("weighted-nll:")} == FORMULAS.keys()
