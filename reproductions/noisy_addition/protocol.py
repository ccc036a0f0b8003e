"""What is run, fixed before any method was, and when a base counts. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from reproductions.comparison import Budget
from reproductions.imitation import Shape

METHODS = ("next-token", "REINFORCE", "RPO", "DPO", "GRPO", "PPO", "CD", "Q#", "PITA")


@dataclass(frozen=True)
class Protocol:
    """Sums of two numbers of up to two digits.

    Attributes:
        problems: sums to learn from, of the base and of the methods.
        wrong_labels: share of the base's labels.
        base_steps, base_batch, base_lr: of the base; constant after 50 steps of warm-up, AdamW, weight decay 0.1.
        checkpoint_every: steps between the bases that are looked at.
        shape: of the model, 0.08 M parameters.
        test, heldout: sums of the test, each answered once at temperature 1, and those that decide whether a base
            counts.
    """

    budget: Budget = field(default_factory=lambda: Budget(steps=200, sequences=80, max_new_tokens=4))
    problems: int = 8_000
    wrong_labels: float = 0.5
    base_steps: int = 3_000
    base_batch: int = 256
    base_lr: float = 2e-3
    checkpoint_every: int = 250
    shape: Shape = field(default_factory=lambda: Shape(width=64, layers=2, positions=16))
    test: int = 1_000
    heldout: int = 500


# A base counts where it knows sums and says them half of the time. Methods' results have no part in this.
KNOWN_ABOVE = 0.95  # of its likeliest answers are right
SAID_WITHIN = 0.05  # of the share of right labels: the probability that it gives to the right answer, on average


@dataclass(frozen=True)
class Looked:
    """A checkpoint on held-out sums.

    Attributes:
        likeliest: how often its likeliest answer is right.
        right: the mean probability of the right answer, its end included.
    """

    step: int
    likeliest: float
    right: float
    cpu_s: float

    def passes(self, protocol: Protocol) -> bool:
        """Whether it knows sums and says them as often as its labels did."""
        return self.likeliest > KNOWN_ABOVE and abs(self.right - (1 - protocol.wrong_labels)) < SAID_WITHIN


def chosen_base(protocol: Protocol, looked: Sequence[Looked]) -> Looked | None:
    """The first checkpoint that passes, at which training ends; None where none does."""
    return next((each for each in looked if each.passes(protocol)), None)
