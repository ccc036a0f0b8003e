"""By what a model is guided while it decodes: plain frozen data, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from gpuherd.errors import UsageError


class Mode(StrEnum):
    """What is added to the logit of a candidate token, of the law of the reward that the classifier predicts."""

    BERNOULLI = "bernoulli"  # Q# with a reward of 0 or 1: ln(1 - p + p e^(1/eta))
    DISTRIBUTIONAL = "distributional"  # Q# with atoms: ln sum_i p_i e^(a_i/eta)
    EXPECTATION = "expectation"  # CD: the expected reward over eta


@dataclass(frozen=True, slots=True)
class Guide:
    """A classifier and how it is used.

    Attributes:
        classifier: its folder (``lm.guidance.classifier``).
        eta: of the papers (arXiv 2502.20548, 2507.20067): the weight of the KL divergence from the reference. Small
            guides strongly; as it grows the reference is left as it is. (PITA's public code calls 1/eta eta.)
        mode: what is added.
        top_k: so many of the reference's most probable tokens are candidates; all others are never chosen.
    """

    classifier: str
    eta: float = 0.1
    mode: Mode = Mode.BERNOULLI
    top_k: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.eta <= math.inf or math.isinf(1 / self.eta):
            raise UsageError(
                f"eta={self.eta}; it is above 0, and 1/eta is finite (the papers' eta; small guides strongly)"
            )
        if self.top_k < 1:
            raise UsageError(f"top_k={self.top_k}; the least is 1")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From ``to_dict``."""
        return cls(**{**values, "mode": Mode(values["mode"])})
