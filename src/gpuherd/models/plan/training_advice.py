"""What would fit instead of a training that doesn't: the smallest change first, each one planned before it is said.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpuherd.models.plan.card import Card
from gpuherd.models.plan.cards import words_for
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.result import Alternative
from gpuherd.models.plan.training_job import LoraShape, Optimiser, Strategy, TrainingJob, TrainingPrecision
from gpuherd.models.plan.training_placing import fits, largest_batch, place
from gpuherd.models.plan.training_states import has_linear
from gpuherd.models.plan.training_task import TrainingTask
from gpuherd.models.plan.training_usage import Step
from gpuherd.models.plan.workload import GIB, Reserve

_USUAL_GB = (12, 16, 24, 32, 40, 48, 80, 96, 141, 192, 288)
_MOST_GPUS = 1024
_RANK = 16


def alternatives(task: TrainingTask, cards: Sequence[Card], reserve: Reserve) -> tuple[Alternative, ...]:
    """Changes that make the job fit. Those that only cost time come first, then other numbers, then other GPUs."""
    job = task.job
    found = [
        Alternative(words, sentence)
        for words, sentence, changed in _changes(job, cards)
        if _can(task, changed) and fits(task.changed(changed), cards, reserve)
    ]
    smaller = _smaller_batch(task, cards, reserve)
    saving = _saving(job)
    if smaller is not None:
        found.insert(0, smaller)
    elif (
        saving != job
        and not any(_costs_only_time(each) for each in found)
        and fits(task.changed(saving), cards, reserve)
    ):
        words = ("--checkpointing", "--loss", "chunked", "--batch", "1", "--accumulation", str(saving.accumulation))
        found.insert(0, Alternative(words, "checkpointing, a chunked loss and one sequence at a time together"))
    return (*found, *_other_gpus(task, cards, reserve))


def _can(task: TrainingTask, changed: TrainingJob) -> bool:
    """Whether the model has what the changed job asks for: an adapter needs linear modules."""
    return changed.lora is None or task.job.lora is not None or has_linear(task.plain)


def _changes(job: TrainingJob, cards: Sequence[Card]) -> Iterator[tuple[tuple[str, ...], str, TrainingJob]]:
    if not job.checkpointing:
        sentence = "with checkpointing: about a third more time, and layers keep their inputs alone"
        yield ("--checkpointing",), sentence, replace(job, checkpointing=True)
    if job.loss == "whole":
        yield ("--loss", "chunked"), "with the loss computed in chunks of positions", replace(job, loss="chunked")
    if job.strategy is not Strategy.FSDP and len(cards) > 1 and job.divisible:
        sentence = f"divided over the {len(cards)} GPUs (fsdp)"
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


def _smaller_batch(task: TrainingTask, cards: Sequence[Card], reserve: Reserve) -> Alternative | None:
    """The largest batch below the one asked for, with as many passes as make up for it."""
    job = task.job
    if job.batch == 1:
        return None
    placed = place(task.changed(replace(job, batch=1, accumulation=max(2, job.accumulation))), cards, reserve)
    batch = min(job.batch - 1, largest_batch(placed.step, placed.cards, reserve))
    if batch < 1:
        return None
    passes = -(-job.batch * job.accumulation // batch)
    if not fits(task.changed(replace(job, batch=batch, accumulation=passes)), cards, reserve):
        return None
    words = ("--batch", str(batch), "--accumulation", str(passes))
    return Alternative(words, f"{batch} at a time, {passes} times before each step")


def _other_gpus(task: TrainingTask, cards: Sequence[Card], reserve: Reserve) -> Iterator[Alternative]:
    """More GPUs like the emptiest one, by FSDP; the smallest usual card that takes all of it."""
    job, like = task.job, max(cards, key=lambda card: card.free)
    if job.divisible:
        divided = task if job.strategy is Strategy.FSDP else task.changed(replace(job, strategy=Strategy.FSDP))

        def enough(gpus: int) -> bool:
            return Step(divided, gpus).usage(reserve, like.total).total <= like.free

        if enough(_MOST_GPUS):
            low, high = len(cards), _MOST_GPUS
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if enough(middle) else (middle, high)
            words = words_for([like] * high)
            sentence = f"{words.replace('x', ' GPUs of ', 1)}, divided (fsdp)"
            yield Alternative(("--gpus", words, "--strategy", "fsdp"), sentence)
    many = len(cards) if job.strategy is not Strategy.SINGLE else 1
    whole = Step(task, many)
    for size_gb in _USUAL_GB:
        card = Card("0", f"{size_gb}GB", size_gb * GIB, size_gb * GIB)
        if card.total > like.total and whole.usage(reserve, card.total).total <= card.free:
            yield Alternative(("--gpus", f"{many}x{size_gb}GB"), f"{many} GPU{'s' * (many > 1)} of {size_gb} GB")
            return
