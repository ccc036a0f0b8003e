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
from gpuherd.models.memory.training_job import Method, Strategy, TrainingJob, TrainingPrecision, TrainingUsage
from gpuherd.models.place import page
from gpuherd.models.place.gpus import GpuKind
from gpuherd.models.place.page import KEPT, BarPart, Fact, Line, MemoryBar, RenderContext, Window, sizes_to_dict
from gpuherd.models.place.request import PlanRequest, command_words
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
    return page.render_outcome(
        result,
        context,
        window,
        verdict="" if plan is None else _verdict(plan, len(context.gpus)),
        bars=_bars(result.loads),
        bars_noun="kinds of load",
        figures=_figures(result.fullest.usage, window),
        facts=[page.model_fact(result.architecture), *_facts(result)],
        steps=() if plan is None else list(page.next_steps(plan, context.request)),
    )


def _verdict(plan: TrainingPlan, given: int) -> str:
    """The answer in a sentence. ``given``: how many GPUs there are."""
    where = page.gpus_used(plan, given)
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
    bars = []
    for _, alike in groupby(loads, key=lambda load: (load.usage.total, load.gpu.free, load.gpu.total)):
        group = list(alike)
        usage = group[0].usage
        parts = [*page.bar_parts(usage.fullest, _PARTS), (KEPT, usage.context + usage.reserve)]
        bars.append(page.bar([load.gpu for load in group], group[0], parts, usage.fullest.name))
    return bars


def _figures(usage: TrainingUsage, window: Window) -> list[Line]:
    """Each moment of a step, on the fullest GPU; the fullest moment is marked."""
    names = [name for name in _MOMENT_COLUMNS if usage.most(name)]
    columns = [
        Column("moment", 0, least=23),
        *[Column(*_MOMENT_COLUMNS[name], right=True) for name in names],
        Column("together", 1, right=True),
    ]
    unit = page.unit_for(usage.fullest.total)
    rows = []
    for name in dict.fromkeys(moment.name for moment in usage.moments):
        # Of two moments with one name the fuller.
        moment = max((each for each in usage.moments if each.name == name), key=lambda each: each.total)
        mark = ">" if moment is usage.fullest else " "
        rows.append([f"{mark} {name}", *[unit.of(size) for part, size in moment.parts().items() if part in names]])
        rows[-1].append(unit.of(moment.total))
    return page.headed_table(columns, rows, window, unit)


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
        [kind.name, gib(kind.memory), page.gpus_cell(plan), "-" if plan is None else f"{plan.largest_batch:,}"]
        for kind, plan in rows
    ]
    table = page.headed_table(columns, cells, window)
    fitting = [(kind, plan) for kind, plan in rows if plan is not None]
    if not fitting:
        verdict = f"No usual GPU is enough for this training of {architecture.model}; --strategy fsdp divides it."
        return page.common_gpus_page((verdict, "bad"), table, architecture, window)
    kind, plan = fitting[0]
    verdict = f"GPUs that {_title(plan)} takes, with {_in_a_pass(plan.job.batch, plan.job)}:"
    example = page.ON_GIVEN_GPUS, command_words(request, ("--gpus", f"{plan.gpus}x{kind.name}"))
    return page.common_gpus_page((verdict, "good"), table, architecture, window, example=example)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def training_plan_to_dict(result: TrainingPlan | TrainingRefusal, request: PlanRequest) -> dict[str, Any]:
    """A plan, or a refusal."""
    job = result.job
    content = {
        "model": page.model_to_dict(result.architecture),
        "fits": isinstance(result, TrainingPlan),
        "training": {
            **asdict(job),
            "algorithm": job.algorithm or str(job.method),
            "base": str(job.base_precision),
            "reference": job.keeps_reference,
        },
        "trained_parameters": result.trained,
        "reserve": page.reserve_to_dict(result.reserve),
        "gpus": [_load_to_dict(load) for load in result.loads],
        "with_checkpointing_bytes": result.checkpointed.total,
        "without_checkpointing_bytes": result.plain.total,
        "warnings": list(result.warnings),
    }
    if isinstance(result, TrainingRefusal):
        return content | page.refusal_to_dict(result, request, {})
    more = result.on_all
    on_all = more and {"gpus": more.gpus, "used_bytes": more.usage.total, "largest_batch": more.largest_batch}
    return content | {"largest_batch": result.largest_batch, "on_all": on_all, **page.resources_to_dict(result)}


def _load_to_dict(load: GpuLoad[TrainingUsage]) -> dict[str, Any]:
    usage = load.usage
    return {
        **page.gpu_to_dict(load.gpu),
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
