"""Plans side by side, a line each: one model on usual GPUs, or several models on the same GPUs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.columns import Column
from gpuherd.errors import printable
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.drawing import Line, Span, Window, command, table, wrapped
from gpuherd.models.plan.next_steps import Asked, asked_words
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.remarks import saves_little
from gpuherd.models.plan.result import MemoryPlan, Refusal
from gpuherd.models.plan.sizing import MOST_SEQUENCES
from gpuherd.models.plan.telling import model_fact, notes, weights_bytes
from gpuherd.models.plan.usual import MOST_GPUS, OnUsual
from gpuherd.models.plan.wording import cards_in_words, gib
from gpuherd.models.plan.workload import Workload


def tell_usual(
    architecture: Architecture, workload: Workload, rows: Sequence[OnUsual], asked: Asked, window: Window
) -> list[Line]:
    """What the model takes on usual GPUs."""
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
            *[_count(row.plans[each]) for each in precisions],
            _most(row.plans[first]),
        ]
        for row in rows
    ]
    head, body = table(columns, cells, window)
    lines = [*wrapped(verdict, window, "good"), (), (Span(head, "head"),), *body, ()]
    lines += wrapped(": ".join(model_fact(architecture)), window)
    more = any(plan is None for row in rows for plan in row.plans.values())
    hint = (f"-: more than {MOST_GPUS}. " if more else "") + "For a plan on given GPUs, by size or kind:"
    # Of the quantised precisions one is enough: they leave the same as it is.
    little = [sentence for each in precisions if (sentence := saves_little(architecture, each))][:1]
    return [
        *lines,
        *notes((*architecture.assumptions, *little), window),
        (),
        *wrapped(hint, window, "head"),
        *command(asked_words(asked, ("--gpus", _example(rows, first))), window),
    ]


def _example(rows: Sequence[OnUsual], precision: Precision) -> str:
    """The fewest A100-40, or what else can hold it."""
    fitting = [(row.kind.name, plan.gpus) for row in rows if (plan := row.plans[precision]) is not None]
    name, count = next((each for each in fitting if each[0] == "A100-40"), fitting[-1] if fitting else ("B200", 32))
    return f"{count}x{name}"


def _count(plan: MemoryPlan | None) -> str:
    return "-" if plan is None else str(plan.gpus)


def _most(plan: MemoryPlan | None) -> str:
    return "-" if plan is None else "any" if plan.largest_batch >= MOST_SEQUENCES else f"{plan.largest_batch:,}"


@dataclass(frozen=True, slots=True)
class Row:
    """A model of several: its plan, or the sentence why there is none."""

    model: str
    told: MemoryPlan | Refusal | None
    problem: str = ""


_COLUMNS = (
    Column("model", 0, least=12, middle=True),
    Column("dtype", 3),
    Column("parameters", 5, right=True),
    Column("weights", 4, right=True),
    Column("GPUs", 1, right=True),
    Column("replicas", 6, right=True),
    Column("most answers", 2, right=True),
    Column("verdict", 1, least=14),
)


def tell_many(rows: Sequence[Row], cards: Sequence[Card], remarks: Sequence[str], window: Window) -> list[Line]:
    """A line a model, and in full below why some don't fit."""
    fitting = sum(isinstance(row.told, MemoryPlan) for row in rows)
    lines = wrapped(
        f"{fitting} of {len(rows)} models fit on {cards_in_words(cards)}, one at a time.",
        window,
        "good" if fitting == len(rows) else "bad",
    )
    head, body = table(_COLUMNS, [_cells(row) for row in rows], window)
    lines += [(), (Span(head, "head"),), *body]
    reasons = [
        row.told.reason if isinstance(row.told, Refusal) else row.problem
        for row in rows
        if not isinstance(row.told, MemoryPlan)
    ]
    if reasons:
        lines.append(())
    lines += [line for reason in reasons for line in wrapped(reason, window, first="- ", rest="  ")]
    warnings = [
        sentence
        for row in rows
        if row.told is not None
        for sentence in (
            *(f"{row.model}: {each}" for each in row.told.architecture.assumptions),
            *(row.told.warnings if isinstance(row.told, MemoryPlan) else ()),
        )
    ]
    return [*lines, *notes((*warnings, *remarks), window)]


def _cells(row: Row) -> list[str]:
    name = printable(row.model)
    if row.told is None:
        return [name, "", "", "", "", "", "", "no plan"]
    architecture, precision = row.told.architecture, row.told.precision
    before = [name, str(precision), _billions(architecture.parameters), gib(weights_bytes(architecture, precision))]
    if isinstance(row.told, Refusal):
        lacking = f"lacks {gib(row.told.missing)}" if row.told.missing > 0 else "does not fit"
        return [*before, "-", "0", "-", lacking]
    return [*before, str(row.told.gpus), str(row.told.replicas), _most(row.told), "fits"]


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 10**7 else f"{count:,}"
