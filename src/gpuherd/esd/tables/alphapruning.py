"""AlphaPruning: a sparsity for each layer from its alpha (Lu et al., NeurIPS 2024, arXiv 2410.10912).

A layer with a large alpha is less trained and is pruned more. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gpuherd.errors import UsageError
from gpuherd.esd.tables.alpha_matrix import place_of
from gpuherd.esd.tables.results import StoredLayer

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
