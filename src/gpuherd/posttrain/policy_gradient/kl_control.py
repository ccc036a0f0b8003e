"""The weight of the KL divergence from the reference: fixed, or moved towards a wanted divergence. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class KLControl:
    """Proportional control in log space (arXiv 1909.08593, section 2.2).

    Attributes:
        weight: now.
        target: the divergence that is wanted, nats an answer; None: the weight stays.
        horizon: answers in which an error of 20 % or more changes the weight by a factor e^0.2, about.
    """

    weight: float
    target: float | None = None
    horizon: int = 10_000

    def after(self, divergence: float, answers: int) -> KLControl:
        """After so many answers whose mean divergence this was.

        >>> KLControl(0.1, target=6.0, horizon=100).after(12.0, 10).weight
        0.10200000000000001
        """
        if self.target is None:
            return self
        error = min(max(divergence / self.target - 1, -0.2), 0.2)
        return replace(self, weight=self.weight * (1 + error * answers / self.horizon))
