"""GRPO-HF: from human feedback. A proxy reward model is learnt from preferences, then GRPO raises its rewards.

Two phases, each of which is done when its model lies in its folder, so that a killed training goes on in the right one:
``proxy/`` is a Bradley-Terry reward model (``preference.reward_model``) of comparisons: of the policy's samples by the
task's reward, or of a file of preferences; ``model/`` is the policy, trained by TRL's GRPOTrainer. Sampling is ours
(draws belong to a problem, a sample and a step, whatever the batch), and so is what is learnt from: one generation a
step, so that the ratio of GRPO is 1 and each step is on-policy. With group rewards r_1..r_G the advantages are
(r_i - mean) / (std + 1e-4), and kl_coef weighs the k3 estimate of the KL divergence from the reference (Shao et al.
2024, 2402.03300).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.models.memory.training_job import Method
from gpuherd.posttrain.algos.dpo import of_samples
from gpuherd.posttrain.algos.on_trl import (
    policy_in,
    reference_module,
    rows_of_kind,
    trained_module,
)
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.preference.fitting import fit
from gpuherd.posttrain.preference.options import FittingOptions, run_of
from gpuherd.posttrain.preference.proxy import ProxyOptions, compared_by_people, load_proxy, train_proxy
from gpuherd.posttrain.preference.settings import Run, digest, order
from gpuherd.posttrain.types import Algorithm, Collecting, Comparison, Policy, Row, Sampling, Training

if TYPE_CHECKING:
    from pathlib import Path

    from gpuherd.posttrain.engine.world import World
    from gpuherd.posttrain.rewards.reward_model import RewardModel
    from gpuherd.posttrain.types import Problem


class LossType(StrEnum):
    """By what the sum over tokens is divided: each completion's length, the batch's tokens, or a constant length."""

    GRPO = "grpo"
    DAPO = "dapo"
    DR_GRPO = "dr_grpo"


@dataclass(frozen=True, kw_only=True)
class Options(FittingOptions, ProxyOptions):
    """Beside ``ProxyOptions``. Raises UsageError.

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
        for name in ("samples_per_prompt", "samples_per_example"):
            if getattr(self, name) < 2:
                raise UsageError(f"{name}={getattr(self, name)}; the least is 2")
        if not 0 <= self.kl_coef < float("inf"):
            raise UsageError(f"kl_coef={self.kl_coef}; it is 0 or above")


@register
@dataclass(frozen=True)
class GRPOFromHumanFeedback(Algorithm):
    """A proxy reward model, then GRPO against it."""

    options: Options = field(default_factory=Options)

    name: ClassVar[str] = "GRPO-HF"
    on_policy: ClassVar[bool] = True
    memory: ClassVar[Method] = Method.GRPO
    Options: ClassVar[type[Options]] = Options

    def collect(self, work: Collecting) -> Iterator[Row]:
        """The best and the worst sample of each problem; nothing where a file of preferences is learnt from."""
        if self.options.preferences is not None:
            return
        from gpuherd.posttrain.rollout.sampler import Sampler

        sampler = Sampler(work.policy, work.precision, work.device, work.sampling)
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
        from gpuherd.posttrain.engine.world import World

        comparisons = self._comparisons(work)
        with World.from_environment(work.device):  # one group of processes for both phases
            proxy = train_proxy(work, comparisons, self.options)
            self._grpo(work, proxy, digest([each.to_dict() for each in comparisons]))
        return self.policy(work)

    def policy(self, work: Training) -> Policy:
        """The trained model, or the policy's model with the trained adapter."""
        return policy_in(work, self.options)

    def _comparisons(self, work: Training) -> Sequence[Comparison]:
        if self.options.preferences is None:
            return rows_of_kind(work, Comparison, self.name, all_rounds=self.options.all_rounds)
        return compared_by_people(self.options.preferences, work.policy, chat=work.sampling.use_chat_template)

    def _grpo(self, work: Training, proxy: Path, data: str) -> None:
        options = self.options
        problems = {each.id: each for each in work.problems}
        group = options.samples_per_prompt
        run = run_of(
            work,
            options,
            algorithm=self.name,
            rows=len(problems),
            data=data,
            sequences=group,
            besides={
                "problems": digest([asdict(each) for each in work.problems]),
                "sampling": {name: said for name, said in asdict(work.sampling).items() if name != "batch_size"},
            },
        )
        places = [work.problems[place].id for place in order(len(problems), run.total_steps, run.batch_size, work.seed)]

        def build(settings: dict[str, Any], callbacks: Sequence[Any], world: World) -> Any:
            from trl import GRPOConfig

            from gpuherd.posttrain.preference import trainers

            loaded = trained_module(work, options, [], world.device)
            score = load_proxy(proxy, world.device, work.reward_batch_size)
            samples = StepSamples(run, places, problems, group, work.sampling, loaded, world)
            return trainers.exploring(
                model=loaded.module,
                ref_model=reference_module(work, loaded.module, world.device) if options.kl_coef else None,
                args=trainers.on_one_device(
                    GRPOConfig(
                        **settings,
                        num_generations=group,
                        generation_batch_size=options.batch_size * group,
                        max_completion_length=work.sampling.max_new_tokens,
                        temperature=work.sampling.temperature,
                        beta=options.kl_coef,
                        num_iterations=1,
                        loss_type=str(options.loss_type),
                        scale_rewards="group",
                        use_bias_correction_kl=False,
                        mask_truncated_completions=False,
                        shuffle_dataset=False,
                        disable_dropout=False,  # the model's own is off; an adapter's is as it was asked for
                    )
                ),
                train_dataset=trainers.dataset_of([{"prompt": each} for each in places], range(len(places))),
                processing_class=loaded.tokenizer,
                callbacks=list(callbacks),
                rollout_func=samples.rollouts,
                reward_funcs=[proxy_reward(score, samples)],
            )

        fit(run, build)


class StepSamples:
    """Samples for TRL: it names the problems of a step, and is given tokens.

    Attributes:
        prompt_ids: of each problem, by its id.
    """

    def __init__(
        self,
        run: Run,
        places: Sequence[str],
        problems: Mapping[str, Problem],
        group: int,
        sampling: Sampling,
        loaded: Any,
        world: World,
    ):
        """``places``: the problem at each place of all steps."""
        from gpuherd.posttrain.rollout.prompting import Prompting

        self._run, self._places, self._group, self._world = run, places, group, world
        self._sampling, self._loaded = sampling, loaded
        prompting = Prompting(loaded.tokenizer, chat=sampling.use_chat_template)
        self.prompt_ids = {name: prompting.of(each) for name, each in problems.items()}

    def rollouts(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """What TRL wants for these problems, each named as often as its group has completions: tokens of prompts and
        completions. Of one step and this process."""
        import torch

        from gpuherd.posttrain.rollout.sampler import Prefix, Sampler

        step = trainer.state.global_step
        shares = self._shares(step)
        if [name for name, _ in shares for _ in range(self._group)] != list(prompts):
            raise GpuherdError(f"TRL asked for other problems in step {step + 1} than those that stand there")
        module = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        sampler = Sampler.over(module, self._loaded.tokenizer, self._sampling, amp_dtype=self._run.amp_dtype)
        prefixes = [Prefix(f"{name}\nstep {step}.{again}", self.prompt_ids[name]) for name, again in shares]
        with torch.no_grad():
            groups = sampler.continuations(prefixes, self._group)
        return {
            "prompt_ids": [list(self.prompt_ids[name]) for name in prompts],
            "completion_ids": [list(each.ids) for group in groups for each in group],
            "logprobs": None,  # those of the first pass are taken: with one generation a step they are the same
        }

    def _shares(self, step: int) -> list[tuple[str, int]]:
        """This process's problems of a step, and how often each stood there before: at the end of a shuffle a problem
        may stand in a step twice."""
        seen: Counter[str] = Counter()
        shares: list[tuple[str, int]] = []
        for name in self._places[step * self._run.batch_size : (step + 1) * self._run.batch_size]:
            shares.append((name, seen[name]))
            seen[name] += 1
        each = len(shares) // self._world.size
        return shares[self._world.rank * each : (self._world.rank + 1) * each]


def proxy_reward(score: RewardModel, samples: StepSamples) -> Any:
    """TRL's reward function: the proxy's score of prompt and completion, token by token as they were sampled."""

    def proxy(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        rows = [[*samples.prompt_ids[name], *ids] for name, ids in zip(prompts, completion_ids, strict=True)]
        return score.scores_of_ids(rows)

    return proxy
