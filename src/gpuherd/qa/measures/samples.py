"""Measures over samples: their entropy, meanings, words and graph; and what the model says of its own answer."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpuherd.qa.measures import given
from gpuherd.qa.measures.evidence import Evidence, EvidenceNeed, Undefined
from gpuherd.qa.measures.likelihood import log_prob, log_sum_exp, mean_log_prob
from gpuherd.qa.measures.registry import measure
from gpuherd.qa.measures.rouge import rouge_l_of_words, words

if TYPE_CHECKING:
    from numpy.typing import NDArray


@measure(
    "predictive-entropy",
    needs=[EvidenceNeed.SAMPLES],
    source="Malinin & Gales 2021 (arXiv 2002.07650); LM-Polygraph: MonteCarloSequenceEntropy",
    aliases=["pe"],
)
def predictive_entropy(evidence: Evidence) -> float:
    """Monte Carlo estimate of the entropy of answers: -(1/K) sum_k log p(s_k)."""
    samples = given.samples(evidence)
    return -math.fsum(map(log_prob, samples)) / len(samples)


@measure(
    "ln-predictive-entropy",
    needs=[EvidenceNeed.SAMPLES],
    source="Malinin & Gales 2021 (arXiv 2002.07650); LM-Polygraph: MonteCarloNormalizedSequenceEntropy",
    aliases=["ln-pe"],
)
def length_normalised_predictive_entropy(evidence: Evidence) -> float:
    """Predictive entropy of each sample's log-prob a token: -(1/K) sum_k (1/N_k) log p(s_k)."""
    samples = given.samples(evidence)
    return -math.fsum(map(mean_log_prob, samples)) / len(samples)


# --- semantic entropy -------------------------------------------------------------------------------------------------
#
# The entropy of what the samples mean, with samples of the same meaning in one cluster. Three published formulas go by
# this name; each has its own name here (docs/uncertainty.md sets them side by side).

SHIFT = 5.0  # what the paper's code adds to each; it changes no order


@measure(
    "semantic-entropy:rao",
    needs=[EvidenceNeed.SAMPLES, EvidenceNeed.EQUIVALENCE],
    source="Farquhar, Kossen, Kuhn & Gal 2024 (Nature 630), as jlko/semantic_uncertainty computes it",
    aliases=["se:rao"],
)
def semantic_entropy_rao(evidence: Evidence) -> float:
    """Entropy of the clusters' shares of length-normalised probability: -sum_c q_c log q_c."""
    clusters = given.clusters(evidence)
    logs = [mean_log_prob(each) for each in given.samples(evidence)]
    total = log_sum_exp(logs)
    shares = [log_sum_exp(members) - total for members in _by_cluster(clusters, logs)]
    return -math.fsum(math.exp(share) * share for share in shares)


@measure(
    "semantic-entropy:mc",
    needs=[EvidenceNeed.SAMPLES, EvidenceNeed.EQUIVALENCE],
    source="Kuhn, Gal & Farquhar 2023 (arXiv 2302.09664), averaged over samples; LM-Polygraph: SemanticEntropy",
    aliases=["se:mc"],
)
def semantic_entropy_mc(evidence: Evidence) -> float:
    """-(1/K) sum_k log of the summed probability of sample k's cluster, not normalised; a duplicate counts again."""
    return _over_samples(evidence, range(len(evidence.samples)))


@measure(
    "semantic-entropy:mc-unique",
    needs=[EvidenceNeed.SAMPLES, EvidenceNeed.EQUIVALENCE],
    source="Kuhn, Gal & Farquhar 2023 (arXiv 2302.09664) with each text once; LM-Polygraph: SemanticEntropyUnique",
    aliases=["se:mc-unique"],
)
def semantic_entropy_mc_unique(evidence: Evidence) -> float:
    """-(1/K) sum_k log of the summed probability of sample k's cluster, where each text of a cluster counts once."""
    return _over_samples(evidence, given.texts(evidence))


@measure(
    "semantic-entropy:kuhn",
    needs=[EvidenceNeed.SAMPLES, EvidenceNeed.EQUIVALENCE],
    source="Kuhn, Gal & Farquhar 2023 (arXiv 2302.09664), as lorenzkuhn/semantic_uncertainty and jinhaoduan/SAR do",
    aliases=["se:kuhn"],
)
def semantic_entropy_kuhn(evidence: Evidence) -> float:
    """-(1/|C|) sum_c log of the cluster's summed length-normalised probability, + 5."""
    clusters = _by_cluster(given.clusters(evidence), [mean_log_prob(each) for each in given.samples(evidence)])
    return SHIFT - math.fsum(map(log_sum_exp, clusters)) / len(clusters)


@measure(
    "discrete-semantic-entropy",
    needs=[EvidenceNeed.SAMPLES, EvidenceNeed.EQUIVALENCE],
    source="Farquhar, Kossen, Kuhn & Gal 2024 (Nature 630): discrete; jlko: cluster_assignment_entropy; "
    "LM-Polygraph: SemanticEntropyEmpirical",
    aliases=["discrete-se"],
)
def discrete_semantic_entropy(evidence: Evidence) -> float:
    """Entropy of the clusters' sizes, no log-probs: -sum_c (n_c/K) log(n_c/K)."""
    sizes = Counter(given.clusters(evidence)).values()
    # By whole numbers: 5, 1, 1, 1 ... and 2, 2 ... may have one entropy, and rounding would rank them.
    common = math.gcd(*sizes)
    parts = [size // common for size in sizes]
    total = sum(parts)
    power, product = total**total, math.prod(part**part for part in parts)
    try:
        return math.log(power / product) / total
    except OverflowError:  # of hundreds of samples
        return (math.log(power) - math.log(product)) / total


@measure(
    "semantic-sets",
    needs=[EvidenceNeed.SAMPLES, EvidenceNeed.EQUIVALENCE],
    source="Lin, Trivedi & Sun 2024 (arXiv 2305.19187), over these clusters",
)
def semantic_sets(evidence: Evidence) -> float:
    """Number of clusters of equal meaning: |C|."""
    return float(len(set(given.clusters(evidence))))


def _by_cluster(clusters: Sequence[int], values: Sequence[float]) -> list[list[float]]:
    members: defaultdict[int, list[float]] = defaultdict(list)
    for cluster, value in zip(clusters, values, strict=True):
        members[cluster].append(value)
    return list(members.values())


def _over_samples(evidence: Evidence, names: Sequence[Hashable]) -> float:
    """``-(1/K) sum_k log p(c(k))``, where in ``p(c)`` each name counts once in a cluster, with its first log-prob."""
    clusters = given.clusters(evidence)
    members: defaultdict[int, dict[Hashable, float]] = defaultdict(dict)
    for cluster, name, sample in zip(clusters, names, given.samples(evidence), strict=True):
        members[cluster].setdefault(name, log_prob(sample))
    of_cluster = {cluster: log_sum_exp(values.values()) for cluster, values in members.items()}
    return -math.fsum(of_cluster[cluster] for cluster in clusters) / len(clusters)


# --- how alike the samples' words are ---------------------------------------------------------------------------------


@measure(
    "lexical-similarity",
    needs=[EvidenceNeed.SAMPLES],
    source="Fomicheva et al. 2020 (arXiv 2005.10608), with ROUGE-L as Kuhn et al. 2023; "
    "LM-Polygraph: LexicalSimilarity_rougeL",
)
def lexical_similarity(evidence: Evidence) -> float:
    """Mean ROUGE-L of the pairs of samples, negative: -mean_{i<j} ROUGE-L(s_i, s_j)."""
    counts = Counter(map(words, given.texts(evidence)))
    if not any(counts):
        raise Undefined(given.NO_WORDS)
    # Each pair of different texts is compared once, however often each was drawn.
    between = [
        counts[first] * counts[second] * rouge_l_of_words(first, second)
        for first, second in itertools.combinations(counts, 2)
    ]
    within = [math.comb(count, 2) * rouge_l_of_words(each, each) for each, count in counts.items() if count > 1]
    return -math.fsum([*between, *within]) / math.comb(counts.total(), 2)


# --- the graph of samples, whose edges are affinities -----------------------------------------------------------------

_LIN_2024 = "Lin, Trivedi & Sun 2024 (arXiv 2305.19187)"
_GRAPH_NEEDS = [EvidenceNeed.SAMPLES, EvidenceNeed.AFFINITY]
LARGEST = 0.9  # eigenvectors of smaller eigenvalues are the embedding of the samples; the paper's figure
DECIMALS = 10  # of these measures
_ROUNDING = 1e-9  # of eigenvalues: one that is 0.9 but for rounding is 0.9


@measure("u-deg", needs=_GRAPH_NEEDS, source=f"{_LIN_2024}: U_Deg; LM-Polygraph: DegMat")
def u_deg(evidence: Evidence) -> float:
    """How far the samples are from all alike: 1 - sum(W) / K^2."""
    weights = _symmetric(evidence)
    return _tied(1 - weights.sum() / weights.shape[0] ** 2)


@measure("u-eigv", needs=_GRAPH_NEEDS, source=f"{_LIN_2024}: U_EigV; LM-Polygraph: EigValLaplacian")
def u_eigv(evidence: Evidence) -> float:
    """Number of meanings, continuous: sum_k max(0, 1 - lambda_k) over the eigenvalues of the Laplacian."""
    eigenvalues = np.linalg.eigvalsh(laplacian(_symmetric(evidence)))
    return _tied(np.maximum(0.0, 1.0 - eigenvalues).sum())


@measure("eccentricity", needs=_GRAPH_NEEDS, source=f"{_LIN_2024}: U_Ecc; LM-Polygraph: Eccentricity")
def eccentricity(evidence: Evidence) -> float:
    """Spread of the samples in the Laplacian's small eigenvectors (lambda < 0.9): norm(V - mean(V))."""
    eigenvalues, vectors = np.linalg.eigh(laplacian(_symmetric(evidence)))
    kept = vectors[:, eigenvalues < LARGEST - _ROUNDING]
    return _tied(np.linalg.norm(kept - kept.mean(axis=0)))


def laplacian(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """``I - D^-1/2 W D^-1/2`` of a symmetric W (K, K); a sample that is bound to none, not even to itself, has a row of
    zeros (Chung 1997, section 1.2) and so counts as a meaning of its own.
    """
    degrees = weights.sum(axis=1)
    alone = degrees == 0
    roots = 1 / np.sqrt(np.where(alone, 1.0, degrees))
    found: NDArray[np.float64] = np.diag(np.where(alone, 0.0, 1.0)) - roots[:, None] * weights * roots[None, :]
    return found


def _tied(value: float | np.floating) -> float:
    """To ``DECIMALS``: the last digits of an eigenvalue depend on the order of the samples, and would rank questions
    whose graphs are the same."""
    return round(float(value), DECIMALS)


def _symmetric(evidence: Evidence) -> NDArray[np.float64]:
    affinity = np.asarray(given.affinity(evidence), dtype=np.float64)
    symmetric: NDArray[np.float64] = (affinity + affinity.T) / 2
    return symmetric


# --- self-evaluation: asked (P(True)), and read from the hidden state (P(IK)) -----------------------------------------

_KADAVATH_2022 = "Kadavath et al. 2022 (arXiv 2207.05221)"


@measure("p-true", needs=[EvidenceNeed.P_TRUE], source=f"{_KADAVATH_2022}: P(True); jlko: p_false_fixed, as log-odds")
def p_true(evidence: Evidence) -> float:
    """The model, asked, does not call its answer true: log((1 - p) / p), p = p("True")."""
    # Not 1 - p: that is 1 for every p below 1e-16, and answers that differ in nats would be tied.
    log_p = given.log_p_true(evidence)
    return math.log(-math.expm1(log_p)) - log_p


@measure("p-true:nll", needs=[EvidenceNeed.P_TRUE], source=f"{_KADAVATH_2022}: P(True); LM-Polygraph: PTrue")
def p_true_nll(evidence: Evidence) -> float:
    """P(True) in nats, in the same order: -log p("True")."""
    return -given.log_p_true(evidence)


@measure("p-ik", needs=[EvidenceNeed.P_IK], source=f"{_KADAVATH_2022}: P(IK); jlko: p_ik", aliases=["p_ik"])
def p_ik(evidence: Evidence) -> float:
    """A probe of the hidden state behind the prompt says that the model does not know: 1 - P(IK)."""
    return 1.0 - given.p_ik(evidence)
