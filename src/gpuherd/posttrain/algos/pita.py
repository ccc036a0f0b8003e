"""PITA: the reference guided by a classifier that has learnt from preferences alone.

Bobbili et al. 2025, "PITA: Preference-Guided Inference-Time Alignment" (arXiv 2507.20067), and its code. The policy is
proportional to pi_ref(y|x) E[exp(Psi(P(y > y_ref)) / eta)], Psi the logit under Bradley and Terry, so that a preference
over the reference's greedy completion y_ref takes the place of a reward. Each round:

    the policy of the round before answers greedily; the answer is cut; the reference ends it greedily and by a draw;
    one of the two ends is preferred; its tokens are labelled 1, the other's 0; the classifier of the round before is
    trained on with the data of all rounds
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.guidance.collecting import comparisons
from gpuherd.posttrain.guidance.data import of_comparisons
from gpuherd.posttrain.guidance.options import ComparingOptions
from gpuherd.posttrain.guidance.training import GuidedAlgorithm, train_guide
from gpuherd.posttrain.types import Collecting, Policy, Row, Training


@dataclass(frozen=True, kw_only=True)
class PITAOptions(ComparingOptions):
    """PITA's: the classifier of the round before is trained on."""

    warm_start: bool = True


@register
class PITA(GuidedAlgorithm):
    """See the module."""

    name: ClassVar[str] = "PITA"
    Options: ClassVar[type[PITAOptions]] = PITAOptions

    def collect(self, work: Collecting) -> Iterator[Row]:
        """Comparisons of two ends of the policy's greedy answers."""
        return comparisons(work, self.options)

    def train(self, work: Training) -> Policy:
        """Fits the classifier on the data of all rounds."""
        return train_guide(of_comparisons(work.rows, self.options), work, self.options)
