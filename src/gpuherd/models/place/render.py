"""Plans and refusals as lines that a person can decide from: the verdict, a bar for each GPU, figures, what next; and
tables of several plans. Pure.

Answers and trainings have the same page; they differ in the parts of a bar, in the rows of the figures (GPUs; moments
of a step on the fullest GPU) and in the facts. ``drawing`` knows bars and windows, ``commands`` commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import groupby

from gpuherd.columns import Column
from gpuherd.errors import printable
from gpuherd.models.place.commands import PlanRequest, command_words, next_steps
from gpuherd.models.place.drawing import Bar, Line, Part, Span, Window, command, draw, legend, table, wrapped
from gpuherd.models.place.gpus import MOST_COMMON_GPUS, GpuKind, GpuSpec, count_gpus, gpus_with_memory
from gpuherd.models.place.placement import saves_little
from gpuherd.models.place.planner import CommonGpuPlans
from gpuherd.models.place.result import (
    Alternative,
    AnswerRefusal,
    GpuLoad,
    MemoryPlan,
    Refusal,
    TrainingPlan,
    TrainingRefusal,
    format_blocks,
    weights_bytes,
)
from gpuherd.models.place.split import MOST_SEQUENCES
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.result import Usage
from gpuherd.models.plan.training_job import Method, Strategy, TrainingJob, TrainingPrecision
from gpuherd.models.plan.training_result import Moment, TrainingUsage
from gpuherd.models.plan.weights import quantises
from gpuherd.models.plan.workload import GIB, MIB, Workload
from gpuherd.units import gib

AnyPlan = MemoryPlan | TrainingPlan
AnyRefusal = AnswerRefusal | TrainingRefusal
Fact = tuple[str, str]

_MOST_BARS = 32
_MOST_REPLICAS = 8


@dataclass(frozen=True, slots=True)
class RenderContext:
    """What a plan is rendered with, beside itself.

    Attributes:
        gpus: all that it was planned for.
        request: the words of the question, to make commands of.
        remarks: on the GPUs: those left out, and why.
    """

    gpus: tuple[GpuSpec, ...]
    request: PlanRequest
    remarks: tuple[str, ...] = ()


def render_plan(result: AnyPlan | AnyRefusal, context: RenderContext, window: Window) -> list[Line]:
    """The page of one plan or refusal."""
    if isinstance(result, Refusal):
        lines = wrapped(f"Doesn't fit: {result.reason}.", window, "bad")
    else:
        lines = wrapped(_verdict(result, len(context.gpus)), window, "good")
    if result.loads:
        lines += [(), *_bars(result, window), (), *_figures(result, window)]
    lines += [(), *_facts_in_lines(_facts(result), window)]
    lines += _notes((*result.warnings, *result.architecture.assumptions, *context.remarks), window)
    if isinstance(result, Refusal):
        return [*lines, *_what_would_fit(result.alternatives, context.request, window)]
    for sentence, words in next_steps(result, context.request):
        lines += [(), *wrapped(sentence, window, "head"), *command(words, window)]
    return lines


# ---- the verdict -----------------------------------------------------------------------------------------------------


def _verdict(plan: AnyPlan, given: int) -> str:
    """The answer in a sentence. ``given``: how many GPUs there are."""
    memory = gpus_with_memory([load.gpu for load in plan.loads]).partition(" of ")[2]
    where = f"{plan.gpus} of {count_gpus(given)} of {memory}"
    if isinstance(plan, TrainingPlan):
        how = {Strategy.DDP: ", a copy on each (ddp)", Strategy.FSDP: ", divided (fsdp)"}.get(plan.job.strategy, "")
        return f"{_training_title(plan)} fits on {where}{how}: at most {_in_a_pass(plan.largest_batch, plan.job)}."
    many = f"{plan.replicas} replica" + ("s, each with" if plan.replicas > 1 else ",")
    return f"{plan.architecture.model} in {plan.precision} fits on {where}: {many} {at_most(plan)} at once."


def at_most(plan: MemoryPlan) -> str:
    """``at most 19 answers of 576 tokens``; of an encoder, which writes none, texts."""
    writes = writes_answers(plan.architecture)
    noun = "answer" if writes else "text"
    tokens = plan.workload.tokens if writes else plan.workload.prompt_tokens
    if plan.largest_batch >= MOST_SEQUENCES:
        return f"any number of {noun}s of {tokens} tokens"
    return f"at most {plan.largest_batch:,} {noun}{'' if plan.largest_batch == 1 else 's'} of {tokens} tokens"


def writes_answers(architecture: Architecture) -> bool:
    """Whether it keeps anything of a sequence; an encoder alone does not, and writes no answers."""
    return any(block.cache is not None for block in architecture.blocks)


def _training_title(result: TrainingPlan | TrainingRefusal) -> str:
    lora = "" if result.job.lora is None else f" with a LoRA adapter of rank {result.job.lora.rank}"
    return f"{result.job.method.upper()} of {result.architecture.model}{lora}"


def _in_a_pass(batch: int, job: TrainingJob) -> str:
    noun = {Method.SFT: "sequence", Method.DPO: "pair"}.get(job.method, "answer")
    return f"{batch:,} {noun}{'' if batch == 1 else 's'} of {job.tokens:,} tokens on a GPU in a pass"


# ---- bars: what lies on each GPU -------------------------------------------------------------------------------------

_KEPT = Part("context and reserve", "kept", ":", ":"), ("context", "reserve")
_ANSWER_PARTS = (
    (Part("weights", "weights", "█", "#"), ("weights",)),
    (Part("quantisation", "state", "▓", "%"), ("quantisation",)),
    (Part("KV cache", "cache", "▒", "K"), ("cache",)),
    (Part("workspace", "work", "░", "w"), ("workspace",)),
    _KEPT,
)
_TRAINING_PARTS = (
    (Part("parameters", "weights", "█", "P"), ("parameters", "quantisation", "copies")),
    (Part("other models", "others", "=", "="), ("models",)),
    (Part("gradients", "state", "▓", "G"), ("gradients", "exchange")),
    (Part("optimiser", "cache", "▒", "O"), ("optimiser",)),
    (Part("activations", "work", "░", "A"), ("activations",)),
    (Part("logits, cache, workspace", "note", "+", "+"), ("logits", "cache", "workspace")),
    _KEPT,
)


def parts_of(usage: Usage | TrainingUsage) -> list[tuple[Part, int]]:
    """The parts of a GPU's bar; of a training at its fullest moment."""
    training = isinstance(usage, TrainingUsage)
    return [
        (part, sum(getattr(_holder(usage, name), name) for name in names))
        for part, names in (_TRAINING_PARTS if training else _ANSWER_PARTS)
    ]


def _holder(usage: Usage | TrainingUsage, name: str) -> Usage | TrainingUsage | Moment:
    """What has the figure of this name: of a training the fullest moment, but for context and reserve."""
    return usage.fullest if isinstance(usage, TrainingUsage) and name not in _KEPT[1] else usage


def _bars(result: AnyPlan | AnyRefusal, window: Window) -> list[Line]:
    """A bar for each GPU of a model, for all GPUs that are alike of a training, on one scale, and a legend."""
    scale = max(max(load.gpu.total, load.usage.total) for load in result.loads)
    if isinstance(result, (TrainingPlan, TrainingRefusal)):
        alike = groupby(result.loads, key=lambda load: (load.usage.total, load.gpu.free, load.gpu.total))
        groups = [list(group) for _, group in alike]
        bars = [_bar([load.gpu for load in group], group[0], group[0].usage.fullest.name) for group in groups]
        noun = "kinds of load"
    else:
        bars = [_bar([load.gpu], load, _holds(result, load)) for load in result.loads]
        noun = "GPUs"
    lines = draw(bars[:_MOST_BARS], scale, window)
    if len(bars) > _MOST_BARS:
        lines.append((Span(f"and {len(bars) - _MOST_BARS} more {noun}; --json has all"),))
    return [*lines, *legend(bars[:_MOST_BARS], window)]


def _bar(gpus: Sequence[GpuSpec], load: GpuLoad[Usage] | GpuLoad[TrainingUsage], holds: str) -> Bar:
    total, free = load.usage.total, load.gpu.free
    return Bar(
        label=_label(gpus),
        parts=tuple(parts_of(load.usage)),
        free=free,
        total=load.gpu.total,
        figure=f"{gib(total).removesuffix(gib(free)[-4:])} of {gib(free)}",
        holds=holds,
    )


def _label(gpus: Sequence[GpuSpec]) -> str:
    first, last = printable(gpus[0].label), printable(gpus[-1].label)
    if len(gpus) == 1:
        return f"GPU {first}"
    in_a_row = all(gpu.label.isdigit() for gpu in gpus) and int(last) - int(first) == len(gpus) - 1
    return f"GPU {first}-{last}" if in_a_row else f"{len(gpus)} GPUs"


def _holds(result: MemoryPlan | AnswerRefusal, load: GpuLoad[Usage]) -> str:
    if load.after_last - load.first == len(result.architecture.blocks):
        return f"1/{result.gpus} of each layer" if result.gpus > 1 else "the whole model"
    return format_blocks(result.architecture, load.first, load.after_last)


# ---- figures ---------------------------------------------------------------------------------------------------------

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


def _figures(result: AnyPlan | AnyRefusal, window: Window) -> list[Line]:
    """Of a model a line a GPU and one for all; of a training a line a moment."""
    if isinstance(result, (TrainingPlan, TrainingRefusal)):
        return _moment_figures(result.fullest.usage, window)
    return _gpu_figures(result.loads, window)


def _gpu_figures(loads: Sequence[GpuLoad[Usage]], window: Window) -> list[Line]:
    unit = unit_for(max(load.usage.total for load in loads))
    figures = [(*astuple(load.usage), load.usage.total, load.left) for load in loads]
    rows = [(printable(load.gpu.label), *sizes) for load, sizes in zip(loads, figures, strict=True)][:_MOST_BARS]
    if len(loads) > 1:
        rows.append(("all", *map(sum, zip(*figures, strict=True))))
    quantised = any(load.usage.quantisation for load in loads)
    kept = [number for number in range(len(_GPU_COLUMNS)) if quantised or number != _QUANTISED]
    cells = [[name, *map(unit.of, sizes)] for name, *sizes in rows]
    head, body = table([_GPU_COLUMNS[number] for number in kept], [[row[at] for at in kept] for row in cells], window)
    return [unit.heading(head, window), *body]


def _moment_figures(usage: TrainingUsage, window: Window) -> list[Line]:
    """Each moment of a step, on the fullest GPU; the fullest moment is marked."""
    names = [name for name in _MOMENT_COLUMNS if usage.most(name)]
    columns = [
        Column("moment", 0, least=23),
        *[Column(*_MOMENT_COLUMNS[name], right=True) for name in names],
        Column("together", 1, right=True),
    ]
    unit = unit_for(usage.fullest.total)
    # Of two moments with one name the fuller.
    fuller: dict[str, Moment] = {}
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
    head, body = table(columns, rows, window)
    return [unit.heading(head, window), *body]


@dataclass(frozen=True, slots=True)
class Unit:
    """What the figures of a table are in."""

    name: str
    size: int
    digits: int

    def of(self, size: int) -> str:
        """Bytes without the unit; what would round to nothing is rendered as less than the least that is shown.

        >>> gib = unit_for(12 << 30)
        >>> gib.of(3 << 29), gib.of(1 << 20), gib.of(0), gib.of(-(1 << 30))
        ('1.5', '<0.1', '0', '-1.0')
        """
        if not size:
            return "0"
        text = f"{size / self.size:.{self.digits}f}"
        return f"{'<' if size > 0 else '-<'}{10.0**-self.digits:.{self.digits}f}" if not float(text) else text

    def heading(self, head: str, window: Window) -> Line:
        """A table's head, with the unit where there is room."""
        unit = f"  ({self.name})"
        return (Span(head + (unit if len(head) + len(unit) <= window.width else ""), "head"),)


def unit_for(largest: int) -> Unit:
    """GiB, with as many digits as small models need; MiB for tiny ones."""
    if largest < 2 * GIB:
        return Unit("MiB", MIB, 0)
    return Unit("GiB", GIB, 1 if largest >= 10 * GIB else 2)


# ---- facts -----------------------------------------------------------------------------------------------------------

_SOURCES = {
    "weights": "shapes from the headers of its weights",
    "config": "shapes from its config",
    "known": "shapes as published",
    "model": "as transformers builds it from its config",
}
_NUMBERS = {
    TrainingPrecision.FP32: "fp32",
    TrainingPrecision.MIXED: "fp32, with products in bf16",
    TrainingPrecision.BF16: "bf16",
}


def _facts(result: AnyPlan | AnyRefusal) -> list[Fact]:
    if isinstance(result, (TrainingPlan, TrainingRefusal)):
        return [_model_fact(result.architecture), *_training_facts(result)]
    facts = [_model_fact(result.architecture), *_answer_facts(result)]
    return [*facts, *_placement_facts(result)] if isinstance(result, MemoryPlan) else facts


def _model_fact(architecture: Architecture) -> Fact:
    """What was planned, and from what."""
    parts = (
        f"{architecture.model}: {architecture.parameters:,} parameters in {architecture.layers} layers "
        f"({architecture.model_type}); {_SOURCES[architecture.source]}"
    )
    return "model", parts


def _answer_facts(result: MemoryPlan | AnswerRefusal) -> list[Fact]:
    architecture, precision, workload = result.architecture, result.precision, result.workload
    stored = "" if architecture.stored in (None, str(precision)) else f"; stored in {architecture.stored}"
    size = weights_bytes(architecture, precision)
    writes = writes_answers(architecture)
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


def _training_facts(result: TrainingPlan | TrainingRefusal) -> list[Fact]:
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


def _facts_in_lines(facts: Sequence[Fact], window: Window) -> list[Line]:
    wide = max(len(name) for name, _ in facts) + 2
    return [line for name, text in facts for line in wrapped(text, window, first=f"{name:<{wide}}")]


def _notes(sentences: Sequence[str], window: Window) -> list[Line]:
    """What a person should know too."""
    return [line for each in dict.fromkeys(sentences) for line in wrapped(each, window, "note", first="note: ")]


def _what_would_fit(alternatives: Sequence[Alternative], request: PlanRequest, window: Window) -> list[Line]:
    """Each change as a sentence and as a command."""
    if not alternatives:
        return [(), *wrapped("Nothing that was tried would fit.", window, "head")]
    lines: list[Line] = [(), *wrapped("What would fit:", window, "head")]
    for each in alternatives:
        lines += wrapped(each.sentence, window, first="- ")
        lines += command(command_words(request, each.words), window)
    return lines


# ---- common kinds of GPUs --------------------------------------------------------------------------------------------

_ON_GIVEN_GPUS = "For a plan on given GPUs, by size or kind:"


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
            *[_gpus_cell(row.plans[each]) for each in precisions],
            _most_cell(row.plans[first]),
        ]
        for row in rows
    ]
    # Of the quantised precisions one is enough: they leave the same as it is.
    little = [sentence for each in precisions if (sentence := saves_little(architecture, each))][:1]
    lines = _common_table(wrapped(verdict, window, "good"), columns, cells, architecture, little, window)
    more = any(plan is None for row in rows for plan in row.plans.values())
    hint = (f"-: more than {MOST_COMMON_GPUS}. " if more else "") + _ON_GIVEN_GPUS
    # The fewest A100-40, or what else can hold it.
    fitting = [(row.kind.name, plan.gpus) for row in rows if (plan := row.plans[first]) is not None]
    name, count = next((each for each in fitting if each[0] == "A100-40"), fitting[-1] if fitting else ("B200", 32))
    return [*lines, *_example(hint, f"{count}x{name}", request, window)]


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
        [kind.name, gib(kind.memory), _gpus_cell(plan), "-" if plan is None else f"{plan.largest_batch:,}"]
        for kind, plan in rows
    ]
    fitting = [(kind, plan) for kind, plan in rows if plan is not None]
    if not fitting:
        verdict = f"No usual GPU is enough for this training of {architecture.model}; --strategy fsdp divides it."
        return _common_table(wrapped(verdict, window, "bad"), columns, cells, architecture, (), window)
    kind, plan = fitting[0]
    verdict = f"GPUs that {_training_title(plan)} takes, with {_in_a_pass(plan.job.batch, plan.job)}:"
    lines = _common_table(wrapped(verdict, window, "good"), columns, cells, architecture, (), window)
    return [*lines, *_example(_ON_GIVEN_GPUS, f"{plan.gpus}x{kind.name}", request, window)]


def _common_table(
    verdict: list[Line],
    columns: Sequence[Column],
    cells: Sequence[Sequence[str]],
    architecture: Architecture,
    remarks: Sequence[str],
    window: Window,
) -> list[Line]:
    head, body = table(columns, cells, window)
    lines = [*verdict, (), (Span(head, "head"),), *body, (), *wrapped(": ".join(_model_fact(architecture)), window)]
    return [*lines, *_notes((*architecture.assumptions, *remarks), window)]


def _example(hint: str, gpus: str, request: PlanRequest, window: Window) -> list[Line]:
    """The command for a plan on given GPUs."""
    return [(), *wrapped(hint, window, "head"), *command(command_words(request, ("--gpus", gpus)), window)]


def _gpus_cell(plan: AnyPlan | None) -> str:
    return "-" if plan is None else str(plan.gpus)


def _most_cell(plan: MemoryPlan | None) -> str:
    return "-" if plan is None else "any" if plan.largest_batch >= MOST_SEQUENCES else f"{plan.largest_batch:,}"


# ---- several models on the same GPUs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelRow:
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
    rows: Sequence[ModelRow], gpus: Sequence[GpuSpec], remarks: Sequence[str], window: Window
) -> list[Line]:
    """A line a model, and in full below why some don't fit."""
    fitting = sum(isinstance(row.result, MemoryPlan) for row in rows)
    lines = wrapped(
        f"{fitting} of {len(rows)} models fit on {gpus_with_memory(gpus)}, one at a time.",
        window,
        "good" if fitting == len(rows) else "bad",
    )
    head, body = table(_MODEL_COLUMNS, [_model_cells(row) for row in rows], window)
    lines += [(), (Span(head, "head"),), *body]
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
    return [*lines, *_notes((*warnings, *remarks), window)]


def _model_cells(row: ModelRow) -> list[str]:
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
