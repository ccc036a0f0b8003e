"""What all policy-gradient algorithms are told: plain frozen data, checked, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.options import Lora, Optimised, Watching, check_range
from gpuherd.posttrain.policy_gradient.losses import LossType

if TYPE_CHECKING:
    from gpuherd.posttrain.rollout.sampler import Sampler
    from gpuherd.posttrain.types import Problem, Rollout, Task


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(Optimised):
    """Beside ``Optimised``. Raises UsageError.

    Attributes:
        samples_per_prompt: rollouts of each problem: a group.
        batch_size: problems of a step (of sampling and learning).
        epochs: passes over the round's problems.
        max_steps: no more steps than these; None: as many as the epochs have.
        minibatch_size: rollouts of one optimiser step; None: all of the step.
        loss_type: by what the sum over tokens is divided.
        kl_coef: weight of the KL divergence from the reference; at 0 none is loaded.
        online: the training samples with the policy as it is, step by step. False: it learns from what the round's
            jobs have collected with the policy of the round before.
        save_every: steps between checkpoints.
        lora: an adapter is trained; None: all weights (or the adapter that the policy has already).
    """

    samples_per_prompt: int = 4
    batch_size: int = 16
    epochs: int = 1
    max_steps: int | None = None
    minibatch_size: int | None = None
    lr: float = 1e-6
    loss_type: LossType = LossType.DAPO
    kl_coef: float = 0.05
    online: bool = True
    save_every: int = 10
    lora: Lora | None = None

    def __post_init__(self) -> None:
        for name in ("samples_per_prompt", "batch_size", "epochs", "max_steps", "minibatch_size", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}; the least is 1")
        check_range(self, "kl_coef", 0)
        _ = self.optimiser  # refuses what is out of range


Roll = Callable[["Sampler", "Sequence[Problem]", int, str], "list[Rollout]"]

# Micro-batches whose log-probs are asked at once without gradients: none are kept, so more than are learnt from.
ASKED_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Hooks(Watching):
    """What a caller of ``train`` may put in: ``Training.extra["hooks"]``. Nothing of it changes what is learnt but
    ``roll``.

    Attributes:
        roll: makes rollouts of problems instead of ``Sampler.rollouts`` (episodes of an environment): sampler,
            problems, samples of each, stream of the draws.
        evaluate: figures to be logged with a step; called after every ``evaluate_every`` steps in all processes, while
            each has the whole policy.
    """

    roll: Roll | None = None
    evaluate: Callable[[Sampler, int], Mapping[str, float]] | None = None
    evaluate_every: int = 0

    def __post_init__(self) -> None:
        for name in ("save_every", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}; the least is 1")


def plain_roll(task: Task | None, reward_batch_size: int, *, greedy: bool = False) -> Roll:
    """Rollouts of one turn, drawn (or the most probable ones) and scored by the task. Raises UsageError without one."""
    if task is None:
        raise UsageError("online=true: the training samples and scores by itself, and was given no task")

    def roll(sampler: Sampler, problems: Sequence[Problem], samples: int, stream: str) -> list[Rollout]:
        return sampler.rollouts(
            task, problems, samples, greedy=greedy, stream=stream, reward_batch_size=reward_batch_size
        )

    return roll
