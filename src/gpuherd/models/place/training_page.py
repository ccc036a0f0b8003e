"""How plans and refusals of trainings are shown: the page of one, a table of common GPUs, JSON. Pure.

Loaded for ``gpuherd plan --train`` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from gpuherd.columns import Column
from gpuherd.models.describe.description import Architecture
from gpuherd.models.memory.training_job import (
    Method,
    StepMemory,
    Strategy,
    TrainingJob,
    TrainingPrecision,
    TrainingUsage,
)
from gpuherd.models.place.gpus import GpuKind
from gpuherd.models.place.page import (
    KEPT,
    ON_GIVEN_GPUS,
    BarPart,
    Fact,
    Line,
    MemoryBar,
    RenderContext,
    Window,
    bar,
    bar_parts,
    common_gpus_page,
    example,
    figures_table,
    gpu_to_dict,
    gpus_cell,
    gpus_used,
    model_fact,
    model_to_dict,
    next_steps,
    refusal_to_dict,
    render_outcome,
    reserve_to_dict,
    resources_to_dict,
    sizes_to_dict,
    unit_for,
    wrapped,
)
from gpuherd.models.place.request import PlanRequest
from gpuherd.models.place.result import GpuLoad
from gpuherd.models.place.training import TrainingPlan, TrainingRefusal
from gpuherd.units import gib

# The parts of a GPU's bar at its fullest moment, and the figures of ``StepMemory`` that each adds up.
_PARTS = (
    (BarPart("parameters", "weights", "█", "P"), ("parameters", "quantisation", "copies")),
    (BarPart("other models", "others", "=", "="), ("models",)),
    (BarPart("gradients", "state", "▓", "G"), ("gradients", "exchange")),
    (BarPart("optimiser", "cache", "▒", "O"), ("optimiser",)),
    (BarPart("activations", "work", "░", "A"), ("activations",)),
    (BarPart("logits, cache, workspace", "note", "+", "+"), ("logits", "cache", "workspace")),
)
# Part of a moment -> its heading, and how useful it is.
_MOMENT_COLUMNS = {
    "parameters": ("params", 1),
    "quantisation": ("quant.", 9),
    "gradients": ("gradients", 2),
    "optimiser": ("optimiser", 3),
    "copies": ("copies", 7),
    "exchange": ("exchange", 10),
    "models": ("models", 5),
    "activations": ("activations", 4),
    "logits": ("logits", 6),
    "cache": ("KV cache", 8),
    "workspace": ("workspace", 11),
}


def render_training_plan(result: TrainingPlan | TrainingRefusal, context: RenderContext, window: Window) -> list[Line]:
    """The page of one plan or refusal."""
    plan = result if isinstance(result, TrainingPlan) else None
    return render_outcome(
        result,
        context,
        window,
        verdict="" if plan is None else _verdict(plan, len(context.gpus)),
        bars=_bars(result.loads),
        bars_noun="kinds of load",
        figures=_figures(result.fullest.usage, window),
        facts=[model_fact(result.architecture), *_facts(result)],
        steps=() if plan is None else list(next_steps(plan, context.request)),
    )


def _verdict(plan: TrainingPlan, given: int) -> str:
    """The answer in a sentence. ``given``: how many GPUs there are."""
    where = gpus_used(plan, given)
    how = {Strategy.DDP: ", a copy on each (ddp)", Strategy.FSDP: ", divided (fsdp)"}.get(plan.job.strategy, "")
    return f"{_title(plan)} fits on {where}{how}: at most {_in_a_pass(plan.largest_batch, plan.job)}."


def _title(result: TrainingPlan | TrainingRefusal) -> str:
    lora = "" if result.job.lora is None else f" with a LoRA adapter of rank {result.job.lora.rank}"
    return f"{result.job.method.upper()} of {result.architecture.model}{lora}"


def _in_a_pass(batch: int, job: TrainingJob) -> str:
    noun = {Method.SFT: "sequence", Method.DPO: "pair"}.get(job.method, "answer")
    return f"{batch:,} {noun}{'' if batch == 1 else 's'} of {job.tokens:,} tokens on a GPU in a pass"


def _bars(loads: Sequence[GpuLoad[TrainingUsage]]) -> list[MemoryBar]:
    """A bar for all GPUs that are alike."""
    alike = groupby(loads, key=lambda load: (load.usage.total, load.gpu.free, load.gpu.total))
    groups = [list(group) for _, group in alike]
    return [
        bar([load.gpu for load in group], group[0], _parts_of(group[0].usage), group[0].usage.fullest.name)
        for group in groups
    ]


def _parts_of(usage: TrainingUsage) -> list[tuple[BarPart, int]]:
    return [*bar_parts(usage.fullest, _PARTS), (KEPT, usage.context + usage.reserve)]


def _figures(usage: TrainingUsage, window: Window) -> list[Line]:
    """Each moment of a step, on the fullest GPU; the fullest moment is marked."""
    names = [name for name in _MOMENT_COLUMNS if usage.most(name)]
    columns = [
        Column("moment", 0, least=23),
        *[Column(*_MOMENT_COLUMNS[name], right=True) for name in names],
        Column("together", 1, right=True),
    ]
    unit = unit_for(usage.fullest.total)
    # Of two moments with one name the fuller.
    fuller: dict[str, StepMemory] = {}
    for moment in usage.moments:
        if moment.name not in fuller or moment.total > fuller[moment.name].total:
            fuller[moment.name] = moment
    rows = [
        [
            f"{'>' if moment is usage.fullest else ' '} {moment.name}",
            *[unit.of(getattr(moment, name)) for name in names],
            unit.of(moment.total),
        ]
        for moment in fuller.values()
    ]
    return figures_table(columns, rows, unit, window)


_NUMBERS = {
    TrainingPrecision.FP32: "fp32",
    TrainingPrecision.MIXED: "fp32, with products in bf16",
    TrainingPrecision.BF16: "bf16",
}


def _facts(result: TrainingPlan | TrainingRefusal) -> list[Fact]:
    job = result.job
    share = f"{result.trained:,} numbers" + ("" if job.lora is None else f", beside a model in {job.base_precision}")
    passes = f", {job.accumulation} passes before each step" if job.accumulation > 1 else ""
    reference = ", with a reference model" if job.keeps_reference else ""
    with_checkpointing, without = gib(result.checkpointed.total), gib(result.plain.total)
    planned = "with" if job.checkpointing else "without"
    facts = [
        ("trained", f"{share}, by {job.optimiser} in {_NUMBERS[job.precision]}{reference}"),
        ("planned", f"{_in_a_pass(job.batch, job)}{passes}"),
        ("each GPU", f"{with_checkpointing} with checkpointing, {without} without; planned {planned}"),
    ]
    if isinstance(result, TrainingPlan) and result.on_all is not None:
        more = result.on_all
        text = f"{gib(more.usage.total)} on each, at most {_in_a_pass(more.largest_batch, job)}"
        facts.append((f"on all {more.gpus}", text))
    return facts


def render_training_on_common_gpus(
    architecture: Architecture,
    rows: Sequence[tuple[GpuKind, TrainingPlan | None]],
    request: PlanRequest,
    window: Window,
) -> list[Line]:
    """The need of a training on common GPUs."""
    columns = (
        Column("GPU", 0),
        Column("memory", 3, right=True),
        Column("GPUs", 1, right=True),
        Column("most on a GPU", 2, right=True),
    )
    cells = [
        [kind.name, gib(kind.memory), gpus_cell(plan), "-" if plan is None else f"{plan.largest_batch:,}"]
        for kind, plan in rows
    ]
    fitting = [(kind, plan) for kind, plan in rows if plan is not None]
    if not fitting:
        verdict = f"No usual GPU is enough for this training of {architecture.model}; --strategy fsdp divides it."
        return common_gpus_page(wrapped(verdict, window, "bad"), columns, cells, architecture, (), window)
    kind, plan = fitting[0]
    verdict = f"GPUs that {_title(plan)} takes, with {_in_a_pass(plan.job.batch, plan.job)}:"
    lines = common_gpus_page(wrapped(verdict, window, "good"), columns, cells, architecture, (), window)
    return [*lines, *example(ON_GIVEN_GPUS, f"{plan.gpus}x{kind.name}", request, window)]


# ---- JSON ------------------------------------------------------------------------------------------------------------


def training_plan_to_dict(result: TrainingPlan | TrainingRefusal, request: PlanRequest) -> dict[str, Any]:
    """A plan, or a refusal."""
    job = result.job
    content = {
        "model": model_to_dict(result.architecture),
        "fits": isinstance(result, TrainingPlan),
        "training": {**asdict(job), "base": str(job.base_precision), "reference": job.keeps_reference},
        "trained_parameters": result.trained,
        "reserve": reserve_to_dict(result.reserve),
        "gpus": [_load_to_dict(load) for load in result.loads],
        "with_checkpointing_bytes": result.checkpointed.total,
        "without_checkpointing_bytes": result.plain.total,
        "warnings": list(result.warnings),
    }
    if isinstance(result, TrainingRefusal):
        return content | refusal_to_dict(result, request, {})
    on_all = _on_all_to_dict(result)
    return content | {"largest_batch": result.largest_batch, "on_all": on_all, **resources_to_dict(result)}


def _on_all_to_dict(plan: TrainingPlan) -> dict[str, Any] | None:
    if plan.on_all is None:
        return None
    used = plan.on_all.usage.total
    return {"gpus": plan.on_all.gpus, "used_bytes": used, "largest_batch": plan.on_all.largest_batch}


def _load_to_dict(load: GpuLoad[TrainingUsage]) -> dict[str, Any]:
    usage = load.usage
    return {
        **gpu_to_dict(load.gpu),
        **sizes_to_dict({"context": usage.context, "reserve": usage.reserve, "used": usage.total, "left": load.left}),
        "fullest_moment": usage.fullest.name,
        "moments": [
            {"name": moment.name, **sizes_to_dict({**moment.parts(), "total": moment.total})}
            for moment in usage.moments
        ],
    }


def training_on_common_gpus_to_dict(rows: Sequence[tuple[GpuKind, TrainingPlan | None]]) -> list[dict[str, Any]]:
    """A training on common GPUs."""
    return [
        {
            "name": kind.name,
            "memory_bytes": kind.memory,
            "gpus": None if plan is None else plan.gpus,
            "largest_batch": None if plan is None else plan.largest_batch,
        }
        for kind, plan in rows
    ]
