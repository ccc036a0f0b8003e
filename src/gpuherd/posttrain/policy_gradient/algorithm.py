"""What all algorithms that learn by sampling have in common: their options, how they collect, train and end.

Plain frozen data, checked, no torch: options are read by commands that start at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd import atomic
from gpuherd.errors import UsageError
from gpuherd.models.memory.training_job import Method
from gpuherd.posttrain.config.typed import at_least, check_range
from gpuherd.posttrain.engine.options import Lora, Optimised, Watching
from gpuherd.posttrain.rollout.mismatch import Correction
from gpuherd.posttrain.types import Algorithm, BackendName, Collecting, Policy, Rollout, Row, Training

if TYPE_CHECKING:
    from gpuherd.posttrain.policy_gradient.rollout_trainer import RolloutTrainer
    from gpuherd.posttrain.rollout.sampler import RolloutBackend
    from gpuherd.posttrain.types import Problem, Task

MODEL = "model"
_ADAPTER = "adapter_config.json"

# Micro-batches whose log-probs are computed at once without gradients: none are kept, so more than are learnt from.
ASKED_AT_ONCE = 4

# Of an option that came later: checkpoints of before, which don't have it, go on where it is at its default.
LATER: Mapping[str, Any] = {"later": True}


class LossType(StrEnum):
    """By what the sum over tokens is divided; the names are TRL's."""

    GRPO = "grpo"  # the tokens of each answer, then the answers (arXiv 2402.03300, eq. 3)
    DAPO = "dapo"  # all tokens of all answers (arXiv 2503.14476, eq. 8)
    DR_GRPO = "dr_grpo"  # the answers times the most tokens that one may have (arXiv 2503.20783)
    GSPO = "gspo"  # as grpo, with one ratio for all tokens of an answer (arXiv 2507.18071, eq. 5 to 7)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Optimised):
    """Of algorithms whose training samples, in addition to ``Optimised``. Raises UsageError.

    Attributes:
        samples_per_prompt: rollouts of each problem: a group.
        batch_size: problems of a step (of sampling and learning).
        epochs: passes over the round's problems.
        max_steps: no more steps than these; None: as many as the epochs have.
        minibatch_size: rollouts of one optimiser step; None: all of the step.
        loss_type: by what the sum over tokens is divided.
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
    save_every: int = 10
    lora: Lora | None = None

    def __post_init__(self) -> None:
        at_least(self, samples_per_prompt=1, batch_size=1, epochs=1, max_steps=1, minibatch_size=1, save_every=1)
        _ = self.optimiser  # refuses what is out of range
        if self.loss_type == LossType.GSPO and not self._clips_answers:
            raise UsageError("loss_type=gspo: it clips the ratio of whole answers, as GRPO alone does; choose another")

    minibatches: ClassVar[bool] = True  # a step may have several optimiser steps
    _clips_answers: ClassVar[bool] = False  # the loss knows a ratio that all tokens of an answer share


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(SamplingOptions):
    """Of policy gradients, in addition to ``SamplingOptions``. Raises UsageError.

    Attributes:
        kl_coef: weight of the KL divergence from the reference; at 0 none is loaded.
        online: the training samples with the policy as it is, step by step. False: it learns from what the round's
            jobs have collected with the policy of the round before.
        sampler_correction: how the loss of a token is weighed by w, its probability under the policy before the step
            over the recorded one of the sampler (``rollout.mismatch``); None: ``token`` where vLLM samples what is
            learnt from, ``none`` where transformers does.
        sampler_clip: the largest weight; of the masked forms also 1 over the least.
    """

    kl_coef: float = 0.05
    online: bool = True
    sampler_correction: Correction | None = field(default=None, metadata=LATER)
    sampler_clip: float = field(default=2.0, metadata=LATER)

    def __post_init__(self) -> None:
        check_range(self, "kl_coef", 0)
        check_range(self, "sampler_clip", 1)
        super().__post_init__()

    def correction(self, backend: BackendName) -> Correction:
        """The correction of what is learnt from, where it is decoded by this backend."""
        if self.sampler_correction is not None:
            return self.sampler_correction
        return Correction.TOKEN if backend is BackendName.VLLM else Correction.NONE


class PolicyGradient(Algorithm):
    """Samples, and learns from what its samples earn. A subclass says how, in ``learn``."""

    on_policy: ClassVar[bool] = True
    memory: ClassVar[Method] = Method.GRPO
    Options: ClassVar[type[SamplingOptions]]

    def __init__(self, options: Any = None):
        self.options = self.Options() if options is None else options

    @property
    def samples(self) -> bool:
        """Where the training is online."""
        return bool(self.options.online)

    def collect(self, work: Collecting) -> Iterator[Row]:
        """``samples_per_prompt`` answers of the policy to each problem, in their order, to be learnt from with
        ``online=False``; nothing where the training samples by itself."""
        return collected(work, self.options.samples_per_prompt) if self.collects else iter(())

    def train(self, work: Training) -> Policy:
        """See ``Algorithm.train``."""
        if not is_finished(work.folder):
            from gpuherd.posttrain.policy_gradient.rollout_trainer import RolloutTrainer

            with RolloutTrainer(work, self.options, self.name, **self.learning(work)) as trainer:
                self.learn(trainer)
        return self.policy(work)

    def policy(self, work: Training) -> Policy:
        """The trained model, or the adapter on the model that it was trained on."""
        model = work.folder / MODEL
        if (model / _ADAPTER).is_file():
            return Policy(work.policy.model, str(model))
        return Policy(str(model))

    def learning(self, work: Training) -> dict[str, Any]:
        """How ``RolloutTrainer`` is made, by the names of its arguments."""
        options = self.options
        correction = options.correction(work.backend)
        return {"online": options.online, "kl_coef": options.kl_coef, "correction": correction}

    @abstractmethod
    def learn(self, trainer: RolloutTrainer) -> None:
        """The steps that are left, each ended by ``trainer.finish``."""


def is_finished(folder: Path) -> bool:
    """Whether a training has come to its end here."""
    atomic.settle(folder / MODEL)
    return (folder / MODEL).is_dir()


def collected(work: Collecting, samples: int) -> Iterator[Rollout]:
    """So many answers of the policy to each problem, in their order."""
    if not work.problems:
        return
    from gpuherd.posttrain.rollout.sampler import sampler_of

    sampler = sampler_of(work)
    at_once = max(1, work.sampling.batch_size // samples)
    for start in range(0, len(work.problems), at_once):
        yield from sampler.rollouts(
            work.task,
            work.problems[start : start + at_once],
            samples,
            stream=f"round {work.round}",
            reward_batch_size=work.reward_batch_size,
        )


Roll = Callable[["RolloutBackend", "Sequence[Problem]", int, str], "list[Rollout]"]


@dataclass(frozen=True, slots=True)
class Hooks(Watching):
    """What a caller of ``train`` may put in: ``Training.extra["hooks"]``. Nothing of it changes what is learnt but
    ``roll``.

    Attributes:
        roll: makes rollouts of problems instead of ``RolloutBackend.rollouts`` (episodes of an environment): sampler,
            problems, samples of each, stream of the draws.
        turns: answers of an episode, at most.
        evaluate: figures to be logged with a step; called after every ``evaluate_every`` steps in all processes, while
            each has the whole policy.
    """

    roll: Roll | None = None
    turns: int = 1
    evaluate: Callable[[RolloutBackend, int], Mapping[str, float]] | None = None
    evaluate_every: int = 0

    def __post_init__(self) -> None:
        at_least(self, save_every=1, keep=1, log_every=1)


def plain_roll(task: Task | None, reward_batch_size: int, *, greedy: bool = False) -> Roll:
    """Rollouts of one turn, drawn (or the most probable ones) and scored by the task. Raises UsageError without one."""
    if task is None:
        raise UsageError("online=true: the training samples and scores by itself, and was given no task")

    def roll(sampler: RolloutBackend, problems: Sequence[Problem], samples: int, stream: str) -> list[Rollout]:
        return sampler.rollouts(
            task, problems, samples, greedy=greedy, stream=stream, reward_batch_size=reward_batch_size
        )

    return roll
