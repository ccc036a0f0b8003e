"""Q#: the reference guided by a classifier that predicts the law of what the reference goes on to earn.

Zhou et al. 2025, "Q#: Provably Optimal Distributional RL for LLM Post-Training" (arXiv 2502.20548). The optimum of
E[r] - eta KL(pi || pi_ref) is pi(y|x) proportional to pi_ref(y|x) E[exp(Z/eta)], Z the reward-to-go under pi_ref: so Z
is learnt by maximum likelihood on the reference's completions, with no bootstrapping. Algorithm 1:

    for round k: draw h; pi_k writes h - 1 tokens, pi_ref the others; the tokens from h on are labelled with the reward;
                 fit Z on the data of all rounds; pi_(k+1) is pi_ref guided by Z
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.guidance.collecting import switched_rollouts
from gpuherd.posttrain.guidance.options import Loss, ValueOptions
from gpuherd.posttrain.guidance.training import GuidedAlgorithm
from gpuherd.posttrain.types import Collecting, Row


@dataclass(frozen=True, kw_only=True)
class QSharpOptions(ValueOptions):
    """Q#'s: the loss is ``bce`` where completions are right or wrong, else ``mle``; each round's classifier starts
    from the value model anew. (The paper: 5 epochs, lr 2e-5, weight_decay 0.01, 16 samples, 2 rounds.)"""

    loss_type: Loss | None = None


@register
class QSharp(GuidedAlgorithm):
    """See the module."""

    name: ClassVar[str] = "QSharp"
    aliases: ClassVar[tuple[str, ...]] = ("q#",)
    Options: ClassVar[type[QSharpOptions]] = QSharpOptions

    def collect(self, work: Collecting) -> Iterator[Row]:
        """Rollouts, rolled in by the policy of the round before and out by the reference."""
        return switched_rollouts(work, self.options.samples_per_example)
