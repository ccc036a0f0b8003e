"""TempBalance: a learning-rate factor for each layer from its alpha (Zhou et al., NeurIPS 2023, arXiv 2312.00359).

A layer with a large alpha is less trained than the others and learns faster, one with a small alpha slower. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gpuherd.esd.tables.alpha_matrix import alpha_matrix, place_of
from gpuherd.esd.tables.results import StoredLayer

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
