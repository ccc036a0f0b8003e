"""Options of value classifiers: how they are trained, used, and compared for. Plain frozen data, checked, no torch.
Names are those of PITA's configs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Guide, Kind, Mode
from gpuherd.posttrain.config.typed import check_range
from gpuherd.posttrain.engine.options import Optimised
from gpuherd.posttrain.types import Reward


class Loss(StrEnum):
    """The loss that trains a classifier: see ``guidance.losses``."""

    BCE = "bce"
    MSE = "mse"
    MLE = "mle"  # a histogram of num_atoms rewards
    BRADLEY_TERRY = "bradley_terry"  # of comparisons alone


@dataclass(frozen=True, slots=True)
class Guidance:
    """How a classifier guides: ``lm.guidance.guide.Guide`` without the classifier.

    Attributes:
        eta: the papers': small guides strongly (PITA's code calls 1/eta eta).
        mode: None: the algorithm's own (``ValueOptions.usual_mode``).
        top_k: so many of the reference's most probable tokens are candidates.
        use_cache: what a classifier has read is kept; it can't be switched off, since the values are the same.
    """

    eta: float = 0.1
    mode: Mode | None = None
    top_k: int = 20
    use_cache: bool = True

    def __post_init__(self) -> None:
        if not self.use_cache:
            raise UsageError(
                "guidance.use_cache=false; guidance always keeps what the classifier has read: the values are equal to "
                "those read anew; leave the key out"
            )
        Guide("", self.eta, self.mode or Mode.BERNOULLI, self.top_k)  # refuses what is out of range


@dataclass(frozen=True, kw_only=True)
class ValueOptions(Optimised):
    """Options of all guided algorithms, on top of ``Optimised``. Raises UsageError.

    Attributes:
        samples_per_example: completions (or comparisons) of each problem in a round.
        epochs: passes over the data of all rounds.
        batch_size: completions or comparisons of an optimiser's step.
        max_batch_num_tokens: the most tokens of a step, padding counted; a longer completion goes alone.
        num_workers: processes that make tensors of the next batches; 0: none.
        loss_type: None: ``bce`` where the task says right or wrong, else ``mle``.
        classifier_type: ``v`` reads a token's value behind it, ``q`` before it, of all tokens at once.
        num_atoms, V_min, V_max: the histogram's, and what rewards that are not 0 or 1 are normalised to.
        warm_start: go on with the classifier of the round before, and not with the value model anew.
        validation_share: the share of problems held out for validation; 0: none.
        save_every: steps from one checkpoint to the next.
        guidance: how the classifier is used.
    """

    samples_per_example: int = 4
    epochs: int = 10
    batch_size: int = 16
    max_batch_num_tokens: int = 16384
    num_workers: int = 0
    lr: float = 2e-5
    loss_type: Loss | None = Loss.BCE
    classifier_type: Kind = Kind.V
    num_atoms: int = 11
    V_min: float = 0.0
    V_max: float = 1.0
    warm_start: bool = False
    validation_share: float = 0.1
    save_every: int = 200
    guidance: Guidance = field(default_factory=Guidance)

    def __post_init__(self) -> None:
        for name in ("samples_per_example", "epochs", "batch_size", "max_batch_num_tokens", "save_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}; the least is 1")
        if self.num_workers < 0:
            raise UsageError(f"num_workers={self.num_workers}; the least is 0")
        _ = self.optimiser  # refuses what is out of range
        if not 0 <= self.validation_share < 1:
            raise UsageError(f"validation_share={self.validation_share}; it is from 0 to under 1")
        check_range(self, "num_atoms", 2)
        if not (math.isfinite(self.V_min) and math.isfinite(self.V_max) and self.V_min < self.V_max):
            raise UsageError(f"V_min={self.V_min}, V_max={self.V_max}; finite numbers, the first below the second")
        if self.loss_type is Loss.MLE:
            if self.guidance.mode is Mode.BERNOULLI:
                raise UsageError("guidance.mode=bernoulli is for a loss of one logit, and loss_type is mle")
            return
        if self.loss_type is not None and self.guidance.mode is Mode.DISTRIBUTIONAL:
            raise UsageError(f"guidance.mode=distributional is for loss_type=mle, and it is {self.loss_type}")
        if (self.V_min, self.V_max) != (0, 1) and self.loss_type is not None:
            raise UsageError(f"V_min={self.V_min}, V_max={self.V_max}: loss_type={self.loss_type} predicts 0 to 1")

    def usual_mode(self, loss: Loss) -> Mode:
        """The mode of guidance where ``guidance.mode`` is None."""
        return Mode.DISTRIBUTIONAL if loss is Loss.MLE else Mode.BERNOULLI

    def guide(self, classifier: str, loss: Loss) -> Guide:
        """A guide by this classifier, which was trained by this loss."""
        chosen = self.guidance
        return Guide(classifier, chosen.eta, chosen.mode or self.usual_mode(loss), chosen.top_k)


@dataclass(frozen=True, kw_only=True)
class ComparingOptions(ValueOptions):
    """Options of algorithms that learn from comparisons, and which of two completions is preferred. Raises UsageError.

    Attributes:
        bradley_terry_sampling: preferences are drawn with the probability sigmoid(bradley_terry_beta (score_a -
            score_b)); else the higher score is preferred, and equal scores prefer none.
        bradley_terry_beta: how sharply.
        correct_bonus: added to the reward of a right completion.
        first_cut: 1: no answer is cut before its first token, so that nothing is learnt of that one (as PITA's code);
            0: answers are cut there too.
    """

    bradley_terry_sampling: bool = True
    bradley_terry_beta: float = 1.0
    correct_bonus: float = 5.0
    first_cut: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.bradley_terry_beta < math.inf:
            raise UsageError(f"bradley_terry_beta={self.bradley_terry_beta}; it is above 0")
        if not math.isfinite(self.correct_bonus):
            raise UsageError(f"correct_bonus={self.correct_bonus}; it is a finite number")
        if self.first_cut not in (0, 1):
            raise UsageError(f"first_cut={self.first_cut}; it is 0, before the first token, or 1, behind it")

    def score(self, reward: Reward) -> float:
        """The number by which a completion is compared."""
        return reward.value + (self.correct_bonus if reward.correct else 0.0)

    def prefers_first(self, score_a: float, score_b: float, draw: float) -> bool | None:
        """Whether y_a is preferred to y_b; None where neither is.

        Args:
            draw: a number in [0, 1) of the comparison's own.
        """
        if self.bradley_terry_sampling:
            return draw < _sigmoid(self.bradley_terry_beta * (score_a - score_b))
        return None if score_a == score_b else score_a > score_b


def _sigmoid(x: float) -> float:
    """1 / (1 + e^-x) for any x.

    >>> _sigmoid(0.0), _sigmoid(-1e4), _sigmoid(1e4)
    (0.5, 0.0, 1.0)
    """
    return (1 + math.tanh(x / 2)) / 2
