"""CD, controlled decoding: the baseline that is guided by the expected reward alone.

Mudgal et al. 2024, "Controlled Decoding from Language Models" (arXiv 2310.17022): V(x, y) = E[r | x, y] under pi_ref is
learnt by regression on the reference's completions (their CD-FUDGE), and pi(y|x) proportional to
pi_ref(y|x) exp(V/eta). That is the optimum of each token's own KL-regularised choice, not of the whole completion's: as
eta falls it takes a sure small reward before a rare large one (Q#'s Figure 4; ``tasks.tree_mdp``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Mode
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.guidance.collecting import reference_rollouts
from gpuherd.posttrain.guidance.options import Loss, ValueOptions
from gpuherd.posttrain.guidance.training import GuidedAlgorithm
from gpuherd.posttrain.types import Collecting, Row


@dataclass(frozen=True, kw_only=True)
class CDOptions(ValueOptions):
    """CD's: ``loss_type`` mse or bce (both are least at the expected reward), guidance by the expectation."""

    loss_type: Loss | None = Loss.MSE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in (Loss.MSE, Loss.BCE):
            raise UsageError(f"loss_type={self.loss_type}; CD predicts an expected reward: it is mse or bce")
        if self.guidance.mode not in (None, Mode.EXPECTATION):
            raise UsageError(f"guidance.mode={self.guidance.mode}; CD is guided by the expectation")

    def usual_mode(self, loss: Loss) -> Mode:  # noqa: ARG002 - CD has but one
        """The expectation."""
        return Mode.EXPECTATION


@register
class ControlledDecoding(GuidedAlgorithm):
    """See the module."""

    name: ClassVar[str] = "CD"
    Options: ClassVar[type[CDOptions]] = CDOptions

    def collect(self, work: Collecting) -> Iterator[Row]:
        """Rollouts of the reference; each round's are drawn anew."""
        return reference_rollouts(work, self.options.samples_per_example)
