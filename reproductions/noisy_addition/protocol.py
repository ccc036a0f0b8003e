"""What is run, fixed before any method was, and when a base counts. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuherd.lm.guidance.guide import Kind
from reproductions.comparison import Budget
from reproductions.imitation import Shape

METHODS = ("next-token", "REINFORCE", "RPO", "RPO 0.0001", "DPO", "DPO 0.0001", "GRPO", "PPO", "CD", "Q#", "PITA")


@dataclass(frozen=True)
class Phase:
    """Of the base's training: so many steps (in the last phase: at most) at this learning rate.

    Attributes:
        wrong: share of wrong labels, drawn anew each time.
    """

    steps: int
    lr: float
    wrong: float = 0.0


@dataclass(frozen=True)
class Protocol:
    """Sums of two numbers of up to two digits.

    Attributes:
        problems: sums to learn from, of the base and of the methods.
        phases: of the base: it learns sums, settles, and then imitates labels of which half are wrong.
        batch: sums of a step of the base.
        look_every: steps of the last phase between the bases that are looked at.
        shape: of the model, 0.08 M parameters.
        test, heldout: sums of the test, each answered once at temperature 1, and those that decide whether a base
            counts.
    """

    budget: Budget = field(
        default_factory=lambda: Budget(steps=400, sequences=80, max_new_tokens=4, beta=1.0, kind=Kind.Q, passes=2)
    )
    problems: int = 8_000
    phases: tuple[Phase, ...] = (Phase(900, 3e-3), Phase(150, 5e-4), Phase(400, 1e-4, 0.5))
    batch: int = 256
    look_every: int = 10
    shape: Shape = field(default_factory=lambda: Shape(width=64, layers=2, positions=16))
    test: int = 1_000
    heldout: int = 500


# A base counts where it says sums right half of the time. Methods' results have no part in this.
HALF_WITHIN = 0.05  # the probability that it gives to the right answer, on average


@dataclass(frozen=True)
class Looked:
    """A checkpoint on held-out sums.

    Attributes:
        step: of the last phase.
        likeliest: how often its likeliest answer is right.
        right: the mean probability of the right answer, its end included.
    """

    step: int
    likeliest: float
    right: float
    cpu_s: float

    @property
    def passes(self) -> bool:
        """Whether it says sums right half of the time."""
        return abs(self.right - 0.5) < HALF_WITHIN


def chosen_base(looked: Sequence[Looked]) -> Looked | None:
    """The first checkpoint that passes, at which training ends; None where none does."""
    return next((each for each in looked if each.passes), None)
