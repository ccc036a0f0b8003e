"""Two models side by side: alpha by layer. Pure; what is compared was read by ``results``.

The published results show what to expect: between a fine-tune and its base the median over layers of |Δalpha| is about
0.003, between two unrelated models about 0.75, and two runs of one model in float32 differ by up to 1 % of alpha.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.esd.folder import as_text, differing, format_convention
from gpuherd.esd.results import ModelTable
from gpuherd.esd.tails import tails

# Which matrices are analysed and what else is found out about them: alpha of a matrix depends on none of these.
NOT_OF_ALPHA = frozenset(
    {"embeddings", "layers", "exclude", "delta", "bootstrap", "mp_fit", "randomize", "farms", "seed"}
) | {tail.name for tail in tails()}


@dataclass(frozen=True, slots=True)
class LayerPair:
    """A matrix that both models have: its alpha in each, None without a valid fit, and ``b - a``."""

    longname: str
    a: float | None
    b: float | None

    @property
    def delta(self) -> float | None:
        """How much larger alpha is in the second."""
        return None if self.a is None or self.b is None else self.b - self.a


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models.

    Attributes:
        a, b: their ids.
        pairs: the matrices that both have, in the order of the first.
        only_a, only_b: names of matrices that one alone has.
        conventions: where their conventions differ in what alpha depends on, these parts of each as words; else None.
    """

    a: str
    b: str
    pairs: tuple[LayerPair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    conventions: tuple[str, str] | None

    @property
    def deltas(self) -> list[float]:
        """|Δalpha| of all pairs in which both have one."""
        return [abs(pair.delta) for pair in self.pairs if pair.delta is not None]

    @property
    def median(self) -> float | None:
        """The median |Δalpha|; None without a pair."""
        return statistics.median(self.deltas) if self.deltas else None

    @property
    def largest(self) -> LayerPair | None:
        """The pair that differs most; None without one."""
        both = [pair for pair in self.pairs if pair.delta is not None]
        return max(both, key=lambda pair: abs(pair.delta or 0.0), default=None)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "a": self.a,
            "b": self.b,
            "conventions": None if self.conventions is None else list(self.conventions),
            "layers": len(self.deltas),
            "median_abs_delta": self.median,
            "max_abs_delta": max(self.deltas, default=None),
            "max_at": None if self.largest is None else self.largest.longname,
            "pairs": [
                {"longname": pair.longname, "a": pair.a, "b": pair.b, "delta": pair.delta} for pair in self.pairs
            ],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }


def compare(a: ModelTable, b: ModelTable, *, across_conventions: bool = False) -> Comparison:
    """Compares two models layer by layer.

    Raises:
        UsageError: their conventions differ in what alpha depends on, and ``across_conventions`` is off.
    """
    one, other = as_text(a.convention), as_text(b.convention)
    names = tuple(name for name in differing(one, other) if name not in NOT_OF_ALPHA)
    if names and not across_conventions:
        raise UsageError(
            f"{a.model_id} was analysed with {format_convention(one, names)}, {b.model_id} with "
            f"{format_convention(other, names)}: their alphas are not comparable. "
            "--across-conventions compares them all the same"
        )
    left, right = a.alphas(), b.alphas()
    return Comparison(
        a=a.model_id,
        b=b.model_id,
        pairs=tuple(LayerPair(name, alpha, right[name]) for name, alpha in left.items() if name in right),
        only_a=tuple(name for name in left if name not in right),
        only_b=tuple(name for name in right if name not in left),
        conventions=(format_convention(one, names), format_convention(other, names)) if names else None,
    )


@dataclass(frozen=True, slots=True)
class Match:
    """The models of two runs, paired by id, and those that one alone has."""

    pairs: tuple[tuple[ModelTable, ModelTable], ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def matched(a: Sequence[ModelTable], b: Iterable[ModelTable]) -> Match:
    """Which models to compare: one with one whatever they are called, else those of one id."""
    right = {model.model_id: model for model in b}
    if len(a) == 1 and len(right) == 1:
        return Match(((a[0], next(iter(right.values()))),), (), ())
    left = {model.model_id: model for model in a}
    return Match(
        tuple((model, right[name]) for name, model in left.items() if name in right),
        tuple(name for name in left if name not in right),
        tuple(name for name in right if name not in left),
    )
