"""A plan, or a refusal, as lines that a person can decide from: the verdict, a bar for each GPU, figures, what next.

Pure; ``drawing`` knows bars and windows, ``next_steps`` commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.columns import Column
from gpuherd.errors import printable
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.drawing import Bar, Line, Part, Span, Window, command, draw, legend, table, wrapped
from gpuherd.models.plan.next_steps import Asked, alternative_words, steps
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.result import Alternative, GpuLoad, MemoryPlan, Refusal, Usage
from gpuherd.models.plan.sizing import MOST_SEQUENCES
from gpuherd.models.plan.weights import quantises, weight_bytes
from gpuherd.models.plan.wording import blocks_in_words, cards_in_words, gib
from gpuherd.models.plan.workload import GIB, MIB, Workload

WEIGHTS = Part("weights", "weights", "█", "#")
STATE = Part("quantisation", "state", "▓", "%")
CACHE = Part("KV cache", "cache", "▒", "K")
WORK = Part("workspace", "work", "░", "w")
KEPT = Part("context and reserve", "kept", ":", ":")

_MOST_BARS = 32
_MOST_REPLICAS = 8


@dataclass(frozen=True, slots=True)
class Scene:
    """What a plan is told with, beside itself.

    Attributes:
        cards: all that it was planned for.
        asked: the words of the question, to make commands of.
        remarks: on the GPUs: those left out, and why.
    """

    cards: tuple[Card, ...]
    asked: Asked
    remarks: tuple[str, ...] = ()


def tell(told: MemoryPlan | Refusal, scene: Scene, window: Window) -> list[Line]:
    """Everything that there is to say."""
    if isinstance(told, Refusal):
        return tell_refusal(told, scene, window)
    architecture = told.architecture
    lines = wrapped(verdict(told, len(scene.cards)), window, "good")
    lines += [(), *_bars(architecture, told.loads, window), (), *_figures(told.loads, window), ()]
    lines += facts_in_lines(_model_facts(architecture, told.precision, told.workload) + _plan_facts(told), window)
    lines += notes((*told.warnings, *architecture.assumptions, *scene.remarks), window)
    for sentence, words in steps(told, scene.asked):
        lines += [(), *wrapped(sentence, window, "head"), *command(words, window)]
    return lines


def tell_refusal(told: Refusal, scene: Scene, window: Window) -> list[Line]:
    """Why it doesn't fit, and what would."""
    lines = wrapped(f"Doesn't fit: {told.reason}.", window, "bad")
    if told.loads:
        lines += [(), *_bars(told.architecture, told.loads, window), (), *_figures(told.loads, window)]
    lines += [(), *facts_in_lines(_model_facts(told.architecture, told.precision, told.workload), window)]
    lines += notes((*told.architecture.assumptions, *scene.remarks), window)
    return [*lines, *what_would_fit(told.alternatives, scene.asked, window)]


def verdict(plan: MemoryPlan, given: int) -> str:
    """The answer in a sentence. ``given``: how many GPUs there are."""
    many = f"{plan.replicas} replica" + ("s, each with" if plan.replicas > 1 else ",")
    return (
        f"{plan.architecture.model} in {plan.precision} fits on {plan.gpus} of {gpus_in_words(given)}"
        f"{each_of([load.card for load in plan.loads])}: {many} {at_most(plan)} at once."
    )


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


def gpus_in_words(count: int) -> str:
    """``1 GPU``, ``4 GPUs``."""
    return f"{count} GPU{'' if count == 1 else 's'}"


def each_of(cards: Sequence[Card]) -> str:
    """`` of 40.0 GiB``, `` with 22.1 to 40.0 GiB``."""
    return " of " + cards_in_words(cards).partition(" of ")[2]


# ---- what lies where -------------------------------------------------------------------------------------------------


def parts_of(usage: Usage) -> list[tuple[Part, int]]:
    """The parts of a GPU's bar."""
    return [
        (WEIGHTS, usage.weights),
        (STATE, usage.quantisation),
        (CACHE, usage.cache),
        (WORK, usage.workspace),
        (KEPT, usage.context + usage.reserve),
    ]


def _bars(architecture: Architecture, loads: Sequence[GpuLoad], window: Window) -> list[Line]:
    """A bar for each GPU, all on one scale, and what the signs mean."""
    shown = loads[:_MOST_BARS]
    scale = max(max(load.card.total, load.usage.total) for load in loads)
    bars = [
        Bar(
            label=f"GPU {printable(load.card.label)}",
            parts=tuple(parts_of(load.usage)),
            free=load.card.free,
            total=load.card.total,
            figure=of_whole(load.usage.total, load.card.free),
            holds=_holds(architecture, load, len(loads)),
        )
        for load in shown
    ]
    lines = draw(bars, scale, window)
    if len(loads) > len(shown):
        lines.append((Span(f"and {len(loads) - len(shown)} more GPUs; --json has all"),))
    return [*lines, *legend(bars, window)]


def _holds(architecture: Architecture, load: GpuLoad, gpus: int) -> str:
    whole = load.after_last - load.first == len(architecture.blocks)
    if whole:
        return f"1/{gpus} of each layer" if gpus > 1 else "the whole model"
    return blocks_in_words(architecture, load.first, load.after_last)


def of_whole(part: int, whole: int) -> str:
    """``36.2 of 40.0 GiB``."""
    return f"{gib(part).removesuffix(gib(whole)[-4:])} of {gib(whole)}"


_COLUMNS = (
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


def _figures(loads: Sequence[GpuLoad], window: Window) -> list[Line]:
    """A line a GPU and one for all of them."""
    shown = loads[:_MOST_BARS]
    unit = unit_for(max(load.usage.total for load in loads))
    rows = [[printable(load.card.label), *_row(load.usage, load.left, unit)] for load in shown]
    if len(loads) > 1:
        rows.append(["all", *_row(_sum([load.usage for load in loads]), sum(load.left for load in loads), unit)])
    quantised = any(load.usage.quantisation for load in loads)
    kept = [number for number, column in enumerate(_COLUMNS) if quantised or column.heading != "quant."]
    columns = [_COLUMNS[number] for number in kept]
    head, body = table(columns, [[row[number] for number in kept] for row in rows], window)
    return [unit.heading(head, window), *body]


def _row(usage: Usage, left: int, unit: Unit) -> list[str]:
    sizes = (
        usage.weights,
        usage.quantisation,
        usage.cache,
        usage.workspace,
        usage.context,
        usage.reserve,
        usage.total,
        left,
    )
    return [unit.of(size) for size in sizes]


@dataclass(frozen=True, slots=True)
class Unit:
    """What the figures of a table are in."""

    name: str
    size: int
    digits: int

    def of(self, size: int) -> str:
        """Bytes without the unit; what would round to nothing is told as less than the least that is shown.

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


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        weights=sum(usage.weights for usage in usages),
        quantisation=sum(usage.quantisation for usage in usages),
        cache=sum(usage.cache for usage in usages),
        workspace=sum(usage.workspace for usage in usages),
        context=sum(usage.context for usage in usages),
        reserve=sum(usage.reserve for usage in usages),
    )


# ---- facts -----------------------------------------------------------------------------------------------------------

_SOURCES = {
    "weights": "shapes from the headers of its weights",
    "config": "shapes from its config",
    "known": "shapes as published",
    "model": "as transformers builds it from its config",
}


def model_fact(architecture: Architecture) -> tuple[str, str]:
    """What was planned, and from what."""
    parts = (
        f"{architecture.model}: {architecture.parameters:,} parameters in {architecture.layers} layers "
        f"({architecture.model_type}); {_SOURCES[architecture.source]}"
    )
    return "model", parts


def _model_facts(architecture: Architecture, precision: Precision, workload: Workload) -> list[tuple[str, str]]:
    stored = "" if architecture.stored in (None, str(precision)) else f"; stored in {architecture.stored}"
    size = weights_bytes(architecture, precision)
    writes = writes_answers(architecture)
    noun = "answer" if writes else "text"
    many = f"1 {noun}" if workload.batch == 1 else f"{workload.batch:,} {noun}s at once"
    tokens = f"{workload.prompt_tokens:,}" + (f" + {workload.new_tokens:,}" if writes else "")
    return [
        model_fact(architecture),
        ("weights", f"{gib(size)} ({size / 1e9:.2f} GB) in {precision}{_share(architecture, precision)}{stored}"),
        ("planned", f"{many}, {tokens} tokens each"),
    ]


def _share(architecture: Architecture, precision: Precision) -> str:
    """How much of the model the precision is about."""
    if not precision.is_quantised:
        return ""
    codes = sum(tensor.numel for tensor in architecture.tensors() if quantises(tensor, precision))
    share = codes / architecture.parameters if architecture.parameters else 0.0
    return f" ({share:.1%} of its numbers; the rest in {precision.computes_in})"


def weights_bytes(architecture: Architecture, precision: Precision) -> int:
    """All weights in this precision, with their quantisation state, tied ones once."""
    return sum(sum(weight_bytes(each, precision)) for each in architecture.tensors() if each.tied_to is None)


def _plan_facts(plan: MemoryPlan) -> list[tuple[str, str]]:
    facts = []
    if plan.parallel == "layers":
        divisible = plan.architecture.tensor_parallel and not plan.precision.is_quantised
        other = "; --parallel tensor gives both" if divisible else ""
        facts.append(("speed", f"one GPU computes at a time: several give room, not speed{other}"))
    elif plan.parallel == "tensor":
        facts.append(("speed", "all GPUs compute at once, and talk twice a layer: NVLink between them counts"))
    if plan.replicas > 1:
        groups = [", ".join(printable(card.label) for card in cards) for cards in plan.replica_cards]
        more = len(groups) - _MOST_REPLICAS
        shown = "; ".join(groups[:_MOST_REPLICAS]) + (f"; and {more} more" if more > 0 else "")
        facts.append(("replicas", f"{plan.replicas} at once, on GPU {shown}"))
    return facts


def facts_in_lines(facts: Sequence[tuple[str, str]], window: Window) -> list[Line]:
    """Names, and beside each what there is to say."""
    wide = max(len(name) for name, _ in facts) + 2
    return [line for name, text in facts for line in wrapped(text, window, first=f"{name:<{wide}}")]


def notes(sentences: Sequence[str], window: Window) -> list[Line]:
    """What a person should know too."""
    return [line for each in dict.fromkeys(sentences) for line in wrapped(each, window, "note", first="note: ")]


def what_would_fit(alternatives: Sequence[Alternative], asked: Asked, window: Window) -> list[Line]:
    """Each change as a sentence and as a command."""
    if not alternatives:
        return [(), *wrapped("Nothing that was tried would fit.", window, "head")]
    lines: list[Line] = [(), *wrapped("What would fit:", window, "head")]
    for each in alternatives:
        lines += wrapped(each.sentence, window, first="- ")
        lines += command(alternative_words(asked, each), window)
    return lines
