"""How many GPUs a job asks its queue for, and how much memory on each: by the plan of the model that it loads.

A queue gives a job idle GPUs, any of those that meet its request. So the plan is made for GPUs as they
are when they are idle, once for each size that this machine has, and the least that suffices is requested.

``resources_for`` and ``read_with_precision`` take a model by name and read its headers or config; ``resources_of`` is
pure; ``auto_select_gpus_for_model`` looks at this machine's GPUs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpuherd.errors import JobCannotFit, UsageError
from gpuherd.models.describe.description import Architecture
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.memory.kv_cache import MIB, Reserve, Workload
from gpuherd.models.memory.weights import Precision, split_precision
from gpuherd.models.place.gpus import GpuSpec, gpus_with_memory
from gpuherd.models.place.placement import AnswerTask
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.request import (
    ParallelOption,
    agreed_precision,
    parallel_option,
    parse_precision,
    resolve_precision,
)
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan
from gpuherd.units import gib

logger = logging.getLogger(__name__)

GpuId = int | str

# More bytes than any GPU has.
_BOUNDLESS = 1 << 60


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """What a job asks for.

    Attributes:
        gpus, memory_mb: so many GPUs with so many MB (2^20 bytes) free on each, context and reserve included.
        plan: on GPUs that just have as much; None on a machine without GPUs, where the job runs on the CPU.
        sentence: the request and its reason, for people.
    """

    gpus: int
    memory_mb: int
    plan: MemoryPlan | None
    sentence: str


def resources_for(
    model: str,
    gpus: Sequence[GpuSpec],
    *,
    dtype: str | None = None,
    batch: int | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    parallel: str | None = None,
    gpu_range: tuple[int, int] | None = None,
    most: int | None = None,
    reserve: Reserve = Reserve(),  # noqa: B008 - frozen
    read: Callable[[str], Architecture] = read_architecture,
    spelling: Mapping[str, str | None] = MappingProxyType({}),
) -> PlannedRequest:
    """What a job that uses a model in this way should ask for on a machine with these GPUs. None means not given.

    Args:
        model: as ``read_architecture`` takes it, with ``-8bit`` or ``-4bit`` behind it if wanted.
        gpus, gpu_range, most, spelling: as in ``resources_of``.
        dtype: of the weights in memory; the checkpoint's own if None.
        batch, prompt_tokens, new_tokens: as in ``Workload``.
        parallel: as in ``make_plan``.
        reserve: what is kept free on each GPU.
        read: gives the architecture of a model's name; that of the headers by default.

    Raises:
        UsageError: words that mean nothing, or contradict each other.
        MissingModel, BadModel: the model is not to be had, or can't be planned.
        JobCannotFit: it fits nowhere here.
    """
    architecture, precision = read_with_precision(model, dtype, read)
    given = {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    request = resources_of(
        architecture,
        precision,
        Workload(**{name: number for name, number in given.items() if number is not None}),
        gpus,
        reserve,
        parallel=parallel_option(parallel or "auto"),
        gpu_range=gpu_range,
        most=most,
        spelling=spelling,
    )
    warnings = () if request.plan is None else request.plan.warnings
    remarks = [*architecture.assumptions, *warnings]
    return replace(request, sentence="; ".join([request.sentence, *(each.rstrip(".") for each in remarks)]))


def read_with_precision(
    model: str, dtype: str | None, read: Callable[[str], Architecture] = read_architecture
) -> tuple[Architecture, Precision]:
    """A model by its name, and the precision of its weights in memory; where that had to be assumed, the architecture
    says so. Raises as ``resources_for``."""
    name, suffix = split_precision(model)
    requested = agreed_precision(model, suffix, None if dtype is None else parse_precision(dtype))
    return resolve_precision(read(name), requested)


# ---- the request -----------------------------------------------------------------------------------------------------


def resources_of(
    architecture: Architecture,
    precision: Precision,
    workload: Workload,
    gpus: Sequence[GpuSpec],
    reserve: Reserve = Reserve(),  # noqa: B008 - frozen
    *,
    parallel: ParallelOption = "auto",
    gpu_range: tuple[int, int] | None = None,
    most: int | None = None,
    spelling: Mapping[str, str | None] = MappingProxyType({}),
) -> PlannedRequest:
    """What a job that loads this model should ask for on a machine with these GPUs.

    The fewest GPUs that hold it; of as few the smallest memory, so that the most GPUs will do.

    Args:
        gpus: all GPUs that the job may get, as free as they are when no process uses them (``idle_gpus``); () on a
            machine without GPUs.
        parallel: as in ``make_plan``.
        gpu_range: at least and at most so many GPUs.
        most: a run never has more at once.
        spelling: how a command spells the flags of ``gpuherd plan`` that remedies name, with ``{}`` for the value; None
            for one that it does not have.

    Raises:
        JobCannotFit: it fits nowhere here; the message has the figures and what would fit.
        UsageError: a ``gpu_range`` that makes no sense.
    """
    if gpu_range is not None and not 1 <= gpu_range[0] <= gpu_range[1]:
        raise UsageError(f"{architecture.model}: a model is planned on 1 GPU or more, not on {gpu_range[0]}")

    def plan(some: Sequence[GpuSpec], count: int | None = None, *, advise: bool = False) -> MemoryPlan | AnswerRefusal:
        return make_plan(
            architecture, some, precision, workload, reserve, parallel=parallel, count=count, advise=advise
        )

    if not gpus:
        return _on_the_cpu(plan, reserve, 1 if gpu_range is None else gpu_range[0])
    best: MemoryPlan | None = None
    refused: tuple[AnswerRefusal, list[GpuSpec]] | None = None
    for some in _of_each_size(gpus, most):
        found = _plan_on_fewest(plan, some, gpu_range)
        if found is None:
            reason = f"{gpu_range[0] if gpu_range else 1} GPUs are asked for, and there are {len(some)}"
            found = AnswerTask(architecture, precision, workload, reserve).refusal(reason)
        if isinstance(found, MemoryPlan):
            if best is None or (found.gpus, found.memory_mb) < (best.gpus, best.memory_mb):
                best = found
        elif refused is None or _lacks(found) < _lacks(refused[0]):
            refused = found, some
    if best is not None:
        return PlannedRequest(best.gpus, best.memory_mb, best, _sentence(best, best.memory_mb))
    assert refused is not None  # noqa: S101 - there are GPUs, so there is a plan or a refusal
    refusal, some = refused
    if gpu_range is None or gpu_range[0] <= len(some):
        # The advice of the largest number: with fewer GPUs it fits less.
        advised = plan(some, None if gpu_range is None else min(gpu_range[1], len(some)), advise=True)
        assert isinstance(advised, AnswerRefusal)  # noqa: S101 - as before, now with advice
        refusal = advised
    if gpu_range is None and (most is None or most >= len(gpus)):
        refusal = replace(refusal, reason=refusal.reason + _unequal_gpus_note(plan(gpus), gpus, spelling))
    raise JobCannotFit(_refusal_message(refusal, spelling))


def _lacks(refusal: AnswerRefusal) -> float:
    """By how much it fails: one that isn't about memory fails wholly."""
    return refusal.missing if refusal.loads else float("inf")


def _of_each_size(gpus: Sequence[GpuSpec], most: int | None) -> list[list[GpuSpec]]:
    """For each size all GPUs that have as much, as if they had no more: the queue may give any of them.

    At most ``most`` of them, whole GPUs before MIG instances, since only those work together.
    """
    found = []
    for size in sorted({gpu.free for gpu in gpus}, reverse=True):
        enough = sorted((gpu for gpu in gpus if gpu.free >= size), key=lambda gpu: gpu.mig)
        smallest = min(gpu.total for gpu in enough)
        found.append([replace(gpu, free=size, total=max(size, smallest)) for gpu in enough[:most]])
    return found


def _plan_on_fewest(
    plan: Callable[[Sequence[GpuSpec], int | None], MemoryPlan | AnswerRefusal],
    gpus: Sequence[GpuSpec],
    gpu_range: tuple[int, int] | None,
) -> MemoryPlan | AnswerRefusal | None:
    """A plan on the fewest of these GPUs that are allowed, else the refusal of the most; None for too few GPUs."""
    if gpu_range is None:
        return plan(gpus, None)
    result: MemoryPlan | AnswerRefusal | None = None
    for count in range(gpu_range[0], min(gpu_range[1], len(gpus)) + 1):
        result = plan(gpus, count)
        if isinstance(result, MemoryPlan):
            break
    return result


def _on_the_cpu(
    plan: Callable[[Sequence[GpuSpec], int | None], MemoryPlan | AnswerRefusal], reserve: Reserve, count: int
) -> PlannedRequest:
    """On a machine without GPUs a job that asks for some runs on the CPU. It asks for the fewest that would hold it."""
    result = plan([GpuSpec(str(number), "", total=0, free=_BOUNDLESS) for number in range(count)], count)
    if isinstance(result, AnswerRefusal):
        raise JobCannotFit(result.reason)
    # Nothing is reserved yet for the size of a GPU.
    memory_mb = math.ceil(result.memory_mb / (1 - reserve.share))
    sentence = f"{_sentence(result, memory_mb)}; no GPU is known here, and without GPUs jobs run on the CPU"
    return PlannedRequest(count, memory_mb, None, sentence)


def _unequal_gpus_note(
    result: MemoryPlan | AnswerRefusal, gpus: Sequence[GpuSpec], spelling: Mapping[str, str | None]
) -> str:
    """For a model that fits on these GPUs for that reason alone that some have more than others."""
    if isinstance(result, AnswerRefusal) or len({gpu.free for gpu in gpus}) < 2:
        return ""
    sizes = gpus_with_memory([load.gpu for load in result.loads])
    note = f"; it fits on {sizes}, but a job asks for as much on each of its GPUs"
    smallest = min(load.gpu.free for load in result.loads)
    if sum(gpu.free >= smallest for gpu in gpus) > result.gpus:
        return note
    by_number = spell(("--num-gpus", str(result.gpus)), spelling)
    return note if by_number is None else f"{note}: {by_number} without naming the model is given these"


def _sentence(plan: MemoryPlan, memory_mb: int) -> str:
    workload = plan.workload
    many = "1 sequence" if workload.batch == 1 else f"{workload.batch} sequences"
    free = gib(memory_mb * MIB)
    where = f"1 GPU with {free} free" if plan.gpus == 1 else f"{plan.gpus} GPUs with {free} free on each"
    return f"{plan.architecture.model} in {plan.precision}, {many} of {workload.tokens} tokens: asks for {where}"


def spell(words: Sequence[str], spelling: Mapping[str, str | None]) -> str | None:
    """Flags and their values in the caller's spelling; None where the caller lacks one of them.

    >>> spell(("--batch", "4"), {"--batch": "--batch-size {}"}), spell(("--batch", "4"), {})
    ('--batch-size 4', '--batch 4')
    """
    forms = [spelling.get(flag, f"{flag} {{}}") for flag in words[::2]]
    known = [form for form in forms if form is not None]
    if len(known) < len(forms):
        return None
    return " ".join(form.format(value) for form, value in zip(known, words[1::2], strict=True))


def _refusal_message(refusal: AnswerRefusal, spelling: Mapping[str, str | None]) -> str:
    """The reason, and what would fit as words of the command line."""
    options = [
        (spell(each.words, spelling), each.sentence) for each in refusal.alternatives if each.words[0] != "--gpus"
    ]
    changes = [f"{words} ({sentence})" for words, sentence in options if words is not None]
    machines = [each.sentence for each in refusal.alternatives if each.words[0] == "--gpus"]
    return refusal.with_advice([*changes, *machines])


# ---- the GPUs of this machine now ------------------------------------------------------------------------------------


def auto_select_gpus_for_model(
    model: str,
    *,
    dtype: str | None = None,
    workload: Workload = Workload(),  # noqa: B008 - frozen
    parallel: ParallelOption = "auto",
) -> list[GpuId]:
    """The fewest GPUs on which this model fits now, in the order of its blocks.

    ``gpuherd.gpus.auto_select_gpus_for_model`` answers it for a mere size, which has no layers; it knows no models.

    GPUs that are free by gpuherd's rule are taken before those that others use, if as few of them do; memory that
    others use is taken off. Ids are physical, as those of ``gpuherd.gpus``.

    Args:
        model: a known name, a Hugging Face id, a folder or a file; with ``-8bit`` or ``-4bit`` behind it if wanted.
        dtype: of the weights in memory; the checkpoint's own by default.
        workload: what it is to do at once.
        parallel: as in ``make_plan``.

    Returns:
        GPU ids; [] with a warning on a machine without GPUs.

    Raises:
        JobCannotFit: a ValueError; it fits nowhere now, with the figures and what would fit.
        UsageError, MissingModel, BadModel: a dtype that means nothing, or no such model.
    """
    from gpuherd.models.place.inventory import gpus_now

    architecture, precision = read_with_precision(model, dtype)
    for assumed in architecture.assumptions:
        logger.warning("%s: %s", model, assumed)
    idle, any_gpus = gpus_now(), gpus_now(busy_too=True)
    if not any_gpus.gpus:
        logger.warning("no GPU is available: %s", any_gpus.problem or "; ".join(any_gpus.left_out))
        return []

    def plan(gpus: tuple[GpuSpec, ...]) -> MemoryPlan | AnswerRefusal:
        return make_plan(architecture, gpus, precision, workload, parallel=parallel)

    on_idle = plan(idle.gpus) if idle.gpus else None
    on_any = plan(any_gpus.gpus)
    if isinstance(on_idle, MemoryPlan) and not (isinstance(on_any, MemoryPlan) and on_any.gpus < on_idle.gpus):
        return _gpu_ids(on_idle)
    if isinstance(on_any, MemoryPlan):
        return _gpu_ids(on_any)
    raise JobCannotFit(on_any.with_advice([each.sentence for each in on_any.alternatives]))


def _gpu_ids(plan: MemoryPlan) -> list[GpuId]:
    labels = [load.gpu.label for load in plan.loads]
    return [int(label) if label.isdigit() else label for label in labels]
