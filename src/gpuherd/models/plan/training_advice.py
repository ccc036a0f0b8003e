"""What would fit instead of a training that doesn't: the smallest change first, each one planned before it is said.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.cards import words_for
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.result import Alternative
from gpuherd.models.plan.training_job import LoraShape, Optimiser, Strategy, TrainingJob, TrainingPrecision
from gpuherd.models.plan.training_model import TrainingModel
from gpuherd.models.plan.training_placing import largest_batch, place
from gpuherd.models.plan.training_usage import Step
from gpuherd.models.plan.workload import GIB, Reserve

_USUAL_GB = (12, 16, 24, 32, 40, 48, 80, 96, 141, 192, 288)
_MOST_GPUS = 1024
_RANK = 16


def alternatives(
    model: TrainingModel,
    cards: Sequence[Card],
    job: TrainingJob,
    reserve: Reserve,
    reward: Architecture | None = None,
) -> tuple[Alternative, ...]:
    """Changes that make the job fit. Those that only cost time come first, then other numbers, then other GPUs."""

    def fits(changed: TrainingJob) -> bool:
        return place(model, cards, changed, reserve, reward=reward).missing <= 0

    found = [Alternative(words, sentence) for words, sentence, changed in _changes(job, cards) if fits(changed)]
    smaller = _smaller_batch(model, cards, job, reserve, reward)
    saving = _saving(job)
    if smaller is not None:
        found.insert(0, smaller)
    elif saving != job and not any(_costs_only_time(each) for each in found) and fits(saving):
        words = ("--checkpointing", "--loss", "chunked", "--batch", "1", "--accumulation", str(saving.accumulation))
        found.insert(0, Alternative(words, "checkpointing, a chunked loss and one sequence at a time together"))
    found += _other_gpus(model, cards, job, reserve, reward)
    return tuple(found)


def _changes(job: TrainingJob, cards: Sequence[Card]) -> Iterator[tuple[tuple[str, ...], str, TrainingJob]]:
    if not job.checkpointing:
        sentence = "with checkpointing: about a third more time, and layers keep their inputs alone"
        yield ("--checkpointing",), sentence, replace(job, checkpointing=True)
    if job.loss == "whole":
        yield ("--loss", "chunked"), "with the loss computed in chunks of positions", replace(job, loss="chunked")
    divisible = job.optimiser is not Optimiser.ADAMW_8BIT and job.base is not Precision.INT8
    if job.strategy is not Strategy.FSDP and len(cards) > 1 and divisible:
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


def _smaller_batch(
    model: TrainingModel,
    cards: Sequence[Card],
    job: TrainingJob,
    reserve: Reserve,
    reward: Architecture | None,
) -> Alternative | None:
    """The largest batch below the one asked for, with as many passes as make up for it."""
    if job.batch == 1:
        return None
    placed = place(model, cards, replace(job, batch=1, accumulation=max(2, job.accumulation)), reserve, reward=reward)
    batch = min(job.batch - 1, largest_batch(placed.step, placed.cards, reserve))
    if batch < 1:
        return None
    passes = -(-job.batch * job.accumulation // batch)
    changed = replace(job, batch=batch, accumulation=passes)
    if place(model, cards, changed, reserve, reward=reward).missing > 0:
        return None
    words = ("--batch", str(batch), "--accumulation", str(passes))
    return Alternative(words, f"{batch} at a time, {passes} times before each step")


def _other_gpus(
    model: TrainingModel,
    cards: Sequence[Card],
    job: TrainingJob,
    reserve: Reserve,
    reward: Architecture | None,
) -> Iterator[Alternative]:
    """More GPUs like the emptiest one, by FSDP; the smallest usual card that takes all of it."""
    like = max(cards, key=lambda card: card.free)
    divisible = job.optimiser is not Optimiser.ADAMW_8BIT and job.base is not Precision.INT8

    def divided(gpus: int) -> bool:
        step = Step(model, replace(job, strategy=Strategy.FSDP), gpus=gpus, reward=reward)
        return step.usage(reserve, like).total <= like.free

    if divisible and divided(_MOST_GPUS):
        low, high = len(cards), _MOST_GPUS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if divided(middle) else (middle, high)
        words = words_for([like] * high)
        sentence = f"{words.replace('x', ' GPUs of ', 1)}, divided (fsdp)"
        yield Alternative(("--gpus", words, "--strategy", "fsdp"), sentence)
    whole = Step(model, job, gpus=len(cards), reward=reward)
    for size_gb in _USUAL_GB:
        card = Card("0", f"{size_gb}GB", size_gb * GIB, size_gb * GIB)
        if card.total > like.total and whole.usage(reserve, card).total <= card.free:
            many = len(cards) if job.strategy is not Strategy.SINGLE else 1
            yield Alternative(("--gpus", f"{many}x{size_gb}GB"), f"{many} GPU{'s' * (many > 1)} of {size_gb} GB")
            return
