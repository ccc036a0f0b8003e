"""Will this training fit, on how many GPUs, with what batch: from shapes alone. Pure.

``make_training_plan`` answers with a plan, or with a refusal that says what is missing and what would fit. How the
bytes come about stands in ``training_usage``; what can be asked for in ``training_job``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuherd.errors import UsageError
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.training_activations import recipe_of
from gpuherd.models.plan.training_advice import alternatives
from gpuherd.models.plan.training_job import (
    LoraShape,
    Method,
    Optimiser,
    Strategy,
    TrainingJob,
    TrainingPrecision,
)
from gpuherd.models.plan.training_model import TrainingModel, training_model
from gpuherd.models.plan.training_placing import Placement, largest_batch, place
from gpuherd.models.plan.training_result import (
    AllCards,
    Moment,
    TrainingLoad,
    TrainingPlan,
    TrainingRefusal,
    TrainingUsage,
)
from gpuherd.models.plan.training_usage import Step, training_usage
from gpuherd.models.plan.workload import GIB, Reserve

__all__ = [
    "LoraShape",
    "Method",
    "Moment",
    "Optimiser",
    "Strategy",
    "TrainingJob",
    "TrainingLoad",
    "TrainingPlan",
    "TrainingPrecision",
    "TrainingRefusal",
    "TrainingUsage",
    "make_training_plan",
    "training_usage",
]


def make_training_plan(
    architecture: Architecture,
    cards: Sequence[Card],
    job: TrainingJob,
    reserve: Reserve | None = None,
    *,
    gpus: int | None = None,
    reward: Architecture | None = None,
) -> TrainingPlan | TrainingRefusal:
    """How a training lies on these cards, or why it doesn't fit.

    ``single`` takes the emptiest card; ``ddp`` as many as fit, each with a batch of its own; ``fsdp`` the fewest that
    fit, because what is divided over fewer GPUs is faster than over more.

    Args:
        architecture: the model, without an adapter.
        cards: GPUs that may be used; what others use of them is not counted as free.
        reserve: kept free on each; None: the usual.
        gpus: use exactly so many, the emptiest.
        reward: a reward model, which lies whole on each GPU.

    Raises:
        UsageError: no cards, or ``gpus`` is not a number of them; a LoRA target that the model doesn't have.
    """
    if not cards:
        raise UsageError("no GPUs to plan for; name some: --gpus 4x40GB")
    if gpus is not None and not 1 <= gpus <= len(cards):
        raise UsageError(f"gpus={gpus}: there are {len(cards)}; take 1 to {len(cards)}")
    kept = reserve if reserve is not None else Reserve()
    model = training_model(architecture)
    found = place(model, cards, job, kept, gpus=gpus, reward=reward)
    if found.missing > 0:
        return _refusal(model, cards, job, kept, found, reward)
    return TrainingPlan(
        architecture=architecture,
        job=job,
        reserve=kept,
        trained=found.step.trained,
        loads=found.loads,
        checkpointed=_other(model, found, job, kept, reward, checkpointing=True),
        plain=_other(model, found, job, kept, reward, checkpointing=False),
        largest_batch=largest_batch(found.step, found.cards, kept),
        on_all=_on_all(model, cards, job, kept, found, gpus, reward),
        warnings=_warnings(architecture, job, found, len(cards) if gpus is None else gpus),
    )


def _refusal(
    model: TrainingModel,
    cards: Sequence[Card],
    job: TrainingJob,
    reserve: Reserve,
    found: Placement,
    reward: Architecture | None,
) -> TrainingRefusal:
    architecture, fullest = model.architecture, min(found.loads, key=lambda load: load.left)
    moment = fullest.usage.fullest
    share = f"each of {len(found.loads)} GPUs needs" if len(found.loads) > 1 else "one GPU needs"
    reason = (
        f"{job.method.upper()} of {architecture.model} trains {found.step.trained:,} numbers: {share}"
        f" {_gib(fullest.usage.total)} at its fullest moment ({moment.name}), and {fullest.card.name} has"
        f" {_gib(fullest.card.free)} free: {_gib(found.missing)} are missing"
    )
    return TrainingRefusal(
        architecture=architecture,
        job=job,
        reserve=reserve,
        trained=found.step.trained,
        reason=reason,
        missing=found.missing,
        loads=found.loads,
        checkpointed=_other(model, found, job, reserve, reward, checkpointing=True),
        plain=_other(model, found, job, reserve, reward, checkpointing=False),
        alternatives=alternatives(model, cards, job, reserve, reward),
        warnings=_warnings(architecture, job, found, len(found.loads)),
    )


def _other(
    model: TrainingModel,
    found: Placement,
    job: TrainingJob,
    reserve: Reserve,
    reward: Architecture | None,
    *,
    checkpointing: bool,
) -> TrainingUsage:
    """The usage of the fullest GPU with and without checkpointing."""
    fullest = min(found.loads, key=lambda load: load.left)
    if job.checkpointing == checkpointing:
        return fullest.usage
    other = Step(model, replace(job, checkpointing=checkpointing), gpus=len(found.loads), reward=reward)
    return other.usage(reserve, fullest.card)


def _on_all(
    model: TrainingModel,
    cards: Sequence[Card],
    job: TrainingJob,
    reserve: Reserve,
    found: Placement,
    gpus: int | None,
    reward: Architecture | None,
) -> AllCards | None:
    if job.strategy is not Strategy.FSDP or gpus is not None or len(found.loads) == len(cards):
        return None
    step = Step(model, job, gpus=len(cards), reward=reward)
    smallest = min(cards, key=lambda card: card.free)
    return AllCards(len(cards), step.usage(reserve, smallest), largest_batch(step, tuple(cards), reserve))


def _warnings(architecture: Architecture, job: TrainingJob, found: Placement, given: int) -> tuple[str, ...]:
    gpus = len(found.loads)
    told = list(architecture.assumptions)
    if recipe_of(architecture) is None:
        told.append(
            f"how {architecture.model_type} computes its layers is not known here: activations are counted as for"
            " layers of their shapes in other models; measure a step before you rely on them"
        )
    if any(block.cache is not None and block.cache.per_sequence for block in architecture.blocks):
        told.append("activations of recurrent layers are estimated from their matrices; their scans keep more")
    if job.precision is not TrainingPrecision.FP32:
        old = sorted({load.card.name for load in found.loads if (load.card.capability or (8, 0)) < (8, 0)})
        if old:
            told.append(f"{', '.join(old)}: no bfloat16 units before compute capability 8.0; products are emulated")
    if gpus == 1 and job.strategy is Strategy.FSDP:
        told.append("one GPU is enough: fsdp divides nothing there, and single is the same")
    if job.strategy is Strategy.DDP and gpus < given:
        told.append(
            f"ddp fits on {gpus} of {given} GPUs: where several work together each holds buckets for all gradients too"
        )
    if job.method is Method.GRPO and (job.batch * job.accumulation * gpus) % job.samples:
        told.append(
            f"GRPO compares {job.samples} answers to each prompt: batch {job.batch} x accumulation {job.accumulation}"
            f" x {gpus} GPUs must be a multiple of that"
        )
    return tuple(told)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
