"""DPO: the policy is trained on comparisons as if it were its own reward model (Rafailov et al. 2023, 2305.18290).

With the margin of a pair, d = [ln pi(chosen) - ln ref(chosen)] - [ln pi(rejected) - ln ref(rejected)], the loss is

    sigmoid   -(1 - s) ln sigmoid(beta d) - s ln sigmoid(-beta d)     s = label_smoothing (conservative DPO)
    hinge     max(0, 1 - beta d)                                      (Zhao et al. 2023, 2305.10425)
    ipo       (d' - 1/(2 beta))^2, d' with each ln a mean over tokens (Azar et al. 2023, 2310.12036, equation 17)

and RPO adds ``rpo_weight`` times the mean of -ln pi over the tokens of the chosen completions (Pang et al. 2024,
2404.19733). Comparisons are of the policy's samples: the best and the worst of a problem, or a right answer and a wrong
sample.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd.errors import UsageError
from gpuherd.models.memory.training_job import Method
from gpuherd.posttrain.algos.from_rows import FittingOptions, plan_of, policy_in, rows_of_kind, trained_module
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.config.typed import at_least
from gpuherd.posttrain.engine.fit import TrainSetup, digest, fit
from gpuherd.posttrain.preference.data import best_and_worst, by_problem, compared
from gpuherd.posttrain.types import Algorithm, Collecting, Comparison, Policy, Rollout, Row, Training

if TYPE_CHECKING:
    from torch import Tensor

    from gpuherd.posttrain.engine.dist_env import DistEnv
    from gpuherd.posttrain.engine.train_engine import Loss
    from gpuherd.posttrain.policy_gradient.policy import Reference
    from gpuherd.posttrain.rollout.sampler import RolloutBackend
    from gpuherd.posttrain.types import Problem

logger = logging.getLogger(__name__)


class LossType(StrEnum):
    """Of the margin."""

    SIGMOID = "sigmoid"
    HINGE = "hinge"
    IPO = "ipo"


class Pairing(StrEnum):
    """What is compared."""

    BEST_WORST = "best_worst"  # of the samples of a problem, by reward
    ANSWER = "answer"  # the problem's first right answer, and a wrong sample


@dataclass(frozen=True, kw_only=True)
class Options(FittingOptions):
    """Raises UsageError.

    Attributes:
        beta: how far the policy may go from the reference: larger holds it nearer; of ipo it is the paper's tau.
        label_smoothing: of sigmoid: the probability that a comparison is the wrong way round.
        reference_free: without a reference: d = ln pi(chosen) - ln pi(rejected).
        rpo_weight: of RPO's second part; 0: plain DPO.
        pairing: what ``collect`` compares.
        samples_per_example: of each problem, for ``best_worst``.
        max_tries: of each problem for ``answer``: so many samples are drawn until one is wrong.
        all_rounds: learns from the comparisons of all rounds, not of the last alone.
    """

    lr: float = 1e-6
    beta: float = 0.1
    loss_type: LossType = LossType.SIGMOID
    label_smoothing: float = 0.0
    reference_free: bool = False
    rpo_weight: float = 0.0
    pairing: Pairing = Pairing.BEST_WORST
    samples_per_example: int = 4
    max_tries: int = 1000
    all_rounds: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta < float("inf"):
            raise UsageError(f"beta={self.beta}; it is above 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise UsageError(f"label_smoothing={self.label_smoothing}; it is from 0 to under 0.5")
        if self.label_smoothing and self.loss_type != LossType.SIGMOID:
            raise UsageError(f"label_smoothing with loss_type={self.loss_type}: only sigmoid knows it; leave it out")
        at_least(self, rpo_weight=0, max_tries=1)
        if self.pairing == Pairing.BEST_WORST and self.samples_per_example < 2:
            raise UsageError(f"samples_per_example={self.samples_per_example}; a comparison takes 2 at least")


@register
@dataclass(frozen=True)
class DPO(Algorithm):
    """Learns from comparisons directly."""

    options: Options = field(default_factory=Options)

    name: ClassVar[str] = "DPO"
    off_policy: ClassVar[bool] = True  # pairs may be of any policy
    memory: ClassVar[Method] = Method.DPO
    Options: ClassVar[type[Options]] = Options

    def collect(self, work: Collecting) -> Iterator[Row]:
        """A comparison of each problem of this job where there is something to compare."""
        from gpuherd.posttrain.rollout.sampler import sampler_of

        sampler = sampler_of(work)
        if self.options.pairing == Pairing.ANSWER:
            yield from against_answers(sampler, work, self.options.max_tries)
        else:
            yield from of_samples(sampler, work, self.options.samples_per_example)

    def train(self, work: Training) -> Policy:
        """Learns from this round's comparisons."""
        comparisons = rows_of_kind(work, Comparison, self.name, all_rounds=self.options.all_rounds)
        rows = [row_of(each) for each in comparisons]
        plan = plan_of(work, self.options, algorithm=self.name, rows=len(rows), data=digest(rows))
        longest = max(len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in rows)

        def build(world: DistEnv) -> TrainSetup[dict[str, list[int]], Pair]:
            from gpuherd.posttrain.policy_gradient.policy import reference_of

            loaded = trained_module(work, self.options.lora, longest, world)
            reference = None if self.options.reference_free else reference_of(work, loaded.module, world)
            return TrainSetup(loaded.module, loaded.tokenizer, DPOObjective(self.options, reference, world.device))

        fit(plan, rows, build)
        return self.policy(work)

    def policy(self, work: Training) -> Policy:
        """The trained model, or the policy's model with the trained adapter."""
        return policy_in(work, self.options.lora)


@dataclass(frozen=True, slots=True)
class Pair:
    """A comparison to learn from.

    Attributes:
        before: the tokens that both completions follow.
        rpo_weight: by what -ln pi of the chosen completion is multiplied.
    """

    before: list[int]
    chosen: list[int]
    rejected: list[int]
    rpo_weight: float


@dataclass(frozen=True, slots=True)
class DPOObjective:
    """DPO's loss, an ``engine.fit.Objective``.

    Attributes:
        reference: None: there is none (``reference_free``).
    """

    options: Options
    reference: Reference | None
    device: str

    def items(self, rows: Sequence[dict[str, list[int]]]) -> list[Pair]:
        """With weights such that the mean over a step's pairs of RPO's second part is ``rpo_weight`` times the mean
        over all chosen tokens of the step."""
        tokens = sum(len(row["chosen_ids"]) for row in rows)
        weight = self.options.rpo_weight * len(rows) / max(1, tokens)
        return [Pair(row["prompt_ids"], row["chosen_ids"], row["rejected_ids"], weight) for row in rows]

    def loss(self, module: Any, items: Sequence[Pair]) -> Loss:
        """The sum over some pairs of a step."""
        import torch

        from gpuherd.posttrain.engine.log_probs import padded, token_log_probs
        from gpuherd.posttrain.engine.train_engine import Loss

        pairs, options = len(items), self.options
        both = [(each.before, each.chosen) for each in items] + [(each.before, each.rejected) for each in items]
        ids, mask = padded([[*before, *completion] for before, completion in both], self.device)
        begins = torch.tensor([max(1, len(before)) for before, _ in both], device=self.device)
        answers = mask.bool() & (torch.arange(ids.shape[1], device=self.device) >= begins[:, None])
        found = token_log_probs(module, ids, mask, answers)
        # The policy's pass comes first: PEFT marks an adapter that is switched off as not to be trained, and FSDP
        # remembers how it found the weights in its first pass.
        before = self._reference_log_probs(ids, mask, answers)
        sums = found.log_probs.sum(dim=1)
        ratios = sums - before
        rewards = options.beta * ratios.detach()
        margins = ratios / answers.sum(dim=1).clamp(min=1) if options.loss_type == LossType.IPO else ratios
        losses = margin_losses(margins[:pairs] - margins[pairs:], options)
        if options.rpo_weight:
            losses = losses - torch.tensor([each.rpo_weight for each in items], device=self.device) * sums[:pairs]
        chosen, rejected = rewards[:pairs], rewards[pairs:]
        of_chosen = answers[:pairs].sum()
        return Loss(
            losses.sum(),
            {
                "rewards/chosen": (chosen.sum(), pairs),
                "rewards/rejected": (rejected.sum(), pairs),
                "rewards/accuracies": ((chosen > rejected).sum(), pairs),
                "rewards/margins": ((chosen - rejected).sum(), pairs),
                "logps/chosen": (sums[:pairs].sum(), pairs),
                "logps/rejected": (sums[pairs:].sum(), pairs),
                "entropy": (found.entropies.sum(), answers.sum()),
                "mean_token_accuracy": (found.top[:pairs].sum(), of_chosen),
            },
        )

    def _reference_log_probs(self, ids: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
        """ln ref of each completion; 0 without a reference, where each is as probable as any other."""
        import torch

        from gpuherd.posttrain.engine.log_probs import token_log_probs

        if self.reference is None:
            return torch.zeros(len(ids), device=self.device)
        with self.reference.frozen() as module:
            return token_log_probs(module, ids, mask, answers).log_probs.sum(dim=1)


def margin_losses(margins: Tensor, options: Options) -> Tensor:
    """The loss of each pair, of its margin d."""
    from torch.nn.functional import logsigmoid

    scaled, smooth = options.beta * margins, options.label_smoothing
    if options.loss_type == LossType.HINGE:
        return (1 - scaled).relu()
    if options.loss_type == LossType.IPO:
        return (margins - 1 / (2 * options.beta)) ** 2
    return -(1 - smooth) * logsigmoid(scaled) - smooth * logsigmoid(-scaled)


def row_of(each: Comparison) -> dict[str, list[int]]:
    """A comparison as what is learnt from: what both begin with belongs to the prompt."""
    return {
        "prompt_ids": [*each.prompt_ids, *each.context_ids],
        "chosen_ids": list(each.chosen_ids),
        "rejected_ids": list(each.rejected_ids),
    }


def of_samples(sampler: RolloutBackend, work: Collecting, samples: int) -> Iterator[Comparison]:
    """The best and the worst of each problem's samples. Problems whose samples all earned the same are counted."""
    alike = 0
    for some in _batches(work.problems, max(1, work.sampling.batch_size // samples)):
        rollouts = sampler.rollouts(
            work.task, some, samples, stream=f"round {work.round}", reward_batch_size=work.reward_batch_size
        )
        for group in by_problem(rollouts):
            found = best_and_worst(group)
            if found is None:
                alike += 1
            else:
                yield found
    if alike:
        logger.info("%d of %d problems: all samples earned the same; nothing to compare", alike, len(work.problems))


def against_answers(sampler: RolloutBackend, work: Collecting, tries: int) -> Iterator[Comparison]:
    """The first right answer of each problem, and the first sample that is wrong, of so many tries at most. Problems
    without a wrong sample are counted (Q# paper, appendix C)."""
    from gpuherd.posttrain.preference.tokens import Writing
    from gpuherd.posttrain.rollout.sampler import scored

    writing = Writing(sampler.tokenizer, chat=work.sampling.use_chat_template)
    never_wrong = 0
    for some in _batches(work.problems, work.sampling.batch_size):
        rewards = scored(work.task, some, [_answer(each) for each in some], work.reward_batch_size)
        right = {each.id: writing.demonstration(each, reward) for each, reward in zip(some, rewards, strict=True)}
        wrong = _first_wrong(sampler, work, some, tries)
        for problem in some:
            found = compared(right[problem.id], wrong[problem.id]) if problem.id in wrong else None
            if found is None:
                never_wrong += 1
            else:
                yield found
    if never_wrong:
        logger.info("%d of %d problems: no sample of %d was wrong", never_wrong, len(work.problems), tries)


def _first_wrong(
    sampler: RolloutBackend, work: Collecting, problems: Sequence[Problem], tries: int
) -> dict[str, Rollout]:
    """The first wrong sample of each problem that has one, by the problem's id; one sample of all that are still to
    come at a time."""
    found: dict[str, Rollout] = {}
    left = list(problems)
    for sample in range(tries):
        if not left:
            break
        for rollout in sampler.rollouts(
            work.task,
            left,
            1,
            first_sample=sample,
            stream=f"round {work.round}",
            reward_batch_size=work.reward_batch_size,
        ):
            if is_wrong(rollout):
                found[rollout.problem] = rollout
        left = [each for each in left if each.id not in found]
    return found


def is_wrong(rollout: Rollout) -> bool:
    """Whether the task calls it wrong; where it knows no right and wrong, whether it earned nothing."""
    return rollout.reward <= 0 if rollout.correct is None else not rollout.correct


def _answer(problem: Problem) -> str:
    if not problem.answers:
        raise UsageError(f"problem {problem.id} has no answer to be preferred; set pairing=best_worst")
    return problem.answers[0]


def _batches(problems: Sequence[Problem], size: int) -> Iterator[Sequence[Problem]]:
    for start in range(0, len(problems), size):
        yield problems[start : start + size]
