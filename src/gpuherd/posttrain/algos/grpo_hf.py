"""GRPO-HF: from human feedback. A proxy reward model is learnt from preferences, then GRPO raises its rewards.

Two phases, each of which is done when its model lies in its folder, so that a killed training goes on in the right one:
``proxy/`` is a Bradley-Terry reward model (``preference.reward_model``) of comparisons: of the policy's samples by the
task's reward, or of a file of preferences; ``model/`` is the policy, trained by GRPO (``algos.grpo``) on what the proxy
says of its own samples, token by token as they were drawn. One pass over each step's samples, so that each is
on-policy and the ratio of GRPO is 1; kl_coef weighs the k3 estimate of the KL divergence from the reference (Shao et
al. 2024, 2402.03300).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd.atomic import atomic_write, settle
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.models.memory.training_job import Method
from gpuherd.posttrain.algos.dpo import of_samples
from gpuherd.posttrain.algos.from_rows import FittingOptions, identity_of, policy_in, rows_of_kind
from gpuherd.posttrain.algos.grpo import GRPO, GRPOOptions
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.config.typed import at_least
from gpuherd.posttrain.engine.fit import digest, is_finished, model_folder, refuse_another, save_every_for, steps_for
from gpuherd.posttrain.engine.options import hooks_of
from gpuherd.posttrain.policy_gradient import algorithm
from gpuherd.posttrain.policy_gradient.algorithm import Hooks, Roll
from gpuherd.posttrain.preference.proxy import ProxyOptions, compared_by_people, load_proxy, train_proxy
from gpuherd.posttrain.types import Algorithm, Collecting, Comparison, Policy, Reward, Rollout, Row, Training

if TYPE_CHECKING:
    from pathlib import Path

    from gpuherd.posttrain.engine.dist_env import DistEnv
    from gpuherd.posttrain.rewards.reward_model import RewardModel
    from gpuherd.posttrain.rollout.sampler import RolloutBackend
    from gpuherd.posttrain.types import Problem

_BEGUN = "training.json"  # next to the trained model's folder: what the training in here is of


class LossType(StrEnum):
    """By what the sum over tokens is divided: each completion's length, the batch's tokens, or a constant length."""

    GRPO = "grpo"
    DAPO = "dapo"
    DR_GRPO = "dr_grpo"


@dataclass(frozen=True, kw_only=True)
class Options(FittingOptions, ProxyOptions):
    """In addition to ``ProxyOptions``. Raises UsageError.

    Attributes:
        batch_size: problems of a step; each has a group of samples.
        samples_per_prompt: completions of a group.
        kl_coef: weight of the KL divergence from the reference; at 0 none is loaded.
        loss_type: by what the sum over tokens is divided.
        samples_per_example: completions of a problem that are compared in ``collect``: the best with the worst.
        all_rounds: the proxy learns from the comparisons of all rounds, not of the last alone.
    """

    lr: float = 1e-6
    batch_size: int = 8
    samples_per_prompt: int = 4
    kl_coef: float = 0.05
    loss_type: LossType = LossType.GRPO
    samples_per_example: int = 4
    all_rounds: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_proxy()
        at_least(self, samples_per_prompt=2, samples_per_example=2, kl_coef=0)


@register
@dataclass(frozen=True)
class GRPOFromHumanFeedback(Algorithm):
    """A proxy reward model, then GRPO against it."""

    options: Options = field(default_factory=Options)

    name: ClassVar[str] = "GRPO-HF"
    on_policy: ClassVar[bool] = True
    memory: ClassVar[Method] = Method.GRPO
    Options: ClassVar[type[Options]] = Options

    @property
    def samples(self) -> bool:
        """Always: against the proxy."""
        return True

    def collect(self, work: Collecting) -> Iterator[Row]:
        """The best and the worst sample of each problem; nothing where a file of preferences is learnt from."""
        if self.options.preferences is not None:
            return
        from gpuherd.posttrain.rollout.sampler import sampler_of

        sampler = sampler_of(work)
        yield from of_samples(sampler, work, self.options.samples_per_example)

    def train(self, work: Training) -> Policy:
        """The proxy first, then the policy."""
        if work.steps is not None and work.steps.shards:
            raise UsageError(
                "GRPO-HF samples while it trains, each process at its own pace: strategy fsdp can't; use ddp"
            )
        if len(work.problems) < self.options.batch_size:
            raise UsageError(
                f"GRPO-HF: batch_size {self.options.batch_size} is more than the {len(work.problems)} problems of the "
                "round"
            )
        from gpuherd.posttrain.engine.dist_env import DistEnv

        comparisons = self._comparisons(work)
        identity = {
            **identity_of(work, self.options, self.name, digest([each.to_dict() for each in comparisons])),
            "problems": digest([_identity(each) for each in work.problems]),
            "sampling": {name: said for name, said in asdict(work.sampling).items() if name != "batch_size"},
        }
        with DistEnv.from_environment(work.device) as world:  # one group of processes for both phases
            if not _is_finished(work.folder, identity, world):
                proxy = train_proxy(work, comparisons, self.options, num_workers=self.options.num_workers)
                self._grpo(work, load_proxy(proxy, world.device, work.reward_batch_size))
        return self.policy(work)

    def policy(self, work: Training) -> Policy:
        """The trained model, or the policy's model with the trained adapter."""
        return policy_in(work, self.options.lora)

    def _comparisons(self, work: Training) -> Sequence[Comparison]:
        if self.options.preferences is None:
            return rows_of_kind(work, Comparison, self.name, all_rounds=self.options.all_rounds)
        return compared_by_people(self.options.preferences, work.policy, chat=work.sampling.use_chat_template)

    def _grpo(self, work: Training, proxy: RewardModel) -> None:
        options = self.options
        steps = steps_for(len(work.problems), options.epochs, options.batch_size, options.max_steps)
        same = {each.name: getattr(options, each.name) for each in fields(GRPOOptions) if hasattr(options, each.name)}
        own = {
            "loss_type": algorithm.LossType(options.loss_type),
            "kl_correction": False,
            "save_every": save_every_for(steps, options.save_every),
        }
        hooks = replace(hooks_of(work, Hooks()), roll=scored_by(proxy))
        GRPO(GRPOOptions(**{**same, **own})).train(replace(work, extra={**work.extra, "hooks": hooks}))


def _is_finished(folder: Path, identity: dict[str, Any], world: DistEnv) -> bool:
    """Whether the training in this folder has ended; notes what it is of where it begins. Raises UsageError where it is
    another one, CannotWrite."""
    if world.is_main:
        settle(model_folder(folder))
    world.barrier()
    if is_finished(folder, identity):  # by an earlier version, which left its record in the model's folder
        return True
    path = folder / _BEGUN
    there = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    world.barrier()
    if there is not None:
        refuse_another(folder, there["identity"], identity)
    elif world.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, json.dumps({"identity": identity}).encode() + b"\n")
        except OSError as problem:
            raise CannotWrite(f"can't write {path}: {problem.strerror}") from None
    world.barrier()
    return model_folder(folder).is_dir()


def scored_by(proxy: RewardModel) -> Roll:
    """Rollouts of one turn whose reward is the proxy's score of their own tokens, the prompt's included."""

    def roll(sampler: RolloutBackend, problems: Sequence[Problem], samples: int, stream: str) -> list[Rollout]:
        from gpuherd.posttrain.rollout.sampler import Prefix, rollout_of

        prompts = [sampler.prompt_ids(each) for each in problems]
        prefixes = [Prefix(f"{each.id}\n{stream}", prompt) for each, prompt in zip(problems, prompts, strict=True)]
        drawn = [
            (problem, number, prompt, answer)
            for problem, prompt, group in zip(problems, prompts, sampler.continuations(prefixes, samples), strict=True)
            for number, answer in enumerate(group)
        ]
        scores = proxy.scores_of_ids([(*prompt, *answer.ids) for _, _, prompt, answer in drawn])
        return [rollout_of(*each, Reward(score)) for each, score in zip(drawn, scores, strict=True)]

    return roll


def _identity(problem: Problem) -> dict[str, Any]:
    """What tells a problem apart. Trainings of before there were conversations have no ``messages`` and no ``chat``."""
    return {name: value for name, value in asdict(problem).items() if name not in ("messages", "chat") or value}
