"""The truncated power law, p(x) ~ x^(-alpha) e^(-lambda x)."""

from __future__ import annotations

from gpuherd.esd.tails import TailDistribution

TAIL = TailDistribution(
    name="tpl",
    title="truncated power law",
    help="fit a truncated power law too (needs gpuherd[tpl])",
    figures={
        "alpha": "exponent of the truncated power law λ^−alpha e^(−lambda λ)",
        "lambda": "rate of decay of the truncated power law",
        "xmin": "eigenvalue from which on the truncated power law is fitted",
        "D": "one-sided Kolmogorov-Smirnov distance of the truncated power law",
    },
    module="gpuherd.esd.fits.truncated_power_law",
)
