"""Will a training fit, where, with what batch, and what else would: from shapes alone. Pure.

``single`` takes the emptiest GPU; ``ddp`` as many as fit, each with a batch of its own; ``fsdp`` the fewest that fit,
because what is divided over fewer GPUs is faster than over more. How the bytes come about stands in ``training_usage``;
what can be trained, and how, in ``training_job``. ``planner`` is the same for a model that generates answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.models.describe.description import Architecture
from gpuherd.models.memory.kv_cache import GIB, Reserve
from gpuherd.models.memory.training import Step, TrainingTask
from gpuherd.models.memory.training_job import (
    LoraShape,
    Method,
    Optimiser,
    Strategy,
    TrainingJob,
    TrainingPrecision,
    TrainingUsage,
)
from gpuherd.models.memory.training_states import has_linear, training_model
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import (
    MOST_COMMON_GPUS,
    GpuKind,
    GpuSpec,
    able_to_cooperate,
    common_kinds,
    gpus_of_kind,
    gpus_option,
    split_by_capability,
)
from gpuherd.models.place.result import Alternative, GpuLoad, PlanOutcome, Refusal
from gpuherd.models.place.split import fit_batch_size, largest
from gpuherd.units import gib


@dataclass(frozen=True, kw_only=True)
class _Training(PlanOutcome[TrainingUsage]):
    """A training.

    Attributes:
        trained: how many numbers are trained.
        checkpointed, plain: usage of the fullest GPU with and without checkpointing, whichever the job asks for.
    """

    job: TrainingJob
    trained: int
    checkpointed: TrainingUsage
    plain: TrainingUsage


@dataclass(frozen=True, slots=True)
class AllGpus:
    """A training divided over all GPUs that were given."""

    gpus: int
    usage: TrainingUsage
    largest_batch: int


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(_Training):
    """A training that fits.

    Attributes:
        loads: ``fsdp``: the fewest that fit; ``ddp``: all that fit; ``single``: one.
        largest_batch: on a GPU, with these tokens, on the GPUs of ``loads``.
        on_all: the same job divided over all GPUs: usage of the fullest and largest batch; None where ``loads`` has
            all of them or more GPUs change nothing.
    """

    largest_batch: int
    on_all: AllGpus | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingRefusal(_Training, Refusal):
    """A training that fits nowhere."""


def make_training_plan(
    architecture: Architecture,
    gpus: Sequence[GpuSpec],
    job: TrainingJob,
    reserve: Reserve = Reserve(),  # noqa: B008 - frozen
    *,
    count: int | None = None,
    reward: Architecture | None = None,
) -> TrainingPlan | TrainingRefusal:
    """How a training lies on these GPUs, or why it doesn't fit and what would.

    Args:
        architecture: the model, without an adapter.
        gpus: those that may be used; what others use of them is not counted as free.
        reserve: kept free on each.
        count: use exactly so many, the emptiest.
        reward: a reward model, which lies whole on each GPU.

    Raises:
        UsageError: no GPUs, or ``count`` is not a number of them; a LoRA target that the model doesn't have.
    """
    _check_count(gpus, job, count)
    task = TrainingTask(training_model(architecture), job, reward)
    result = _place(task, gpus, reserve, count)
    if isinstance(result, TrainingRefusal) and not result.incapable:
        return replace(result, alternatives=_alternatives(task, _capable_gpus(gpus, job)[0], reserve))
    return result


def train_on_common_gpus(
    architecture: Architecture,
    job: TrainingJob,
    reserve: Reserve,
    reward: Architecture | None = None,
    *,
    count: int | None = None,
) -> list[tuple[GpuKind, TrainingPlan | None]]:
    """A training on the fewest of each common kind; None where it doesn't fit. Only what is divided needs several."""
    given = count or (MOST_COMMON_GPUS if job.strategy is Strategy.FSDP else 1)
    kinds = {kind: gpus_of_kind(kind, given) for kind in common_kinds()}
    _check_count(next(iter(kinds.values())), job, count)
    task = TrainingTask(training_model(architecture), job, reward)
    results = {kind: _place(task, gpus, reserve, count) for kind, gpus in kinds.items()}
    return [(kind, result if isinstance(result, TrainingPlan) else None) for kind, result in results.items()]


def _check_count(gpus: Sequence[GpuSpec], job: TrainingJob, count: int | None) -> None:
    """Raises UsageError: no GPUs, or this job can't take exactly ``count`` of them."""
    cooperating = len(able_to_cooperate(gpus))
    if not gpus:
        raise UsageError("no GPUs to plan for; name some: --gpus 4x40GB")
    if count is not None and not 1 <= count <= len(gpus):
        raise UsageError(f"gpus={count}: there are {len(gpus)}; take 1 to {len(gpus)}")
    if job.strategy is Strategy.SINGLE and count not in (None, 1):
        raise UsageError(f"gpus={count}: single trains on one GPU; over several say ddp or fsdp")
    if count is not None and count > max(1, cooperating):
        raise UsageError(f"gpus={count}: MIG instances can't share a training, and {cooperating} are none")


# ---- where it goes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingPlacement:
    """A training on GPUs, whether it fits there or not."""

    step: Step
    loads: tuple[GpuLoad[TrainingUsage], ...]

    @property
    def fullest(self) -> GpuLoad[TrainingUsage]:
        """The GPU with the least memory left."""
        return min(self.loads, key=lambda load: load.left)

    @property
    def missing(self) -> int:
        """Bytes that the fullest GPU has too little; 0 or less where it fits."""
        return -self.fullest.left

    def fit_batch_size(self, reserve: Reserve) -> int:
        """The most sequences (pairs of ``dpo``) that each GPU takes in one pass; 0 where not one fits."""
        room = min(load.gpu.available(reserve) for load in self.loads)
        return fit_batch_size(lambda batch: self.step.most(batch) <= room)


def _place(
    task: TrainingTask, gpus: Sequence[GpuSpec], reserve: Reserve, count: int | None = None
) -> TrainingPlan | TrainingRefusal:
    """The plan, or a refusal without alternatives. ``count``: exactly so many GPUs, the emptiest; a checked one."""
    able, remarks = _capable_gpus(gpus, task.job)
    joined = max(1, len(able_to_cooperate(able)))
    if not able or (count is not None and count > joined):
        asked = f"{count} GPUs are asked for, and {joined}" if able else "no GPU"
        reason = f"{asked} can compute as {task.architecture.model} is to be trained: {remarks[0]}"
        return _refusal(task, _best_placement(task, gpus, reserve, count), reserve, remarks, reason)
    found = _best_placement(task, able, reserve, count)
    if found.missing > 0:
        return _refusal(task, found, reserve, remarks)
    return TrainingPlan(
        **_figures(task, found, reserve),
        largest_batch=found.fit_batch_size(reserve),
        on_all=_on_all(task, able_to_cooperate(able), reserve, found) if count is None else None,
        warnings=(*remarks, *_warnings(task, found, len(able) if count is None else count)),
    )


def _fits(task: TrainingTask, gpus: Sequence[GpuSpec], reserve: Reserve) -> bool:
    """Whether there is a placement that fits."""
    roomiest = _roomiest_first(gpus, reserve)
    return any(
        _on(task, _first(roomiest, alike[-1]), reserve).missing <= 0
        for alike in _numbers_to_try(task, roomiest, reserve)
    )


def _best_placement(
    task: TrainingTask, gpus: Sequence[GpuSpec], reserve: Reserve, count: int | None = None
) -> TrainingPlacement:
    """The best placement: one that fits if there is any, else the one that misses least."""
    roomiest = _roomiest_first(gpus, reserve)

    def on(number: int) -> TrainingPlacement:
        return _on(task, _first(roomiest, number), reserve)

    tried: list[TrainingPlacement] = []
    for alike in [(count,)] if count is not None else _numbers_to_try(task, roomiest, reserve):
        tried.append(on(alike[-1]))
        if tried[-1].missing > 0:
            continue
        # Of GPUs that are alike more hold less each: the fewest that fit stand behind the last too small number.
        fewest = 1 + largest(lambda number: on(number).missing > 0, alike[0] - 1, alike[-1] - 1)
        return tried[-1] if fewest == alike[-1] else on(fewest)
    return min(tried, key=lambda placement: placement.missing)


def _roomiest_first(gpus: Sequence[GpuSpec], reserve: Reserve) -> list[GpuSpec]:
    return sorted(gpus, key=lambda gpu: gpu.available(reserve), reverse=True)


def _first(roomiest: Sequence[GpuSpec], number: int) -> Sequence[GpuSpec]:
    """The roomiest that can share a training."""
    return roomiest[:1] if number == 1 else able_to_cooperate(roomiest)[:number]


def _numbers_to_try(task: TrainingTask, roomiest: Sequence[GpuSpec], reserve: Reserve) -> Iterator[tuple[int, ...]]:
    """Numbers of GPUs to try, the best first; together stand those among which one more GPU never needs more room.

    ``fsdp`` takes the fewest: one, which divides nothing, then those that end in GPUs that are alike. ``ddp`` takes
    all that fit: what it needs is the same on any number but one.
    """
    able = able_to_cooperate(roomiest)
    most = len(able)
    if task.job.strategy is Strategy.FSDP:
        yield (1,)
        rooms = groupby(range(2, most + 1), key=lambda number: (able[number - 1].free, able[number - 1].total))
        yield from (tuple(alike) for _, alike in rooms)
    else:
        if task.job.strategy is Strategy.DDP and most > 1:
            held = Step(task, 2).most()
            enough = sum(gpu.available(reserve) >= held for gpu in able)
            yield from [(enough,)] if enough > 1 else []
        yield (1,)


def _on(task: TrainingTask, gpus: Sequence[GpuSpec], reserve: Reserve) -> TrainingPlacement:
    step = Step(task, len(gpus))
    usages = {total: step.usage(reserve, total) for total in {gpu.total for gpu in gpus}}
    return TrainingPlacement(step, tuple(GpuLoad(gpu, usages[gpu.total]) for gpu in gpus))


def _capable_gpus(gpus: Sequence[GpuSpec], job: TrainingJob) -> tuple[tuple[GpuSpec, ...], tuple[str, ...]]:
    """The GPUs that can compute in all the job's precisions, and what a person should know of the others."""
    able = tuple(gpus)
    remarks: list[str] = []
    for precision in dict.fromkeys((job.computes_in, job.base_precision)):
        able, sentences = split_by_capability(precision, able)
        remarks += sentences
    return able, tuple(remarks)


def _refusal(
    task: TrainingTask, found: TrainingPlacement, reserve: Reserve, remarks: tuple[str, ...], incapable: str = ""
) -> TrainingRefusal:
    """``incapable``: the reason, where it isn't memory."""
    return TrainingRefusal(
        **_figures(task, found, reserve),
        reason=incapable or _too_large(task, found),
        missing=max(0, found.missing),
        incapable=bool(incapable),
        warnings=(*remarks, *_warnings(task, found, len(found.loads))),
    )


def _figures(task: TrainingTask, found: TrainingPlacement, reserve: Reserve) -> dict[str, Any]:
    """The fields that a plan and a refusal have in common."""
    usages = {each: _usage_with(task, found, reserve, checkpointing=each) for each in (True, False)}
    return {
        "architecture": task.architecture,
        "job": task.job,
        "reserve": reserve,
        "trained": task.trained,
        "loads": found.loads,
        "checkpointed": usages[True],
        "plain": usages[False],
    }


def _too_large(task: TrainingTask, found: TrainingPlacement) -> str:
    fullest = found.fullest
    share = f"each of {len(found.loads)} GPUs needs" if len(found.loads) > 1 else "one GPU needs"
    algorithm = task.job.algorithm or task.job.method.upper()
    return (
        f"{algorithm} of {task.architecture.model} trains {task.trained:,} numbers: {share}"
        f" {gib(fullest.usage.total)} at its fullest moment ({fullest.usage.fullest.name}), and {fullest.gpu.name} has"
        f" {gib(fullest.gpu.free)} free: {gib(found.missing)} are missing"
    )


def _usage_with(
    task: TrainingTask, found: TrainingPlacement, reserve: Reserve, *, checkpointing: bool
) -> TrainingUsage:
    """The usage of the fullest GPU with or without checkpointing."""
    if task.job.checkpointing == checkpointing:
        return found.fullest.usage
    other = task.changed(replace(task.job, checkpointing=checkpointing))
    return Step(other, len(found.loads)).usage(reserve, found.fullest.gpu.total)


def _on_all(task: TrainingTask, gpus: Sequence[GpuSpec], reserve: Reserve, found: TrainingPlacement) -> AllGpus | None:
    if task.job.strategy is not Strategy.FSDP or len(found.loads) >= len(gpus):
        return None
    everywhere = _best_placement(task, gpus, reserve, len(gpus))
    return AllGpus(len(gpus), everywhere.fullest.usage, everywhere.fit_batch_size(reserve))


def _warnings(task: TrainingTask, found: TrainingPlacement, given: int) -> tuple[str, ...]:
    architecture, job, gpus = task.architecture, task.job, len(found.loads)
    warnings = list(architecture.assumptions)
    if not architecture.trainings_measured:
        warnings.append(
            f"how {architecture.model_type} computes its layers was not measured here (torch and transformers do that"
            " from a config): activations are assumed to be twice those of Llama's layers; measure a step before you"
            " rely on them"
        )
    if any(block.cache is not None and block.cache.per_sequence for block in architecture.blocks):
        warnings.append(
            "recurrent layers are counted as transformers computes them without kernels; with those of mamba-ssm and"
            " causal-conv1d they keep much less"
        )
    if any(block.kind == "other" and block.tensors for block in architecture.blocks):
        warnings.append("texts alone are counted: a part beside the text model (images) keeps more while it is used")
    if architecture.is_encoder_decoder:
        warnings.append("each layer is counted as if it read prompt and answer; encoder and decoder read one each")
    if gpus == 1 and job.strategy is Strategy.FSDP:
        warnings.append("one GPU is enough: fsdp divides nothing there, and single is the same")
    if job.strategy is Strategy.DDP and gpus < given:
        warnings.append(
            f"ddp fits on {gpus} of {given} GPUs: where several work together each holds buckets for all gradients too"
        )
    if job.method is Method.GRPO and (job.batch * job.accumulation * gpus) % job.samples:
        warnings.append(
            f"GRPO compares {job.samples} answers to each prompt: batch {job.batch} x accumulation {job.accumulation}"
            f" x {gpus} GPUs must be a multiple of that"
        )
    return tuple(warnings)


# ---- what else would fit ---------------------------------------------------------------------------------------------

_USUAL_GB = (12, 16, 24, 32, 40, 48, 80, 96, 141, 192, 288)
_MOST_TRAINING_GPUS = 1024
_RANK = 16


def _alternatives(task: TrainingTask, gpus: Sequence[GpuSpec], reserve: Reserve) -> tuple[Alternative, ...]:
    """Changes that make the job fit. Those that only cost time come first, then other numbers, then other GPUs."""
    job = task.job
    found = [
        Alternative(words, sentence)
        for words, sentence, changed in _changes(job, gpus)
        if _can(task, changed) and _fits(task.changed(changed), gpus, reserve)
    ]
    smaller = _smaller_batch(task, gpus, reserve)
    saving = _saving(job)
    if smaller is not None:
        found.insert(0, smaller)
    elif (
        saving != job
        and not any(_costs_only_time(each) for each in found)
        and _fits(task.changed(saving), gpus, reserve)
    ):
        words = ("--checkpointing", "--loss", "chunked", "--batch", "1", "--accumulation", str(saving.accumulation))
        found.insert(0, Alternative(words, "checkpointing, a chunked loss and one sequence at a time together"))
    return (*found, *_other_gpus(task, gpus, reserve))


def _can(task: TrainingTask, changed: TrainingJob) -> bool:
    """Whether the model has what the changed job asks for: an adapter needs linear modules."""
    return changed.lora is None or task.job.lora is not None or has_linear(task.plain)


def _changes(job: TrainingJob, gpus: Sequence[GpuSpec]) -> Iterator[tuple[tuple[str, ...], str, TrainingJob]]:
    if not job.checkpointing:
        sentence = "with checkpointing: about a third more time, and layers keep their inputs alone"
        yield ("--checkpointing",), sentence, replace(job, checkpointing=True)
    if job.loss == "whole":
        yield ("--loss", "chunked"), "with the loss computed in chunks of positions", replace(job, loss="chunked")
    if job.strategy is not Strategy.FSDP and len(gpus) > 1 and job.divisible:
        sentence = f"divided over the {len(gpus)} GPUs (fsdp)"
        yield ("--strategy", "fsdp"), sentence, replace(job, strategy=Strategy.FSDP)
    if job.optimiser is Optimiser.ADAMW and job.strategy is not Strategy.FSDP:
        sentence = "with 8-bit optimiser states (bitsandbytes)"
        yield ("--optimiser", "adamw-8bit"), sentence, replace(job, optimiser=Optimiser.ADAMW_8BIT)
    if job.optimiser in (Optimiser.ADAMW, Optimiser.ADAMW_8BIT):
        sentence = "with Adafactor, which keeps rows' and columns' means alone"
        yield ("--optimiser", "adafactor"), sentence, replace(job, optimiser=Optimiser.ADAFACTOR)
    if job.lora is None:
        if job.precision is not TrainingPrecision.BF16:
            sentence = "with parameters and optimiser in bf16: small updates are lost to rounding"
            yield ("--training-precision", "bf16"), sentence, replace(job, precision=TrainingPrecision.BF16)
        lora = replace(job, lora=LoraShape(_RANK))
        yield ("--lora", str(_RANK)), f"a LoRA adapter of rank {_RANK} in place of the whole model", lora
        words = ("--lora", str(_RANK), "--dtype", "nf4")
        yield words, f"a LoRA adapter of rank {_RANK} on a model in 4 bits (QLoRA)", replace(lora, base=Precision.NF4)
    elif job.base_precision not in (Precision.NF4, Precision.NF4_DQ):
        yield ("--dtype", "nf4"), "with the frozen model in 4 bits (QLoRA)", replace(job, base=Precision.NF4)


def _saving(job: TrainingJob) -> TrainingJob:
    """The same training with everything that only costs time."""
    return replace(job, checkpointing=True, loss="chunked", batch=1, accumulation=job.accumulation * job.batch)


def _costs_only_time(alternative: Alternative) -> bool:
    return alternative.words[0] in ("--checkpointing", "--loss", "--strategy")


def _smaller_batch(task: TrainingTask, gpus: Sequence[GpuSpec], reserve: Reserve) -> Alternative | None:
    """The largest batch below the requested one, with as many passes as make up for it."""
    job = task.job
    if job.batch == 1:
        return None
    single = _best_placement(task.changed(replace(job, batch=1, accumulation=max(2, job.accumulation))), gpus, reserve)
    batch = min(job.batch - 1, single.fit_batch_size(reserve))
    if batch < 1:
        return None
    passes = -(-job.batch * job.accumulation // batch)
    if not _fits(task.changed(replace(job, batch=batch, accumulation=passes)), gpus, reserve):
        return None
    words = ("--batch", str(batch), "--accumulation", str(passes))
    return Alternative(words, f"{batch} at a time, {passes} times before each step")


def _other_gpus(task: TrainingTask, gpus: Sequence[GpuSpec], reserve: Reserve) -> Iterator[Alternative]:
    """More GPUs like the emptiest one, by FSDP; the smallest usual GPU that takes all of it."""
    job, like = task.job, max(gpus, key=lambda gpu: gpu.free)
    if job.divisible:
        divided = task if job.strategy is Strategy.FSDP else task.changed(replace(job, strategy=Strategy.FSDP))

        def too_few(number: int) -> bool:
            return Step(divided, number).usage(reserve, like.total).total > like.free

        if not too_few(_MOST_TRAINING_GPUS):
            fewest = 1 + largest(too_few, len(gpus), _MOST_TRAINING_GPUS - 1)
            words = gpus_option([like] * fewest)
            sentence = f"{words.replace('x', ' GPUs of ', 1)}, divided (fsdp)"
            yield Alternative(("--gpus", words, "--strategy", "fsdp"), sentence)
    many = len(gpus) if job.strategy is not Strategy.SINGLE else 1
    whole = Step(task, many)
    for size_gb in _USUAL_GB:
        total = size_gb * GIB
        if total > like.total and whole.usage(reserve, total).total <= total:
            yield Alternative(("--gpus", f"{many}x{size_gb}GB"), f"{many} GPU{'s' * (many > 1)} of {size_gb} GB")
            return
