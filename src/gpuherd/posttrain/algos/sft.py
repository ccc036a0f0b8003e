"""SFT: next-token training on demonstrations, on the policy's own best samples, or on whole episodes.

The loss of a step is the mean of -ln p over the trained tokens of its rows; prompts are never trained on. Of episodes
of several turns the policy's words can be learnt (behavioural cloning), the environment's (a model of the world), or
both, weighted. With both, the loss of a step is

    bc_weight * mean over the policy's tokens of -ln p + world_model_weight * mean over the others of -ln p

with means over all tokens of their kind in the step; a kind that a step has none of adds nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd.errors import UsageError
from gpuherd.models.memory.training_job import Method
from gpuherd.posttrain.algos.from_rows import FittingOptions, plan_of, policy_in, rows_of_kind, trained_module
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.config.typed import check_range
from gpuherd.posttrain.data.packing import attention_mask, pack, refusal
from gpuherd.posttrain.data.preference_rows import conversation_of
from gpuherd.posttrain.engine.fit import TrainSetup, digest, fit
from gpuherd.posttrain.types import Algorithm, Collecting, Policy, Reward, Rollout, Row, Training

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.dist_env import DistEnv
    from gpuherd.posttrain.engine.train_engine import Loss

logger = logging.getLogger(__name__)


class Source(StrEnum):
    """What is imitated."""

    ANSWERS = "answers"  # the first right answer of each problem; of a conversation all turns of the assistant
    SAMPLES = "samples"  # what the policy of the round before says itself


class Imitated(StrEnum):
    """Which tokens of an episode are learnt."""

    BEHAVIORAL_CLONING = "behavioral_cloning"  # what the policy said
    WORLD_MODEL = "world_model"  # what the environment answered
    COMBINED = "combined"


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the two kinds of tokens; one that is 0 is not trained on."""

    policy: float
    world: float

    def of(self, *, by_policy: bool) -> float:
        """Of a token."""
        return self.policy if by_policy else self.world


@dataclass(frozen=True, kw_only=True)
class Options(FittingOptions):
    """Raises UsageError.

    Attributes:
        source: what ``collect`` gives.
        samples_per_example: of each problem, where the policy's samples are imitated.
        mode: which tokens of an episode are learnt from.
        bc_weight, world_model_weight: of the two kinds, in mode ``combined``.
        filter_low_reward: rollouts that earned less than ``min_reward_threshold`` are left out, counted.
        packing: the rows of a micro-batch share sequences as long as the longest of them, without seeing each other:
            the same loss with less padding.
    """

    lr: float = 2e-5
    source: Source = Source.ANSWERS
    samples_per_example: int = 4
    mode: Imitated = Imitated.BEHAVIORAL_CLONING
    bc_weight: float = 0.5
    world_model_weight: float = 0.5
    filter_low_reward: bool = False
    min_reward_threshold: float = 0.0
    packing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "samples_per_example", 1)
        for name in ("bc_weight", "world_model_weight"):
            check_range(self, name, 0)
        if not math.isfinite(self.min_reward_threshold):
            raise UsageError(f"min_reward_threshold={self.min_reward_threshold}; it is a finite number")
        if self.mode == Imitated.COMBINED and not (self.bc_weight or self.world_model_weight):
            raise UsageError("mode=combined with bc_weight and world_model_weight both 0: nothing is learnt from")

    def identity(self) -> dict[str, Any]:
        """As of ``FittingOptions``; packing changes nothing but the order of additions."""
        return {name: value for name, value in super().identity().items() if name != "packing"}

    @property
    def weights(self) -> Weights:
        """Of the policy's tokens and of the environment's."""
        if self.mode == Imitated.COMBINED:
            return Weights(self.bc_weight, self.world_model_weight)
        return Weights(1.0, 0.0) if self.mode == Imitated.BEHAVIORAL_CLONING else Weights(0.0, 1.0)


@register
@dataclass(frozen=True)
class SFT(Algorithm):
    """Imitates."""

    options: Options = field(default_factory=Options)

    name: ClassVar[str] = "SFT"
    memory: ClassVar[Method] = Method.SFT
    Options: ClassVar[type[Options]] = Options

    @property
    def imitates(self) -> bool:
        """Not where it learns from the policy's samples."""
        return self.options.source == Source.ANSWERS

    def collect(self, work: Collecting) -> Iterator[Row]:
        """The demonstrations of this job's problems, or the policy's samples."""
        if self.imitates:
            yield from _demonstrations(work)
            return
        from gpuherd.posttrain.rollout.sampler import sampler_of

        sampler = sampler_of(work)
        yield from sampler.rollouts(
            work.task,
            work.problems,
            self.options.samples_per_example,
            stream=f"round {work.round}",
            reward_batch_size=work.reward_batch_size,
        )

    def train(self, work: Training) -> Policy:
        """Learns from this round's rollouts."""
        rollouts = chosen(rows_of_kind(work, Rollout, self.name), self.options)
        weights = self.options.weights
        data = digest([row_of(each, weights) for each in rollouts])
        plan = plan_of(work, self.options, algorithm=self.name, rows=len(rollouts), data=data)
        longest = max(len(each.prompt_ids) + len(each.ids) for each in rollouts)

        def build(world: DistEnv) -> TrainSetup[Rollout, Item]:
            loaded = trained_module(work, self.options.lora, longest, world)
            if self.options.packing:
                _refuse_packing(loaded.module, work.policy.model)
            objective = SFTObjective(weights, world.device, self.options.packing)
            return TrainSetup(loaded.module, loaded.tokenizer, objective)

        fit(plan, rollouts, build)
        return self.policy(work)

    def policy(self, work: Training) -> Policy:
        """The trained model, or the policy's model with the trained adapter."""
        return policy_in(work, self.options.lora)


@dataclass(frozen=True, slots=True)
class Item:
    """A rollout to be imitated: all its tokens, and by what each one's -ln p is multiplied."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SFTObjective:
    """SFT's loss, an ``engine.fit.Objective``."""

    weights: Weights
    device: str
    packing: bool = False

    def items(self, rows: Sequence[Rollout]) -> list[Item]:
        """With weights such that the mean over a step's items of their sums of weight times -ln p is its loss."""
        # Nothing stands before a row's first token, so that it has no probability.
        kinds = [own for each in rows for own in each.by_policy[0 if each.prompt_ids else 1 :]]
        share = {own: self.weights.of(by_policy=own) * len(rows) / max(1, kinds.count(own)) for own in (True, False)}
        items = []
        for each in rows:
            before = len(each.prompt_ids)
            weights = ([0.0] * before + [share[own] for own in each.by_policy])[1:]
            items.append(Item((*each.prompt_ids, *each.ids), (0.0, *weights)))
        return items

    def loss(self, module: Any, items: Sequence[Item]) -> Loss:
        """The sum over some items of a step."""
        import torch

        from gpuherd.posttrain.engine.log_probs import padded, token_log_probs
        from gpuherd.posttrain.engine.train_engine import Loss

        rows: list[Sequence[int]] = [each.ids for each in items]
        multipliers: list[Sequence[float]] = [each.weights for each in items]
        packing = None
        if self.packing:
            lengths = [len(each) for each in rows]
            sequences = pack(lengths, max(lengths))
            rows = [each.laid(rows, 0) for each in sequences]
            multipliers = [each.learnt(multipliers, 0.0) for each in sequences]
            dtype = next(weight.dtype for weight in module.parameters() if weight.is_floating_point())
            segments = torch.tensor([each.segments for each in sequences], device=self.device)
            positions = torch.tensor([each.position_ids for each in sequences], device=self.device)
            packing = positions, attention_mask(segments, dtype)
        ids, mask = padded(rows, self.device)
        width = ids.shape[1]
        weights = torch.tensor([[*each, *[0.0] * (width - len(each))] for each in multipliers], device=self.device)
        found = token_log_probs(module, ids, mask, weights != 0, packing=packing)
        count = (weights != 0).sum()
        return Loss(
            -(found.log_probs * weights).sum(),
            {"entropy": (found.entropies.sum(), count), "mean_token_accuracy": (found.top.sum(), count)},
        )


def _refuse_packing(module: Any, model: str) -> None:
    """Raises UsageError for a model whose layers would see from one row into another."""
    if (reason := refusal(module.config, module.config._attn_implementation)) is not None:
        raise UsageError(f"packing: {model} can't be packed: {reason}")


def row_of(rollout: Rollout, weights: Weights) -> dict[str, list[int]]:
    """What tells a rollout from others as data of a training: ``input_ids``, and ``labels`` with -100 for tokens that
    are not trained on."""
    trained = [
        token if weights.of(by_policy=own) else -100 for token, own in zip(rollout.ids, rollout.by_policy, strict=True)
    ]
    before = list(rollout.prompt_ids)
    return {"input_ids": [*before, *rollout.ids], "labels": [-100] * len(before) + trained}


def chosen(rollouts: Sequence[Rollout], options: Options) -> list[Rollout]:
    """The rollouts that are learnt from. Raises UsageError where none is left. Pure but for the log.

    Left out are those that earned too little, where that is asked for, and those without a token to be learnt.
    """
    good = [each for each in rollouts if not options.filter_low_reward or each.reward >= options.min_reward_threshold]
    kept = [each for each in good if any(options.weights.of(by_policy=own) for own in each.by_policy)]
    low, empty = len(rollouts) - len(good), len(good) - len(kept)
    counts = (
        f"{len(rollouts)} rollouts: {low} earned too little, {empty} have no token to be learnt in mode {options.mode}"
    )
    if not kept:
        raise UsageError(f"SFT: nothing to learn from: of {counts}")
    if low or empty:
        logger.info("SFT: learning from %d of %s", len(kept), counts)
    return kept


def _demonstrations(work: Collecting) -> Iterator[Rollout]:
    from gpuherd.posttrain.preference.tokens import Writing, load_tokenizer
    from gpuherd.posttrain.rollout.sampler import scored

    writing = Writing(load_tokenizer(work.policy.model, work.policy.adapter), chat=work.sampling.use_chat_template)
    conversations = [conversation_of(each) for each in work.problems]
    for problem, conversation in zip(work.problems, conversations, strict=True):
        if not problem.answers and conversation is None:
            raise UsageError(f"problem {problem.id} has no answer that could be imitated; set source=samples")
    answered = [each for each in work.problems if each.answers]
    found = scored(work.task, answered, [each.answers[0] for each in answered], work.reward_batch_size)
    rewards = {problem.id: reward for problem, reward in zip(answered, found, strict=True)}
    for problem, conversation in zip(work.problems, conversations, strict=True):
        if conversation is None:
            yield writing.demonstration(problem, rewards[problem.id])
        else:
            yield writing.conversation(problem.id, conversation, rewards.get(problem.id, Reward(0.0)))
