"""AlphaPruning: a sparsity for each layer from its alpha (Lu et al., NeurIPS 2024, arXiv 2410.10912).

A layer with a large alpha is less trained and is pruned more. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gpuherd.errors import UsageError
from gpuherd.esd.results import StoredLayer
from gpuherd.esd.views import alpha_matrix, place_of

By = Literal["block", "layer"]
BYS: tuple[By, ...] = get_args(By)
EPSILON = 0.3


@dataclass(frozen=True, slots=True)
class LayerSparsity:
    """A matrix's share of weights to prune. ``score`` is the alpha that it follows from: of its block, or its own;
    None where there is none and the middle of the range was taken."""

    longname: str
    params: int
    score: float | None
    sparsity: float


def sparsities(
    layers: Sequence[StoredLayer], sparsity: float, *, by: By = "block", epsilon: float = EPSILON
) -> list[LayerSparsity]:
    """A sparsity for each matrix of a numbered layer that was analysed, in order; heads and embeddings are not pruned.

    The paper's linear map: r_i = 1 - epsilon + 2 epsilon (s_i - min s) / (max s - min s), where s_i is the mean alpha
    of the matrix's block or its own alpha; then all r_i times the factor with which their mean, weighted by parameters,
    is the target. Where that asks for more than can be pruned, such a matrix gets the most (``_most``) and the factor
    is made larger for the others, so that the mean is the target in any case. (The paper's code leaves values above 1.)

    Args:
        layers: of one model.
        sparsity: the target over all of them, 0 to 1, 1 excluded.
        by: ``block``: one alpha for all matrices of a numbered layer, the paper's choice; ``layer``: each its own.
        epsilon: 0 to 1, 1 excluded: 0 prunes all alike; the paper's is 0.3.

    Raises:
        UsageError: a number outside its range, or no layer to prune.
    """
    if not 0 <= sparsity < 1:
        raise UsageError(f"--sparsity {sparsity:g} must be 0 or more and less than 1")
    if not 0 <= epsilon < 1:
        raise UsageError(f"--epsilon {epsilon:g} must be 0 or more and less than 1")
    pruned = [layer for layer in layers if layer.analysed and place_of(layer.longname).number is not None]
    if not any(layer.fitted for layer in pruned):
        raise UsageError("there is no numbered layer with a valid fit to prune")
    scores = _scores(pruned, by)
    ratios = _scaled(_ratios(scores, epsilon), [layer.params for layer in pruned], sparsity)
    return [
        LayerSparsity(layer.longname, layer.params, score, ratio)
        for layer, score, ratio in zip(pruned, scores, ratios, strict=True)
    ]


def _scores(layers: Sequence[StoredLayer], by: By) -> list[float | None]:
    if by == "layer":
        return [layer.alpha if layer.fitted else None for layer in layers]
    blocks: dict[str, list[float]] = {}
    for layer in layers:
        if layer.fitted and layer.alpha is not None:
            blocks.setdefault(place_of(layer.longname).layer, []).append(layer.alpha)
    means = {block: math.fsum(alphas) / len(alphas) for block, alphas in blocks.items()}
    return [means.get(place_of(layer.longname).layer) for layer in layers]


def _ratios(scores: Sequence[float | None], epsilon: float) -> list[float]:
    """The linear map; 1, its middle, without a score or where all are equal."""
    known = [score for score in scores if score is not None]
    low, high = min(known), max(known)
    if high == low:
        return [1.0] * len(scores)
    return [1.0 if score is None else 1 - epsilon + 2 * epsilon * ((score - low) / (high - low)) for score in scores]


def _scaled(ratios: Sequence[float], params: Sequence[int], sparsity: float) -> list[float]:
    """The ratios times a factor, none above the most, with the target as their weighted mean."""
    most = _most(sparsity)
    full: set[int] = set()
    while True:
        free = [index for index in range(len(ratios)) if index not in full]
        wanted = sparsity * sum(params) - most * sum(params[index] for index in full)
        weight = math.fsum(params[index] * ratios[index] for index in free)
        factor = wanted / weight
        over = {index for index in free if ratios[index] * factor > most}
        if not over:
            return [most if index in full else ratios[index] * factor for index in range(len(ratios))]
        full |= over


def _most(sparsity: float) -> float:
    """The largest sparsity of a single matrix: 99 %, or half way from the target to 1 where that is more."""
    return max(0.99, (1 + sparsity) / 2)


# TempBalance: a learning-rate factor for each layer from its alpha (Zhou et al., NeurIPS 2023, arXiv 2312.00359).
#
# A layer with a large alpha is less trained than the others and learns faster, one with a small alpha slower. Pure.

Curve = Literal["linear", "sqrt", "log2", "step"]
MAPPINGS: tuple[Curve, ...] = get_args(Curve)
# The paper's range of factors, and its least number of eigenvalues.
LEAST, MOST = 0.5, 1.5
LEAST_EVALS = 50


@dataclass(frozen=True, slots=True)
class LayerFactor:
    """A matrix's factor on the learning rate; 1 with the reason in ``excluded`` where it is not balanced."""

    longname: str
    alpha: float | None
    factor: float
    excluded: str | None


def factors(layers: Sequence[StoredLayer], mapping: Curve = "linear") -> list[LayerFactor]:
    """A factor for each matrix that was analysed, in order.

    The first and the last layer of the network (``_ends``), those with fewer than 50 eigenvalues and those without a
    valid fit keep the learning rate as it is (factor 1). Over the others (paper, equation 4 and appendix; ``linear`` is
    its default):

        linear  f_i = 0.5 + (alpha_i - min alpha) / (max alpha - min alpha)
        sqrt    f_i = sqrt(alpha_i) / mean sqrt(alpha)
        log2    f_i = log2(alpha_i) / mean log2(alpha)
        step    f_i = 0.5 + rank_i / n for the rank 0 … n - 1 of alpha_i among the n

    Where all alphas are equal, ``linear`` gives 1.
    """
    analysed = [layer for layer in layers if layer.analysed]
    ends = _ends(layers)
    reasons = [_excluded(layer, ends) for layer in analysed]
    balanced = [layer.alpha for layer, reason in zip(analysed, reasons, strict=True) if reason is None]
    given = iter(_mapped([alpha for alpha in balanced if alpha is not None], mapping))
    return [
        LayerFactor(layer.longname, layer.alpha, 1.0 if reason is not None else next(given), reason)
        for layer, reason in zip(analysed, reasons, strict=True)
    ]


def _ends(layers: Sequence[StoredLayer]) -> dict[str, str]:
    """The names of what stands at the ends of the network, each with the reason as words.

    The order of a checkpoint is that of its names, not of the network. What is in no numbered layer (embeddings, a
    first convolution, heads) is at an end; a model without such matrices has the first and the last of its numbered
    layers there.
    """
    outside = [layer.longname for layer in layers if place_of(layer.longname).number is None]
    if outside or not layers:
        return dict.fromkeys(outside, "first or last layer: in none of the numbered ones")
    names = [layer.longname for layer in layers if layer.analysed]
    order = alpha_matrix(dict.fromkeys(names)).layers
    inside = sorted(names, key=lambda name: order.index(place_of(name).layer))
    return {inside[-1]: "last layer", inside[0]: "first layer"} if inside else {}


def _excluded(layer: StoredLayer, ends: Mapping[str, str]) -> str | None:
    if layer.longname in ends:
        return ends[layer.longname]
    if not layer.fitted:
        return f"no valid fit: {layer.fit_status}"
    if layer.num_evals is not None and layer.num_evals < LEAST_EVALS:
        return f"{layer.num_evals} eigenvalues, fewer than {LEAST_EVALS}"
    return None


def _mapped(alphas: Sequence[float], mapping: Curve) -> list[float]:
    if not alphas:
        return []
    if mapping == "linear":
        low, high = min(alphas), max(alphas)
        if high == low:
            return [1.0] * len(alphas)
        return [LEAST + (MOST - LEAST) * ((alpha - low) / (high - low)) for alpha in alphas]
    if mapping == "step":
        ranks = {index: rank for rank, index in enumerate(sorted(range(len(alphas)), key=alphas.__getitem__))}
        return [LEAST + (MOST - LEAST) * ranks[index] / len(alphas) for index in range(len(alphas))]
    scores = [math.sqrt(alpha) if mapping == "sqrt" else math.log2(alpha) for alpha in alphas]
    mean = math.fsum(scores) / len(scores)
    return [score / mean for score in scores]
