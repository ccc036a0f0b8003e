"""How plans and refusals of answers are shown: page, table of several models, table of common GPUs, JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from gpuherd.columns import Column
from gpuherd.errors import printable
from gpuherd.models.describe.description import Architecture
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.usage import Usage
from gpuherd.models.memory.weights import Precision, quantises
from gpuherd.models.place import page
from gpuherd.models.place.gpus import MOST_COMMON_GPUS, GpuSpec, gpus_with_memory
from gpuherd.models.place.page import KEPT, BarPart, Fact, Line, RenderContext, Window, sizes_to_dict, wrapped
from gpuherd.models.place.placement import saves_little
from gpuherd.models.place.planner import CommonGpuPlans
from gpuherd.models.place.request import PlanRequest, command_words
from gpuherd.models.place.result import AnswerRefusal, GpuLoad, MemoryPlan, format_blocks, weights_bytes
from gpuherd.models.place.split import MOST_SEQUENCES
from gpuherd.units import gib

_MOST_REPLICAS = 8

# The parts of a GPU's bar, and the figures of ``Usage`` that each adds up.
_PARTS = (
    (BarPart("weights", "weights", "█", "#"), ("weights",)),
    (BarPart("quantisation", "state", "▓", "%"), ("quantisation",)),
    (BarPart("KV cache", "cache", "▒", "K"), ("cache",)),
    (BarPart("workspace", "work", "░", "w"), ("workspace",)),
    (KEPT, ("context", "reserve")),
)


def render_plan(result: MemoryPlan | AnswerRefusal, context: RenderContext, window: Window) -> list[Line]:
    """The page of one plan or refusal."""
    plan = result if isinstance(result, MemoryPlan) else None
    facts, steps = [page.model_fact(result.architecture), *_facts(result)], list[page.Step]()
    if plan is not None:
        facts += _placement_facts(plan)
        map_wanted = plan.parallel != "tensor"
        steps += page.next_steps(plan, context.request, replicas=plan.replicas, device_map=map_wanted)
    return page.render_outcome(
        result,
        context,
        window,
        verdict="" if plan is None else _verdict(plan, len(context.gpus)),
        bars=[
            page.bar([load.gpu], load, page.bar_parts(load.usage, _PARTS), _holds(result, load))
            for load in result.loads
        ],
        bars_noun="GPUs",
        figures=_figures(result.loads, window),
        facts=facts,
        steps=steps,
    )


def _verdict(plan: MemoryPlan, given: int) -> str:
    """The answer in a sentence. ``given``: how many GPUs there are."""
    many = f"{plan.replicas} replica" + ("s, each with" if plan.replicas > 1 else ",")
    where = page.gpus_used(plan, given)
    return f"{plan.architecture.model} in {plan.precision} fits on {where}: {many} {at_most(plan)} at once."


def at_most(plan: MemoryPlan) -> str:
    """``at most 19 answers of 576 tokens``; of an encoder, which writes none, texts."""
    writes = plan.architecture.writes_answers
    noun = "answer" if writes else "text"
    tokens = plan.workload.tokens if writes else plan.workload.prompt_tokens
    if plan.largest_batch >= MOST_SEQUENCES:
        return f"any number of {noun}s of {tokens} tokens"
    return f"at most {plan.largest_batch:,} {noun}{'' if plan.largest_batch == 1 else 's'} of {tokens} tokens"


def _holds(result: MemoryPlan | AnswerRefusal, load: GpuLoad[Usage]) -> str:
    if load.after_last - load.first == len(result.architecture.blocks):
        return f"1/{result.gpus} of each layer" if result.gpus > 1 else "the whole model"
    return format_blocks(result.architecture, load.first, load.after_last)


# ---- figures and facts -----------------------------------------------------------------------------------------------

_GPU_COLUMNS = (
    Column("GPU", 0),
    Column("weights", 1, right=True),
    Column("quant.", 3, right=True),
    Column("KV cache", 2, right=True),
    Column("workspace", 4, right=True),
    Column("context", 7, right=True),
    Column("reserve", 6, right=True),
    Column("together", 5, right=True),
    Column("left", 0, right=True),
)
_QUANTISED = 2


def _figures(loads: Sequence[GpuLoad[Usage]], window: Window) -> list[Line]:
    """A line a GPU, and one for all together."""
    if not loads:
        return []
    unit = page.unit_for(max(load.usage.total for load in loads))
    figures = [(*astuple(load.usage), load.usage.total, load.left) for load in loads]
    rows = [(printable(load.gpu.label), *sizes) for load, sizes in zip(loads, figures, strict=True)][: page.MOST_BARS]
    if len(loads) > 1:
        rows.append(("all", *map(sum, zip(*figures, strict=True))))
    quantised = any(load.usage.quantisation for load in loads)
    kept = [number for number in range(len(_GPU_COLUMNS)) if quantised or number != _QUANTISED]
    cells = [[name, *map(unit.of, sizes)] for name, *sizes in rows]
    columns = [_GPU_COLUMNS[number] for number in kept]
    return page.headed_table(columns, [[row[at] for at in kept] for row in cells], window, unit)


def _facts(result: MemoryPlan | AnswerRefusal) -> list[Fact]:
    architecture, precision, workload = result.architecture, result.precision, result.workload
    stored = "" if architecture.stored in (None, str(precision)) else f"; stored in {architecture.stored}"
    size = weights_bytes(architecture, precision)
    writes = architecture.writes_answers
    noun = "answer" if writes else "text"
    many = f"1 {noun}" if workload.batch == 1 else f"{workload.batch:,} {noun}s at once"
    tokens = f"{workload.prompt_tokens:,}" + (f" + {workload.new_tokens:,}" if writes else "")
    return [
        (
            "weights",
            f"{gib(size)} ({size / 1e9:.2f} GB) in {precision}{_quantised_share(architecture, precision)}{stored}",
        ),
        ("planned", f"{many}, {tokens} tokens each"),
    ]


def _quantised_share(architecture: Architecture, precision: Precision) -> str:
    """How much of the model the precision is about."""
    if not precision.is_quantised:
        return ""
    codes = sum(tensor.numel for tensor in architecture.tensors() if quantises(tensor, precision))
    share = codes / architecture.parameters if architecture.parameters else 0.0
    return f" ({share:.1%} of its numbers; the rest in {precision.computes_in})"


def _placement_facts(plan: MemoryPlan) -> list[Fact]:
    facts = []
    if plan.parallel == "layers":
        divisible = plan.architecture.tensor_parallel and not plan.precision.is_quantised
        other = "; --parallel tensor gives both" if divisible else ""
        facts.append(("speed", f"one GPU computes at a time: several give room, not speed{other}"))
    elif plan.parallel == "tensor":
        facts.append(("speed", "all GPUs compute at once, and talk twice a layer: NVLink between them counts"))
    if plan.replicas > 1:
        groups = [", ".join(printable(gpu.label) for gpu in gpus) for gpus in plan.replica_gpus]
        more = len(groups) - _MOST_REPLICAS
        shown = "; ".join(groups[:_MOST_REPLICAS]) + (f"; and {more} more" if more > 0 else "")
        facts.append(("replicas", f"{plan.replicas} at once, on GPU {shown}"))
    return facts


# ---- common kinds of GPUs --------------------------------------------------------------------------------------------


def render_common_gpus(
    architecture: Architecture,
    workload: Workload,
    rows: Sequence[CommonGpuPlans],
    request: PlanRequest,
    window: Window,
) -> list[Line]:
    """The need of a model on common GPUs."""
    precisions = list(rows[0].plans)
    first = precisions[0]
    size = weights_bytes(architecture, first)
    many = "one answer" if workload.batch == 1 else f"{workload.batch} answers"
    verdict = (
        f"{architecture.model} in {first} has {gib(size)} of weights ({size / 1e9:.2f} GB). GPUs that it takes, with "
        f"{many} of {workload.tokens} tokens at once:"
    )
    columns = [
        Column("GPU", 0),
        Column("memory", 4, right=True),
        *[Column(f"in {each}", 1 + number, right=True) for number, each in enumerate(precisions)],
        Column(f"most answers in {first}", 3, right=True),
    ]
    cells = [
        [
            row.kind.name,
            gib(row.kind.memory),
            *[page.gpus_cell(row.plans[each]) for each in precisions],
            _most_cell(row.plans[first]),
        ]
        for row in rows
    ]
    # Of the quantised precisions one is enough: they leave the same as it is.
    little = [sentence for each in precisions if (sentence := saves_little(architecture, each))][:1]
    more = any(plan is None for row in rows for plan in row.plans.values())
    hint = (f"-: more than {MOST_COMMON_GPUS}. " if more else "") + page.ON_GIVEN_GPUS
    # The fewest A100-40, or what else can hold it.
    fitting = [(row.kind.name, plan.gpus) for row in rows if (plan := row.plans[first]) is not None]
    name, count = next((each for each in fitting if each[0] == "A100-40"), fitting[-1] if fitting else ("B200", 32))
    example = hint, command_words(request, ("--gpus", f"{count}x{name}"))
    table = page.headed_table(columns, cells, window)
    return page.common_gpus_page((verdict, "good"), table, architecture, window, example=example, remarks=little)


def _most_cell(plan: MemoryPlan | None) -> str:
    return "-" if plan is None else "any" if plan.largest_batch >= MOST_SEQUENCES else f"{plan.largest_batch:,}"


# ---- several models on the same GPUs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedModelRow:
    """A model of several: its plan, or the sentence why there is none."""

    model: str
    result: MemoryPlan | AnswerRefusal | None
    problem: str = ""


_MODEL_COLUMNS = (
    Column("model", 0, least=12, middle=True),
    Column("dtype", 3),
    Column("parameters", 5, right=True),
    Column("weights", 4, right=True),
    Column("GPUs", 1, right=True),
    Column("replicas", 6, right=True),
    Column("most answers", 2, right=True),
    Column("verdict", 1, least=14),
)


def render_models(
    rows: Sequence[PlannedModelRow], gpus: Sequence[GpuSpec], remarks: Sequence[str], window: Window
) -> list[Line]:
    """A line a model, and in full below why some don't fit."""
    fitting = sum(isinstance(row.result, MemoryPlan) for row in rows)
    lines = wrapped(
        f"{fitting} of {len(rows)} models fit on {gpus_with_memory(gpus)}, one at a time.",
        window,
        "good" if fitting == len(rows) else "bad",
    )
    lines += [(), *page.headed_table(_MODEL_COLUMNS, [_model_cells(row) for row in rows], window)]
    reasons = [
        row.result.reason if isinstance(row.result, AnswerRefusal) else row.problem
        for row in rows
        if not isinstance(row.result, MemoryPlan)
    ]
    if reasons:
        lines.append(())
    lines += [line for reason in reasons for line in wrapped(reason, window, first="- ", rest="  ")]
    warnings = [
        sentence
        for row in rows
        if row.result is not None
        for sentence in (
            *(f"{row.model}: {each}" for each in row.result.architecture.assumptions),
            *row.result.warnings,
        )
    ]
    return [*lines, *page.notes((*warnings, *remarks), window)]


def _model_cells(row: PlannedModelRow) -> list[str]:
    name = printable(row.model)
    if row.result is None:
        return [name, "", "", "", "", "", "", "no plan"]
    architecture, precision = row.result.architecture, row.result.precision
    before = [name, str(precision), _billions(architecture.parameters), gib(weights_bytes(architecture, precision))]
    if isinstance(row.result, AnswerRefusal):
        lacking = f"lacks {gib(row.result.missing)}" if row.result.missing > 0 else "does not fit"
        return [*before, "-", "0", "-", lacking]
    return [*before, str(row.result.gpus), str(row.result.replicas), _most_cell(row.result), "fits"]


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 10**7 else f"{count:,}"


# ---- JSON ------------------------------------------------------------------------------------------------------------


def plan_to_dict(result: MemoryPlan | AnswerRefusal, request: PlanRequest) -> dict[str, Any]:
    """A plan, or a refusal."""
    content = {
        "model": page.model_to_dict(result.architecture),
        "fits": isinstance(result, MemoryPlan),
        "dtype": str(result.precision),
        **asdict(result.workload),
        "reserve": page.reserve_to_dict(result.reserve),
        "weights_bytes": weights_bytes(result.architecture, result.precision),
        "gpus": [_load_to_dict(result.architecture, load) for load in result.loads],
    }
    if isinstance(result, AnswerRefusal):
        return content | page.refusal_to_dict(result, request, {"needed": result.needed})
    return content | {
        "parallel": result.parallel,
        "replicas": result.replicas,
        "replica_gpus": [[gpu.label for gpu in gpus] for gpus in result.replica_gpus],
        "largest_batch": _batch_or_any(result),
        **page.resources_to_dict(result),
        "device_map": None if result.parallel == "tensor" else result.device_map,
        "warnings": list(result.warnings),
    }


def _batch_or_any(plan: MemoryPlan | None) -> int | None:
    """None for any number, and for no plan."""
    return None if plan is None or plan.largest_batch >= MOST_SEQUENCES else plan.largest_batch


def _load_to_dict(architecture: Architecture, load: GpuLoad[Usage]) -> dict[str, Any]:
    return {
        **page.gpu_to_dict(load.gpu),
        **sizes_to_dict({**asdict(load.usage), "used": load.usage.total, "left": load.left}),
        "blocks": [block.name for block in architecture.blocks[load.first : load.after_last]],
    }


def common_gpus_to_dict(rows: Sequence[CommonGpuPlans]) -> list[dict[str, Any]]:
    """One model on common GPUs."""
    return [
        {
            "name": row.kind.name,
            "memory_bytes": row.kind.memory,
            "gpus": {str(each): None if plan is None else plan.gpus for each, plan in row.plans.items()},
            "largest_batch": {str(each): _batch_or_any(plan) for each, plan in row.plans.items()},
        }
        for row in rows
    ]
