"""Will this training fit, on how many GPUs, with what batch: from shapes alone. Pure.

``make_training_plan`` answers with a plan, or with a refusal that says what is missing and what would fit. How the
bytes come about stands in ``training_usage``; what can be asked for in ``training_job``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuherd.errors import UsageError
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.capability import split_by_capability
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
from gpuherd.models.plan.training_model import training_model
from gpuherd.models.plan.training_placing import Placement, largest_batch, place, together
from gpuherd.models.plan.training_result import (
    AllCards,
    Moment,
    TrainingLoad,
    TrainingPlan,
    TrainingRefusal,
    TrainingUsage,
)
from gpuherd.models.plan.training_task import TrainingTask
from gpuherd.models.plan.training_usage import Step, training_usage
from gpuherd.models.plan.wording import gib
from gpuherd.models.plan.workload import Reserve

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
    if job.strategy is Strategy.SINGLE and gpus not in (None, 1):
        raise UsageError(f"gpus={gpus}: single trains on one GPU; over several say ddp or fsdp")
    if gpus is not None and gpus > max(1, len(together(cards))):
        raise UsageError(f"gpus={gpus}: MIG instances can't share a training, and {len(together(cards))} are none")
    kept = reserve if reserve is not None else Reserve()
    task = TrainingTask(training_model(architecture), job, reward)
    able, remarks = _able(cards, job)
    joined = max(1, len(together(able)))
    if not able or (gpus is not None and gpus > joined):
        asked = f"{gpus} GPUs are asked for, and {joined}" if able else "no GPU"
        reason = f"{asked} can compute as {task.architecture.model} is to be trained: {remarks[0]}"
        return _refusal(task, cards, kept, place(task, cards, kept, gpus=gpus), remarks, reason)
    found = place(task, able, kept, gpus=gpus)
    if found.missing > 0:
        return _refusal(task, able, kept, found, remarks)
    return TrainingPlan(
        architecture=architecture,
        job=job,
        reserve=kept,
        trained=task.trained,
        loads=found.loads,
        checkpointed=_other(task, found, kept, checkpointing=True),
        plain=_other(task, found, kept, checkpointing=False),
        largest_batch=largest_batch(found.step, found.cards, kept),
        on_all=_on_all(task, together(able), kept, found) if gpus is None else None,
        warnings=(*remarks, *_warnings(task, found, len(able) if gpus is None else gpus)),
    )


def _able(cards: Sequence[Card], job: TrainingJob) -> tuple[tuple[Card, ...], tuple[str, ...]]:
    """The cards that can compute in all the job's precisions, and what a person should know of the others."""
    able = tuple(cards)
    told: list[str] = []
    for precision in dict.fromkeys((job.computes_in, job.base_precision)):
        able, sentences = split_by_capability(precision, able)
        told += sentences
    return able, tuple(told)


def _refusal(
    task: TrainingTask,
    cards: Sequence[Card],
    reserve: Reserve,
    found: Placement,
    remarks: tuple[str, ...],
    reason: str = "",
) -> TrainingRefusal:
    """``reason``: why, where it isn't memory; nothing else would fit then but what needs no arithmetic to say."""
    fullest = min(found.loads, key=lambda load: load.left)
    return TrainingRefusal(
        architecture=task.architecture,
        job=task.job,
        reserve=reserve,
        trained=task.trained,
        reason=reason or _too_little(task, found, fullest),
        missing=max(0, found.missing),
        loads=found.loads,
        checkpointed=_other(task, found, reserve, checkpointing=True),
        plain=_other(task, found, reserve, checkpointing=False),
        alternatives=() if reason else alternatives(task, cards, reserve),
        warnings=(*remarks, *_warnings(task, found, len(found.loads))),
    )


def _too_little(task: TrainingTask, found: Placement, fullest: TrainingLoad) -> str:
    share = f"each of {len(found.loads)} GPUs needs" if len(found.loads) > 1 else "one GPU needs"
    return (
        f"{task.job.method.upper()} of {task.architecture.model} trains {task.trained:,} numbers: {share}"
        f" {gib(fullest.usage.total)} at its fullest moment ({fullest.usage.fullest.name}), and {fullest.card.name} has"
        f" {gib(fullest.card.free)} free: {gib(found.missing)} are missing"
    )


def _other(task: TrainingTask, found: Placement, reserve: Reserve, *, checkpointing: bool) -> TrainingUsage:
    """The usage of the fullest GPU with and without checkpointing."""
    fullest = min(found.loads, key=lambda load: load.left)
    if task.job.checkpointing == checkpointing:
        return fullest.usage
    other = task.changed(replace(task.job, checkpointing=checkpointing))
    return Step(other, len(found.loads)).usage(reserve, fullest.card.total)


def _on_all(task: TrainingTask, cards: Sequence[Card], reserve: Reserve, found: Placement) -> AllCards | None:
    if task.job.strategy is not Strategy.FSDP or len(found.loads) >= len(cards):
        return None
    everywhere = place(task, cards, reserve, gpus=len(cards))
    fullest = min(everywhere.loads, key=lambda load: load.left)
    return AllCards(len(cards), fullest.usage, largest_batch(everywhere.step, cards, reserve))


def _warnings(task: TrainingTask, found: Placement, given: int) -> tuple[str, ...]:
    architecture, job, gpus = task.architecture, task.job, len(found.loads)
    told = list(architecture.assumptions)
    if recipe_of(architecture) is None:
        told.append(
            f"how {architecture.model_type} computes its layers is not known here: activations are assumed to be twice"
            " those of such layers in other models; measure a step before you rely on them"
        )
    if any(block.cache is not None and block.cache.per_sequence for block in architecture.blocks):
        told.append(
            "recurrent layers are counted as transformers computes them without kernels; with those of mamba-ssm and"
            " causal-conv1d they keep much less"
        )
    if any(block.kind == "other" and block.tensors for block in architecture.blocks):
        told.append("texts alone are counted: a part beside the text model (images) keeps more while it is used")
    if architecture.is_encoder_decoder:
        told.append("each layer is counted as if it read prompt and answer; encoder and decoder read one each")
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
