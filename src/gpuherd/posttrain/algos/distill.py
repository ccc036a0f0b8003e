"""On-policy distillation: the policy answers, and a teacher says of each of its tokens how it would have gone on.

Agarwal et al. 2024, "On-Policy Distillation of Language Models" (GKD, arXiv 2306.13649). With P the teacher's
distribution of a token over the whole vocabulary and Q the policy's, behind the same tokens, the loss of a token is the
generalised Jensen-Shannon divergence

    JSD_beta = beta KL(P || M) + (1 - beta) KL(Q || M)        M = beta P + (1 - beta) Q

with its limits (of JSD / beta and JSD / (1 - beta)) at both ends: beta 0 is KL(P || Q), forward, beta 1 is KL(Q || P),
reverse. Gradients go through Q alone, not through the draws. Of each step's problems the policy itself answers a share
``on_policy``; to the others there are answers that the teacher gave before. A teacher with other tokens is refused:
P and Q would be distributions over different things.

The distributions are compared a chunk of tokens at a time: hidden states of policy and teacher are kept, and no more
than a chunk of logits is there at once, forward and backward. The teacher may lie on a GPU of its own
(``teacher_device``); the logits of a chunk are what comes over.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.config.typed import check_range
from gpuherd.posttrain.engine.log_probs import CHUNK_NUMBERS, HeadGradients, Reading, chunk_logits, head_dtype, read
from gpuherd.posttrain.policy_gradient.algorithm import LATER, LossType, PolicyGradient, SamplingOptions, collected
from gpuherd.posttrain.policy_gradient.forward import Batch, batch_of
from gpuherd.posttrain.policy_gradient.objective import recorded_log_probs, summed, sums_of, total_weight
from gpuherd.posttrain.policy_gradient.plan import digest_of, grouped
from gpuherd.posttrain.types import Collecting, Policy, Problem, Rollout, Row, Training

if TYPE_CHECKING:
    from torch import Tensor

    from gpuherd.posttrain.engine.dist_env import DistEnv
    from gpuherd.posttrain.engine.train_engine import Loss
    from gpuherd.posttrain.policy_gradient.rollout_trainer import RolloutTrainer
    from gpuherd.posttrain.rollout.mismatch import MismatchMeter

# Numbers of a chunk of logits: a quarter of others', since P, Q, M and parts of them are there at once.
_CHUNK = CHUNK_NUMBERS // 4


class TeacherDevice(StrEnum):
    """Where the teacher lies."""

    SAME = "same"  # on the policy's
    OWN = "own"  # on a GPU of its own for each process: the training takes twice as many


@dataclass(frozen=True, kw_only=True)
class DistillOptions(SamplingOptions):
    """``SamplingOptions`` and:

    Attributes:
        teacher: an id of the Hub or a folder, of a model with the policy's tokens; frozen, in its checkpoint's dtype.
        beta: of the divergence: 0 forward KL, 1 reverse KL.
        on_policy: the share of problems that the policy answers while it trains; the others' answers are collected.
        teacher_device: where the teacher lies. It changes no loss.
    """

    teacher: str
    samples_per_prompt: int = 1
    beta: float = 0.5
    on_policy: float = 1.0
    teacher_device: TeacherDevice = field(default=TeacherDevice.SAME, metadata=LATER)

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
    frozen_role: ClassVar[str] = "teacher"
    Options: ClassVar[type[DistillOptions]] = DistillOptions
    options: DistillOptions

    @property
    def samples(self) -> bool:
        """Where the policy answers a problem."""
        return self.options.on_policy > 0

    @property
    def collects(self) -> bool:
        """Where the policy doesn't answer all problems."""
        return self.options.on_policy < 1

    @property
    def frozen_models(self) -> tuple[str, ...]:
        """The teacher."""
        return (self.options.teacher,)

    @property
    def frozen_apart(self) -> bool:
        """Where the teacher has GPUs of its own."""
        return self.options.teacher_device == TeacherDevice.OWN

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
        place = teacher_device(trainer.world) if self.frozen_apart else trainer.device
        teacher = load_anew(options.teacher, replace(work.precision, dtype=None), place).module
        objective = Distillation(
            trainer.trainee.module,
            teacher.requires_grad_(False),
            trainer.device,
            trainer.temperature,
            options.loss_type,
            work.sampling.max_new_tokens,
            options.beta,
            place,
            meter=trainer.meter,
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
        """A collected answer, without the teacher's log-probs. Raises UsageError where there are too few."""
        answers = known.get(problem.id, ())
        if sample >= len(answers):
            raise UsageError(
                f"on_policy={self.options.on_policy:g}: problem {problem.id} has {len(answers)} collected answers, and "
                f"samples_per_prompt={self.options.samples_per_prompt} asks for more; collect them, or set on_policy=1"
            )
        found = answers[sample]
        return replace(found, log_probs=(None,) * len(found.ids))


@dataclass(eq=False)
class Distillation:
    """What an optimiser step makes small: the divergence of the policy (``module``) from the teacher.

    Attributes:
        temperature: of the sampling, for both.
        most_tokens: of an answer, for Dr. GRPO's divisor.
        teacher_device: where the teacher lies, if not on ``device``.
        chunk: tokens whose distributions are there at once; None: as many as ``_CHUNK`` numbers are.
        meter: notes how far the recorded log-probs of the policy's own answers are from those of its training pass.
    """

    module: Any
    teacher: Any
    device: str
    temperature: float
    loss_type: LossType
    most_tokens: int
    beta: float
    teacher_device: str | None = None
    chunk: int | None = None
    meter: MismatchMeter | None = None

    def loss(self, rollouts: Sequence[Rollout]) -> Loss:
        """The sum over these rollouts that ``TrainEngine.step`` divides by the sum of ``weight``; its figure ``jsd`` is
        the mean over tokens, in nats."""
        import torch

        from gpuherd.posttrain.engine.train_engine import Loss

        place = self.teacher_device or self.device
        theirs = batch_of(rollouts, place)
        asked = _Hidden(theirs.ids, theirs.mask, _chosen(theirs))
        with torch.no_grad():
            read(self.teacher, asked, theirs.ids, theirs.mask)
        batch = batch_of(rollouts, self.device)
        reading = _Divergences(batch.ids, batch.mask, _chosen(batch), asked.head, self)
        found, _ = read(self.module, reading, batch.ids, batch.mask)
        per_token, log_probs = found[:, -batch.answers.shape[1] :].unbind(dim=-1)
        if self.meter is not None:
            self.meter.add(rollouts, log_probs, recorded_log_probs(rollouts, batch), batch.by_policy)
        total = summed(per_token, batch.by_policy, self.loss_type)
        return Loss(total, sums_of(batch.by_policy, jsd=per_token))

    def weight(self, rollouts: Sequence[Rollout]) -> float:
        """What ``loss`` of these rollouts is divided by."""
        return total_weight([sum(each.by_policy) for each in rollouts], self.loss_type, self.most_tokens)


def _chosen(batch: Batch) -> Tensor:
    """The places of the tokens that the policy chose, (rows, prompt + tokens) bool."""
    import torch

    return torch.nn.functional.pad(batch.by_policy, (batch.ids.shape[1] - batch.by_policy.shape[1], 0))


class _Head(NamedTuple):
    """What the logits of tokens are made of, a chunk at a time: hidden states with the head's weight and bias, computed
    in ``weight``'s dtype; without a weight they are logits already."""

    flat: Tensor
    weight: Tensor | None
    bias: Tensor | None

    @property
    def vocabulary(self) -> int:
        """How many logits a token has."""
        return self.flat.shape[-1] if self.weight is None else len(self.weight)

    def log_probs(self, part: slice, temperature: float, width: int, device: Any) -> Tensor:
        """(tokens, width) of ln P of the first ``width`` tokens of the vocabulary, in float32 or wider."""
        import torch

        compute = self.flat.dtype if self.weight is None else self.weight.dtype
        logits = chunk_logits(self.flat[part], self.weight, self.bias, temperature, compute)
        return torch.log_softmax(logits[:, :width].to(device), dim=-1)


class _Hidden(Reading):
    """Keeps what the logits of the wanted tokens are made of (``head``), and computes none."""

    head: _Head

    def computed(self, flat: Tensor, weight: Tensor | None, bias: Tensor | None, vocabulary: int) -> Tensor:  # noqa: ARG002
        """Nothing: (tokens, 0)."""
        self.head = _Head(flat, None if weight is None else weight.to(head_dtype(flat)), bias)
        return flat[:, :0]


class _Divergences(Reading):
    """The divergence of each wanted token from the teacher, whose hidden states of the same tokens are known, and the
    token's log-prob under the policy."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor, wanted: Tensor, teacher: _Head, how: Distillation):
        super().__init__(input_ids, attention_mask, wanted)
        self._teacher, self._how = teacher, how

    def computed(self, flat: Tensor, weight: Tensor | None, bias: Tensor | None, vocabulary: int) -> Tensor:
        """(tokens, 2), nats: the divergence, through which gradients flow, and the log-prob, through which none do."""
        import torch

        how = _JSDInputs(
            self._teacher,
            self._how.temperature,
            self._how.beta,
            self._how.chunk or max(1, _CHUNK // vocabulary),
            min(vocabulary, self._teacher.vocabulary),
            head_dtype(flat),
        )
        with torch.autocast(flat.device.type, enabled=False):
            return _function().apply(flat, weight, bias, self._targets, how)  # type: ignore[no-any-return]


class _JSDInputs(NamedTuple):
    """How the policy's distributions are compared with the teacher's: so many tokens at once, of so many tokens of
    the vocabulary. ``compute``: what the policy's head computes in."""

    teacher: _Head
    temperature: float
    beta: float
    chunk: int
    width: int
    compute: Any

    def chunks(self, tokens: int) -> Iterator[slice]:
        """The chunks of so many tokens."""
        return (slice(start, start + self.chunk) for start in range(0, tokens, self.chunk))

    def log_probs(self, policy: _Head, part: slice, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ln Q of the policy and ln P of the teacher, of a chunk of tokens, where the policy lies; and the policy's
        log-prob of ``targets``, over its own vocabulary, which may be wider than the teacher's."""
        import torch

        device = policy.flat.device
        log_q = policy.log_probs(part, self.temperature, policy.vocabulary, device)
        chosen = log_q.gather(1, targets[part, None])[:, 0]
        if self.width < policy.vocabulary:
            log_q = torch.log_softmax(log_q[:, : self.width], dim=-1)
        return log_q, self.teacher.log_probs(part, self.temperature, self.width, device), chosen


@functools.cache
def _function() -> Any:
    """The function with its own backward pass; made late, as torch is imported late."""
    import torch

    class ChunkedDivergence(torch.autograd.Function):
        """(tokens, 2): JSD_beta of each, of chunks of logits that are made anew for the gradient; and the token's
        log-prob, without a gradient."""

        @staticmethod
        def forward(
            ctx: Any, flat: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor, how: _JSDInputs
        ) -> Tensor:
            policy = _Head(flat, None if weight is None else weight.to(how.compute), bias)
            made = torch.zeros((len(flat), 2), dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device)
            for part in how.chunks(len(flat)):
                log_q, log_p, made[part, 1] = how.log_probs(policy, part, targets)
                made[part, 0] = _divergence(log_q, log_p, how.beta)
                del log_q, log_p
            ctx.save_for_backward(flat, weight, bias, targets)
            ctx.how = how
            return made

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
            flat, weight, bias, targets = ctx.saved_tensors
            how: _JSDInputs = ctx.how
            policy = _Head(flat, None if weight is None else weight.to(how.compute), bias)
            gradients = HeadGradients(flat, policy.weight, ctx.needs_input_grad, weight, bias)
            for part in how.chunks(len(flat)):
                log_q, log_p, _ = how.log_probs(policy, part, targets)
                slopes = _slopes(log_q, log_p, how.beta).mul_(upstream[0][part, :1]).div_(how.temperature)
                del log_q, log_p
                slopes = gradients.narrowed(torch.nn.functional.pad(slopes, (0, policy.vocabulary - how.width)))
                gradients.add(part, slopes)
                del slopes
            return *gradients.all(), None, None

    return ChunkedDivergence


def _divergence(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """JSD_beta of ln Q and ln P, (..., vocabulary)."""
    if beta == 0:
        return _kl(log_p, log_q)
    if beta == 1:
        return _kl(log_q, log_p)
    log_m = _mixed(log_q, log_p, beta)
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _slopes(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """The gradient of ``_divergence`` by the logits whose softmax Q is.

    For beta 0 it is Q - P. Else it is Q (g - sum Q g), with g = ln Q - ln P for beta 1, and between them
    g = (1 - beta) (ln Q - ln M): what M itself adds by its part of Q cancels.
    """
    q = log_q.exp()
    if beta == 0:
        return q.sub_(log_p.exp())
    other = log_p if beta == 1 else _mixed(log_q, log_p, beta)
    gap = (log_q - other).masked_fill_(q == 0, 0.0)  # of what has no probability nothing comes
    if beta < 1:
        gap.mul_(1 - beta)
    return gap.sub_((q * gap).sum(dim=-1, keepdim=True)).mul_(q)


def _mixed(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """ln M."""
    import torch

    weights = torch.tensor([beta, 1 - beta], dtype=log_q.dtype, device=log_q.device).log()
    return torch.logaddexp(log_p + weights[0], log_q + weights[1])


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(P || Q); what P gives no probability adds nothing."""
    import torch

    never = torch.isneginf(log_p)
    gap = (log_p - log_q).masked_fill(never, 0.0)
    return (log_p.exp() * gap).sum(dim=-1)


def teacher_device(world: DistEnv) -> str:
    """The teacher's own GPU in this process: of the GPUs that the processes of this machine see, those of the policies
    come first. On a CPU both are there. Raises UsageError where there are too few."""
    if world.device == "cpu":
        return "cpu"
    import torch

    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if world.size > 1 else 1
    number = here + world.local_rank
    if number >= torch.cuda.device_count():
        raise UsageError(
            f"teacher_device=own: a GPU for each of {here} policies and as many for teachers are {2 * here}, and torch "
            f"sees {torch.cuda.device_count()}; show it more, or set teacher_device=same"
        )
    return f"cuda:{number}"


def refuse_other_tokens(policy: Policy, teacher: str) -> None:
    """Raises UsageError where a teacher reads other tokens than the policy. Loads tokenizers alone."""
    from gpuherd.lm.guidance.guide import first_difference
    from gpuherd.posttrain.preference.tokens import load_tokenizer

    ours, theirs = load_tokenizer(policy.model, policy.adapter), load_tokenizer(teacher)
    difference = first_difference(ours.get_vocab(), theirs.get_vocab(), "the teacher")
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
