"""What of a divergence is rounding: shown figures should not say of equal laws that they differ. Pure."""

from __future__ import annotations

# Log-probs are taken in float32, whose steps at 16 are 2e-6 and at 1 are 1e-7: of equal laws, or of two passes of one
# model, the mean divergence comes out some 1e-8 to 1e-7 nats to either side of 0.
_LEAST_NATS = 1e-6


def beyond_rounding(nats: float) -> float:
    """A KL divergence as it is shown: 0 where what there is of it is rounding.

    >>> beyond_rounding(-4e-08), beyond_rounding(-0.0), beyond_rounding(0.25), beyond_rounding(-0.01)
    (0.0, 0.0, 0.25, -0.01)
    """
    return 0.0 if abs(nats) < _LEAST_NATS else nats
