"""A training plan, or a refusal, as lines that a person can decide from. Pure; ``telling`` does it for answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from gpuherd.columns import Column
from gpuherd.errors import printable
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.drawing import Bar, Line, Part, Span, Window, command, draw, legend, table, wrapped
from gpuherd.models.plan.kinds import Kind
from gpuherd.models.plan.next_steps import Asked, asked_words, training_steps
from gpuherd.models.plan.telling import (
    Scene,
    each_of,
    facts_in_lines,
    gpus_in_words,
    model_fact,
    notes,
    of_whole,
    unit_for,
    what_would_fit,
)
from gpuherd.models.plan.training_job import Method, Strategy, TrainingJob, TrainingPrecision
from gpuherd.models.plan.training_result import Moment, TrainingLoad, TrainingPlan, TrainingRefusal, TrainingUsage
from gpuherd.models.plan.wording import gib

PARAMETERS = Part("parameters", "weights", "█", "P")
GRADIENTS = Part("gradients", "state", "▓", "G")
OPTIMISER = Part("optimiser", "cache", "▒", "O")
ACTIVATIONS = Part("activations", "work", "░", "A")
REST = Part("logits, cache, workspace", "note", "+", "+")
MODELS = Part("other models", "others", "=", "=")
KEPT = Part("context and reserve", "kept", ":", ":")

_MOST_BARS = 32
_NUMBERS = {
    TrainingPrecision.FP32: "fp32",
    TrainingPrecision.MIXED: "fp32, with products in bf16",
    TrainingPrecision.BF16: "bf16",
}


def tell_training(told: TrainingPlan | TrainingRefusal, scene: Scene, window: Window) -> list[Line]:
    """Everything that there is to say."""
    if isinstance(told, TrainingPlan):
        lines = wrapped(verdict(told, len(scene.cards)), window, "good")
    else:
        lines = wrapped(f"Doesn't fit: {told.reason}.", window, "bad")
    lines += [(), *_bars(told.loads, window), (), *_figures(_fullest(told.loads).usage, window), ()]
    lines += facts_in_lines(_facts(told), window)
    lines += notes((*told.warnings, *told.architecture.assumptions, *scene.remarks), window)
    if isinstance(told, TrainingRefusal):
        return [*lines, *what_would_fit(told.alternatives, scene.asked, window)]
    for sentence, words in training_steps(told, scene.asked):
        lines += [(), *wrapped(sentence, window, "head"), *command(words, window)]
    return lines


def verdict(plan: TrainingPlan, given: int) -> str:
    """The answer in a sentence. ``given``: how many GPUs there are."""
    how = {Strategy.DDP: ", a copy on each (ddp)", Strategy.FSDP: ", divided (fsdp)"}.get(plan.job.strategy, "")
    where = f"{plan.gpus} of {gpus_in_words(given)}{each_of([load.card for load in plan.loads])}"
    return f"{_what(plan)} fits on {where}{how}: at most {_passed(plan.largest_batch, plan.job)}."


def _what(told: TrainingPlan | TrainingRefusal) -> str:
    lora = "" if told.job.lora is None else f" with a LoRA adapter of rank {told.job.lora.rank}"
    return f"{told.job.method.upper()} of {told.architecture.model}{lora}"


def _passed(batch: int, job: TrainingJob) -> str:
    noun = {Method.SFT: "sequence", Method.DPO: "pair"}.get(job.method, "answer")
    return f"{batch:,} {noun}{'' if batch == 1 else 's'} of {job.tokens:,} tokens on a GPU in a pass"


# ---- what lies where -------------------------------------------------------------------------------------------------


def parts_of(usage: TrainingUsage) -> list[tuple[Part, int]]:
    """The parts of a GPU's bar, at its fullest moment."""
    moment = usage.fullest
    return [
        (PARAMETERS, moment.parameters + moment.quantisation + moment.copies),
        (MODELS, moment.models),
        (GRADIENTS, moment.gradients + moment.exchange),
        (OPTIMISER, moment.optimiser),
        (ACTIVATIONS, moment.activations),
        (REST, moment.logits + moment.cache + moment.workspace),
        (KEPT, usage.context + usage.reserve),
    ]


def _fullest(loads: Sequence[TrainingLoad]) -> TrainingLoad:
    return min(loads, key=lambda load: load.left)


def _bars(loads: Sequence[TrainingLoad], window: Window) -> list[Line]:
    """A bar for GPUs that are all alike."""
    scale = max(max(load.card.total, load.usage.total) for load in loads)
    bars = []
    for _, group in groupby(loads, key=lambda load: (load.usage.total, load.card.free, load.card.total)):
        alike = list(group)
        load = alike[0]
        bars.append(
            Bar(
                label=_label([each.card for each in alike]),
                parts=tuple(parts_of(load.usage)),
                free=load.card.free,
                total=load.card.total,
                figure=of_whole(load.usage.total, load.card.free),
                holds=load.usage.fullest.name,
            )
        )
    lines = draw(bars[:_MOST_BARS], scale, window)
    if len(bars) > _MOST_BARS:
        lines.append((Span(f"and {len(bars) - _MOST_BARS} more kinds of load; --json has all"),))
    return [*lines, *legend(bars, window)]


def _label(cards: Sequence[Card]) -> str:
    first, last = printable(cards[0].label), printable(cards[-1].label)
    if len(cards) == 1:
        return f"GPU {first}"
    in_a_row = all(card.label.isdigit() for card in cards) and int(last) - int(first) == len(cards) - 1
    return f"GPU {first}-{last}" if in_a_row else f"{len(cards)} GPUs"


# Part of a moment -> its heading, and how useful it is.
_COLUMNS = {
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


def _figures(usage: TrainingUsage, window: Window) -> list[Line]:
    """Each moment of a step, on the fullest GPU; the fullest moment is marked."""
    names = [name for name in _COLUMNS if usage.most(name)]
    columns = [
        Column("moment", 0, least=23),
        *[Column(*_COLUMNS[name], right=True) for name in names],
        Column("together", 1, right=True),
    ]
    unit = unit_for(usage.fullest.total)
    rows = [
        [
            f"{'>' if moment is usage.fullest else ' '} {moment.name}",
            *[unit.of(moment.parts()[name]) for name in names],
            unit.of(moment.total),
        ]
        for moment in _told_once(usage.moments)
    ]
    head, body = table(columns, rows, window)
    return [unit.heading(head, window), *body]


def _told_once(moments: Sequence[Moment]) -> list[Moment]:
    """Moments in order, of two with one name the fuller."""
    fuller: dict[str, Moment] = {}
    for moment in moments:
        if moment.name not in fuller or moment.total > fuller[moment.name].total:
            fuller[moment.name] = moment
    return list(fuller.values())


# ---- facts -----------------------------------------------------------------------------------------------------------


def _facts(told: TrainingPlan | TrainingRefusal) -> list[tuple[str, str]]:
    job = told.job
    share = f"{told.trained:,} numbers" + ("" if job.lora is None else f", beside a model in {job.base_precision}")
    passes = f", {job.accumulation} passes before each step" if job.accumulation > 1 else ""
    reference = ", with a reference model" if job.keeps_reference else ""
    facts = [
        model_fact(told.architecture),
        ("trained", f"{share}, by {job.optimiser} in {_NUMBERS[job.precision]}{reference}"),
        ("planned", f"{_passed(job.batch, job)}{passes}"),
        (
            "each GPU",
            f"{gib(told.checkpointed.total)} with checkpointing, {gib(told.plain.total)} without; planned "
            f"{'with' if job.checkpointing else 'without'}",
        ),
    ]
    if isinstance(told, TrainingPlan) and told.on_all is not None:
        more = told.on_all
        text = f"{gib(more.usage.total)} on each, at most {_passed(more.largest_batch, job)}"
        facts.append((f"on all {more.gpus}", text))
    return facts


# ---- usual GPUs ------------------------------------------------------------------------------------------------------


def tell_training_usual(
    architecture: Architecture,
    rows: Sequence[tuple[Kind, TrainingPlan | None]],
    asked: Asked,
    window: Window,
) -> list[Line]:
    """What a training takes on usual GPUs."""
    columns = (
        Column("GPU", 0),
        Column("memory", 3, right=True),
        Column("GPUs", 1, right=True),
        Column("most on a GPU", 2, right=True),
    )
    cells = [[kind.name, gib(kind.memory), "-" if plan is None else str(plan.gpus), _most(plan)] for kind, plan in rows]
    head, body = table(columns, cells, window)
    fitting = [(kind, plan) for kind, plan in rows if plan is not None]
    lines = [
        *wrapped(_heading(architecture, [plan for _, plan in fitting]), window, "good" if fitting else "bad"),
        (),
        (Span(head, "head"),),
        *body,
        (),
        *wrapped(": ".join(model_fact(architecture)), window),
        *notes(architecture.assumptions, window),
    ]
    if not fitting:
        return lines
    kind, plan = fitting[0]
    words = asked_words(asked, ("--gpus", f"{plan.gpus}x{kind.name}"))
    return [*lines, (), *wrapped("For a plan on given GPUs, by size or kind:", window, "head"), *command(words, window)]


def _heading(architecture: Architecture, plans: Sequence[TrainingPlan]) -> str:
    if not plans:
        return f"No usual GPU is enough for this training of {architecture.model}; --strategy fsdp divides it."
    planned = _passed(plans[0].job.batch, plans[0].job)
    return f"GPUs that {_what(plans[0])} takes, with {planned}:"


def _most(plan: TrainingPlan | None) -> str:
    return "-" if plan is None else f"{plan.largest_batch:,}"
