"""DPO: the policy is trained on comparisons as if it were its own reward model (Rafailov et al. 2023, 2305.18290).

With the margin of a pair, d = [ln pi(chosen) - ln ref(chosen)] - [ln pi(rejected) - ln ref(rejected)], the loss is

    sigmoid   -(1 - s) ln sigmoid(beta d) - s ln sigmoid(-beta d)     s = label_smoothing (conservative DPO)
    hinge     max(0, 1 - beta d)                                      (Zhao et al. 2023, 2305.10425)
    ipo       (d' - 1/(2 beta))^2, d' with each ln a mean over tokens (Azar et al. 2023, 2310.12036, equation 17)

and RPO adds ``rpo_weight`` times the mean of -ln pi over the tokens of the chosen completions (Pang et al. 2024,
2404.19733). Comparisons are of the policy's samples: the best and the worst of a problem, or a right answer and a wrong
sample. Trained by TRL's DPOTrainer, which is given token ids and keeps them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd.errors import UsageError
from gpuherd.models.memory.training_job import Method
from gpuherd.posttrain.algos.on_trl import (
    policy_in,
    reference_module,
    rows_of_kind,
    trained_module,
    without_copied_adapter,
)
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.preference.fitting import fit
from gpuherd.posttrain.preference.options import FittingOptions, run_of
from gpuherd.posttrain.preference.pairs import best_and_worst, by_problem, compared
from gpuherd.posttrain.preference.settings import digest, order
from gpuherd.posttrain.types import Algorithm, Collecting, Comparison, Policy, Rollout, Row, Training

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.world import World
    from gpuherd.posttrain.rollout.sampler import Sampler
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
        if not 0 <= self.rpo_weight < float("inf"):
            raise UsageError(f"rpo_weight={self.rpo_weight}; it is 0 or above")
        if self.pairing == Pairing.BEST_WORST and self.samples_per_example < 2:
            raise UsageError(f"samples_per_example={self.samples_per_example}; a comparison takes 2 at least")
        if self.max_tries < 1:
            raise UsageError(f"max_tries={self.max_tries}; the least is 1")

    def losses(self) -> tuple[list[str], list[float]]:
        """TRL's names of the losses of the margin that are added up, and their weights.

        TRL's ``sigmoid`` has no label smoothing. With a = -ln sigmoid(x), b = -ln sigmoid(-x) = a + x and TRL's
        ``robust`` c = ((1 - s) a - s b) / (1 - 2 s) = a - s x / (1 - 2 s), what is wanted is
        (1 - s) a + s b = a + s x = (2 - 2 s) a - (1 - 2 s) c.
        """
        smooth = self.label_smoothing
        names, weights = [str(self.loss_type)], [1.0]
        if smooth:
            names, weights = ["sigmoid", "robust"], [2 - 2 * smooth, 2 * smooth - 1]
        return names, weights


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
        from gpuherd.posttrain.rollout.sampler import Sampler

        sampler = Sampler(work.policy, work.precision, work.device, work.sampling)
        if self.options.pairing == Pairing.ANSWER:
            yield from against_answers(sampler, work, self.options.max_tries)
        else:
            yield from of_samples(sampler, work, self.options.samples_per_example)

    def train(self, work: Training) -> Policy:
        """Learns from this round's comparisons."""
        comparisons = rows_of_kind(work, Comparison, self.name, all_rounds=self.options.all_rounds)
        rows = [row_of(each) for each in comparisons]
        run = run_of(work, self.options, algorithm=self.name, rows=len(rows), data=digest(rows))

        def build(settings: dict[str, Any], callbacks: Sequence[Any], world: World) -> Any:
            from trl import DPOConfig

            from gpuherd.posttrain.preference import trainers

            loaded = trained_module(work, self.options, rows, world.device)
            names, weights = self.options.losses()
            places = order(len(rows), run.total_steps, run.batch_size, work.seed)
            rpo = rpo_weights(rows, places, run.batch_size, self.options.rpo_weight)
            trainer = trainers.Preferring(
                model=loaded.module,
                ref_model=None if self.options.reference_free else reference_module(work, loaded.module, world.device),
                args=trainers.on_one_device(
                    DPOConfig(
                        **settings,
                        max_length=None,
                        train_sampling_strategy="sequential",
                        beta=self.options.beta,
                        loss_type=names,
                        loss_weights=weights,
                        label_smoothing=self.options.label_smoothing,
                        precompute_ref_log_probs=self.options.reference_free,
                        disable_dropout=False,  # the model's own is off; an adapter's is as it was asked for
                    )
                ),
                train_dataset=trainers.dataset_of(rows, places).add_column("rpo_weight", rpo),
                data_collator=trainers.PreferringCollator(pad_token_id=trainers.padding(loaded.tokenizer)),
                processing_class=loaded.tokenizer,
                callbacks=list(callbacks),
            )
            return without_copied_adapter(trainer)

        fit(run, build)
        return self.policy(work)

    def policy(self, work: Training) -> Policy:
        """The trained model, or the policy's model with the trained adapter."""
        return policy_in(work, self.options)


def row_of(each: Comparison) -> dict[str, list[int]]:
    """A comparison as TRL's trainer takes it: what both begin with belongs to the prompt."""
    return {
        "prompt_ids": [*each.prompt_ids, *each.context_ids],
        "chosen_ids": list(each.chosen_ids),
        "rejected_ids": list(each.rejected_ids),
    }


def rpo_weights(
    rows: Sequence[dict[str, list[int]]], places: Sequence[int], batch_size: int, weight: float
) -> list[float]:
    """Of the row at each place: what -ln pi of its chosen completion is multiplied by, such that the mean over the rows
    of a step is ``weight`` times the mean over all chosen tokens of the step. Pure.

    >>> rpo_weights([{"chosen_ids": [5]}, {"chosen_ids": [5, 6, 7]}], [0, 1], 2, 1.0)
    [0.5, 0.5]
    """
    weights: list[float] = []
    for start in range(0, len(places), batch_size):
        step = places[start : start + batch_size]
        tokens = sum(len(rows[place]["chosen_ids"]) for place in step)
        weights += [weight * len(step) / max(1, tokens)] * len(step)
    return weights


def of_samples(sampler: Sampler, work: Collecting, samples: int) -> Iterator[Comparison]:
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


def against_answers(sampler: Sampler, work: Collecting, tries: int) -> Iterator[Comparison]:
    """The first right answer of each problem, and the first sample that is wrong, of so many tries at most. Problems
    without a wrong sample are counted (Q# paper, appendix C)."""
    from gpuherd.posttrain.preference.tokens import Writing
    from gpuherd.posttrain.rollout.scoring import scored

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


def _first_wrong(sampler: Sampler, work: Collecting, problems: Sequence[Problem], tries: int) -> dict[str, Rollout]:
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
