"""Semantic entropy: the entropy of what the samples mean, with samples of the same meaning in one cluster.

Three published formulas go by this name; each has its own name here (docs/uncertainty.md sets them side by side).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from gpuherd.qa.measures import given
from gpuherd.qa.measures.evidence import Evidence, Need
from gpuherd.qa.measures.likelihood import log_prob, mean_log_prob
from gpuherd.qa.measures.logs import log_sum_exp
from gpuherd.qa.measures.registry import measure

SHIFT = 5.0  # what the paper's code adds to each; it changes no order


@measure(
    "semantic-entropy:rao",
    needs=[Need.SAMPLES, Need.EQUIVALENCE],
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
    needs=[Need.SAMPLES, Need.EQUIVALENCE],
    source="Kuhn, Gal & Farquhar 2023 (arXiv 2302.09664), averaged over samples; LM-Polygraph: SemanticEntropy",
    aliases=["se:mc"],
)
def semantic_entropy_mc(evidence: Evidence) -> float:
    """-(1/K) sum_k log of the summed probability of sample k's cluster, not normalised; a duplicate counts again."""
    return _over_samples(evidence, range(len(evidence.samples)))


@measure(
    "semantic-entropy:mc-unique",
    needs=[Need.SAMPLES, Need.EQUIVALENCE],
    source="Kuhn, Gal & Farquhar 2023 (arXiv 2302.09664) with each text once; LM-Polygraph: SemanticEntropyUnique",
    aliases=["se:mc-unique"],
)
def semantic_entropy_mc_unique(evidence: Evidence) -> float:
    """-(1/K) sum_k log of the summed probability of sample k's cluster, where each text of a cluster counts once."""
    return _over_samples(evidence, given.texts(evidence))


@measure(
    "semantic-entropy:kuhn",
    needs=[Need.SAMPLES, Need.EQUIVALENCE],
    source="Kuhn, Gal & Farquhar 2023 (arXiv 2302.09664), as lorenzkuhn/semantic_uncertainty and jinhaoduan/SAR do",
    aliases=["se:kuhn"],
)
def semantic_entropy_kuhn(evidence: Evidence) -> float:
    """-(1/|C|) sum_c log of the cluster's summed length-normalised probability, + 5."""
    clusters = _by_cluster(given.clusters(evidence), [mean_log_prob(each) for each in given.samples(evidence)])
    return SHIFT - math.fsum(map(log_sum_exp, clusters)) / len(clusters)


@measure(
    "discrete-semantic-entropy",
    needs=[Need.SAMPLES, Need.EQUIVALENCE],
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
    needs=[Need.SAMPLES, Need.EQUIVALENCE],
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
