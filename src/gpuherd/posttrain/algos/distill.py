"""On-policy distillation: the policy answers, and a teacher says of each of its tokens how it would have gone on.

Agarwal et al. 2024, "On-Policy Distillation of Language Models" (GKD, arXiv 2306.13649). With P the teacher's law of a
token over the whole vocabulary and Q the policy's, behind the same tokens, the loss of a token is the generalised
Jensen-Shannon divergence

    JSD_beta = beta KL(P || M) + (1 - beta) KL(Q || M)        M = beta P + (1 - beta) Q

with its limits (of JSD / beta and JSD / (1 - beta)) at both ends: beta 0 is KL(P || Q), forward, beta 1 is KL(Q || P),
reverse. Gradients go through Q alone, not through the draws. Of each step's problems the policy itself answers a share
``on_policy``; to the others there are answers that the teacher gave before. A teacher with other tokens is refused:
P and Q would be laws of different things.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.engine.options import check_range
from gpuherd.posttrain.policy_gradient.algorithm import LossType, PolicyGradient, SamplingOptions, collected
from gpuherd.posttrain.policy_gradient.forward import answer_logits, batch_of
from gpuherd.posttrain.policy_gradient.objective import summed, sums_of, total_weight
from gpuherd.posttrain.policy_gradient.plan import digest_of, grouped
from gpuherd.posttrain.types import Collecting, Policy, Problem, Rollout, Row, Training

if TYPE_CHECKING:
    from torch import Tensor

    from gpuherd.posttrain.engine.train_engine import Loss
    from gpuherd.posttrain.policy_gradient.rollout_trainer import RolloutTrainer


@dataclass(frozen=True, kw_only=True)
class DistillOptions(SamplingOptions):
    """``SamplingOptions`` and:

    Attributes:
        teacher: an id of the Hub or a folder, of a model with the policy's tokens; frozen, in its checkpoint's dtype.
        beta: of the divergence: 0 forward KL, 1 reverse KL.
        on_policy: the share of problems that the policy answers while it trains; the others' answers are collected.
    """

    teacher: str
    samples_per_prompt: int = 1
    beta: float = 0.5
    on_policy: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.teacher:
            raise UsageError("teacher='': the name or folder of the model that is learnt from")
        check_range(self, "beta", 0, 1)
        check_range(self, "on_policy", 0, 1)


@register
class Distill(PolicyGradient):
    """See the module."""

    name: ClassVar[str] = "Distill"
    aliases: ClassVar[tuple[str, ...]] = ("distillation", "gkd")
    on_policy: ClassVar[bool] = False  # no log-prob of a draw has a part in the loss
    off_policy: ClassVar[bool] = True
    whole_logits: ClassVar[bool] = True
    Options: ClassVar[type[DistillOptions]] = DistillOptions
    options: DistillOptions

    @property
    def collects(self) -> bool:
        """Where the policy doesn't answer all problems."""
        return self.options.on_policy < 1

    @property
    def frozen_models(self) -> tuple[str, ...]:
        """The teacher."""
        return (self.options.teacher,)

    @property
    def collected_from(self) -> str:
        """The teacher."""
        return self.options.teacher

    def collect(self, work: Collecting) -> Iterator[Row]:
        """The teacher's answers, where such are learnt from."""
        if not self.collects:
            return iter(())
        refuse_other_tokens(work.policy, self.options.teacher)
        return collected(replace(work, policy=Policy(self.options.teacher)), self.options.samples_per_prompt)

    def train(self, work: Training) -> Policy:
        """See ``Algorithm.train``. Raises UsageError before anything is loaded where the tokens differ."""
        refuse_other_tokens(work.policy, self.options.teacher)
        return super().train(work)

    def learning(self, work: Training) -> dict[str, Any]:
        """From problems, and from the rows of the round, which a checkpoint remembers too."""
        rows = digest_of(list(_of_problems(work.rows).values())) if self.collects else None
        return {"online": True, "kl_coef": 0.0, "identity": {"rows": rows}}

    def learn(self, trainer: RolloutTrainer) -> None:
        """See the module."""
        from gpuherd.posttrain.rollout.loading import load_anew

        options, work = self.options, trainer.work
        teacher = load_anew(options.teacher, replace(work.precision, dtype=None), trainer.device).module
        objective = Distillation(
            trainer.trainee.module,
            teacher.requires_grad_(False),
            trainer.device,
            trainer.temperature,
            options.loss_type,
            work.sampling.max_new_tokens,
            options.beta,
        )
        known = _of_problems(work.rows) if self.collects else {}
        for step in trainer.steps():
            problems = trainer.problems(step)
            own = _share(len(problems), options.on_policy, f"{trainer.plan.seed} own {step}")
            asked = [problems[place] for place in own]
            answers = iter(trainer.sampled(step, asked) if asked else ())
            rollouts = [
                next(answers) if place in own else self._kept(known, problem, sample)
                for place, problem in enumerate(problems)
                for sample in range(options.samples_per_prompt)
            ]
            mine = trainer.mine(rollouts)
            learnt = [
                trainer.trainee.step([rollouts[mine[place]] for place in places], objective.loss, objective.weight)
                for places in trainer.minibatches(step, 0, len(rollouts))
            ]
            trainer.finish(step, rollouts, learnt, {"own": len(own) / len(problems)}, {})

    def _kept(self, known: Mapping[str, Sequence[Rollout]], problem: Problem, sample: int) -> Rollout:
        """A collected answer. Raises UsageError where there are too few."""
        answers = known.get(problem.id, ())
        if sample >= len(answers):
            raise UsageError(
                f"on_policy={self.options.on_policy:g}: problem {problem.id} has {len(answers)} collected answers, and "
                f"samples_per_prompt={self.options.samples_per_prompt} asks for more; collect them, or set on_policy=1"
            )
        return answers[sample]


@dataclass(eq=False)
class Distillation:
    """What an optimiser step makes small: the divergence of the policy (``module``) from the teacher.

    Attributes:
        temperature: of the sampling, for both.
        most_tokens: of an answer, for Dr. GRPO's divisor.
    """

    module: Any
    teacher: Any
    device: str
    temperature: float
    loss_type: LossType
    most_tokens: int
    beta: float

    def loss(self, rollouts: Sequence[Rollout]) -> Loss:
        """The sum over these rollouts that ``TrainEngine.step`` divides by the sum of ``weight``; its figure ``jsd`` is
        the mean over tokens, in nats."""
        import torch
        from torch.utils.checkpoint import checkpoint

        from gpuherd.posttrain.engine.train_engine import Loss

        batch = batch_of(rollouts, self.device)
        with torch.no_grad():
            theirs = answer_logits(self.teacher, batch, self.temperature)
        ours = answer_logits(self.module, batch, self.temperature)
        # Row by row, and computed again for the gradient: never more than one answer's laws in float32 at once.
        rows = [
            checkpoint(generalised_jsd, mine, other, self.beta, use_reentrant=False, preserve_rng_state=False)
            for mine, other in zip(ours, theirs, strict=True)
        ]
        per_token = torch.stack(rows)
        total = summed(torch.where(batch.by_policy, per_token, 0.0), batch.by_policy, self.loss_type)
        return Loss(total, sums_of(batch.by_policy, jsd=per_token))

    def weight(self, rollouts: Sequence[Rollout]) -> float:
        """What ``loss`` of these rollouts is divided by."""
        return total_weight([sum(each.by_policy) for each in rollouts], self.loss_type, self.most_tokens)


def generalised_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """JSD_beta(teacher || student), nats, of each place: (...) of logits (..., vocabulary).

    Tables of one tokenizer may be padded to different widths: the laws are of the tokens that both have.
    """
    import torch

    width = min(student.shape[-1], teacher.shape[-1])
    log_q = torch.log_softmax(_wide(student[..., :width]), dim=-1)
    log_p = torch.log_softmax(_wide(teacher[..., :width]), dim=-1)
    if beta == 0:
        return _kl(log_p, log_q)
    if beta == 1:
        return _kl(log_q, log_p)
    weights = torch.tensor([beta, 1 - beta], dtype=log_q.dtype, device=log_q.device).log()
    log_m = torch.logaddexp(log_p + weights[0], log_q + weights[1])
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _wide(numbers: Tensor) -> Tensor:
    """In float32 where they are narrower."""
    return numbers.float() if numbers.itemsize < 4 else numbers


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(P || Q); what P gives no probability adds nothing."""
    import torch

    never = torch.isneginf(log_p)
    gap = (log_p - log_q).masked_fill(never, 0.0)
    return (log_p.exp() * gap).sum(dim=-1)


def refuse_other_tokens(policy: Policy, teacher: str) -> None:
    """Raises UsageError where a teacher reads other tokens than the policy. Loads tokenizers alone."""
    from gpuherd.lm.guidance.guide import first_difference
    from gpuherd.posttrain.preference.tokens import load_tokenizer

    ours, theirs = load_tokenizer(policy.model, policy.adapter), load_tokenizer(teacher)
    difference = first_difference(ours.get_vocab(), theirs.get_vocab())
    if difference is not None:
        raise UsageError(
            f"teacher={teacher} can't teach {policy.model}: they have other tokenizers: {difference}. Both have to "
            "predict the same tokens: choose a teacher of the policy's family"
        )


def _of_problems(rows: Sequence[Sequence[Row]]) -> dict[str, list[Rollout]]:
    """The collected answers of the round by problem, in the order of their samples. Raises UsageError."""
    last = rows[-1] if rows else ()
    answers = [each for each in last if isinstance(each, Rollout)]
    if len(answers) < len(last):
        raise UsageError("Distill learns from answers, and comparisons were collected")
    return {each[0].problem: each for each in grouped(answers)}


def _share(count: int, share: float, seed: str) -> list[int]:
    """So large a share of ``count`` places, in order; the same for a seed, on average exactly.

    >>> _share(4, 1.0, "a"), _share(4, 0.0, "a"), len(_share(4, 0.5, "a"))
    ([0, 1, 2, 3], [], 2)
    """
    draw = random.Random(seed)  # noqa: S311
    return sorted(draw.sample(range(count), min(count, int(count * share + draw.random()))))
