"""How results of planning are shown: text for a window of some width, and the JSON that all results share. Pure.

A line is a tuple of spans, each with a meaning (``good``, ``bad``, ...); the program that prints it chooses colours.
Nothing is conveyed by colour alone. All text is printable, whatever stood in a model's name.

``answers_page`` and ``training_page`` fill the page for what they know; this module knows no models.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpuherd.columns import Column, fitted
from gpuherd.errors import printable
from gpuherd.gpus.state import Maker
from gpuherd.gpus.visible import showing
from gpuherd.models.describe.description import Architecture
from gpuherd.models.memory.kv_cache import GIB, MIB, Reserve
from gpuherd.models.place.gpus import GpuSpec, gpus_with_memory
from gpuherd.models.place.request import PlanRequest, command_words
from gpuherd.models.place.result import GpuLoad, PlanOutcome, Refusal
from gpuherd.units import counted, gib

NARROWEST, WIDEST = 40, 200
# Cells of a bar, and of the text next to it.
_SHORTEST, _LONGEST = 24, 60
_HOLDS = 30

Meaning = Literal["", "good", "bad", "weak", "head", "note", "weights", "state", "cache", "work", "kept", "others"]


@dataclass(frozen=True, slots=True)
class StyledText:
    """A piece of a line, and what it means."""

    text: str
    meaning: Meaning = ""


Line = tuple[StyledText, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """What can be shown: cells a line, and whether there are more signs than those of ASCII."""

    width: int = 100
    unicode: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", max(NARROWEST, min(WIDEST, self.width)))


@dataclass(frozen=True, slots=True)
class BarPart:
    """A part of a bar: what it is, its sign, and its sign where there is but ASCII."""

    name: str
    meaning: Meaning
    sign: str
    plain: str

    def drawn(self, window: Window) -> str:
        """Its sign in this window."""
        return self.sign if window.unicode else self.plain


OVER = BarPart("does not fit", "bad", "!", "!")
FREE = BarPart("left", "weak", "·", ".")
OTHERS = BarPart("used by others", "others", "x", "x")
KEPT = BarPart("context and reserve", "kept", ":", ":")


def text_of(line: Line) -> str:
    """The line without its meanings."""
    return "".join(span.text for span in line).rstrip()


def wrapped(
    text: str, window: Window, meaning: Meaning = "", *, first: str = "", rest: str | None = None
) -> list[Line]:
    """A sentence in lines, each with an indent: ``first`` and then ``rest`` (as wide a blank if None)."""
    from textwrap import wrap

    after = " " * len(first) if rest is None else rest
    lines = wrap(printable(text), max(12, window.width - max(len(first), len(after))), break_on_hyphens=False)
    return [
        (StyledText(first if not number else after), StyledText(line, meaning)) for number, line in enumerate(lines)
    ]


def command(words: Sequence[str], window: Window, indent: str = "  ") -> list[Line]:
    """A command that can be copied, in as many lines as it takes, joined by backslashes. A word is never cut.

    Words with signs that can't be printed stand in the form that a shell reads back: ``$'a\\nb'``.
    """
    lines: list[str] = []
    room = window.width - len(" \\")
    for word in [_shell_word(each) for each in words]:
        if lines and len(lines[-1]) + 1 + len(word) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append((indent if not lines else f"{indent}    ") + word)
    return [(StyledText(line + (" \\" if number < len(lines) - 1 else "")),) for number, line in enumerate(lines)]


def _shell_word(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + printable(word.replace("\\", "\\\\").replace("'", "\\'")) + "'"


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], window: Window) -> tuple[str, list[Line]]:
    """The head of a table in this window, and its rows. All words are printable."""
    head, *body = fitted(columns, rows, window.width).lines
    if not window.unicode:
        body = [line.replace("…", "~") for line in body]
    return head, [(StyledText(line),) for line in body]


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """A GPU to be drawn.

    Attributes:
        parts: bytes of each, in order.
        free: bytes that may be used; ``total``: of the GPU. The rest is in use by others.
        figure: how full it is, in words; ``holds``: its contents.
    """

    label: str
    parts: tuple[tuple[BarPart, int], ...]
    free: int
    total: int
    figure: str
    holds: str

    def pieces(self) -> list[tuple[BarPart, int]]:
        """The parts, and what is left, or beyond what may be used, or others'. What does not fit covers others'."""
        pieces: list[tuple[BarPart, int]] = []
        at = 0
        for part, size in self.parts:
            fits = max(0, min(size, self.free - at))
            pieces += [(part, fits), (OVER, size - fits)]
            at += size
        pieces += [(FREE, max(0, self.free - at)), (OTHERS, max(0, self.total - max(self.free, at)))]
        return [(part, size) for part, size in pieces if size]


def draw(bars: Sequence[MemoryBar], scale: int, window: Window) -> list[Line]:
    """The bars below each other, as long as there is room for; ``scale``: the bytes that the longest stands for.

    In a wide window a GPU is one line, in others two.
    """
    label = max(len(bar.label) for bar in bars)
    figure = max(len(bar.figure) for bar in bars)
    holds = max(len(bar.holds) for bar in bars)
    frame = label + 2 + 2 + 2 + figure
    lines: list[Line] = []

    def with_figure(bar: MemoryBar, cells: int) -> Line:
        over = sum(size for _, size in bar.parts) > bar.free
        shown = StyledText(f"{bar.figure:>{figure}}", "bad" if over else "")
        return *_drawn(bar, scale, cells, window), StyledText("  "), shown

    for bar in bars:
        named = f"{bar.label:<{label}}  "
        if window.width >= frame + _SHORTEST + 2 + min(holds, _HOLDS):
            cells = min(_LONGEST, window.width - frame - 2 - min(holds, _HOLDS))
            first, *more = wrapped(bar.holds, window, first=" " * (frame + cells + 2))
            lines += [(StyledText(named), *with_figure(bar, cells), StyledText("  "), *first[1:]), *more]
        elif window.width >= frame + _SHORTEST:
            lines += wrapped(bar.holds, window, first=named)
            cells = min(_LONGEST, window.width - frame)
            lines.append((StyledText(" " * (label + 2)), *with_figure(bar, cells)))
        else:
            lines += wrapped(f"{bar.figure}: {bar.holds}", window, first=named)
            lines.append(_drawn(bar, scale, window.width - 2, window))
    return lines


def _drawn(bar: MemoryBar, scale: int, cells: int, window: Window) -> Line:
    """The bar alone, and blanks up to ``cells``."""
    spans: list[StyledText] = []
    before = drawn = 0
    for part, size in bar.pieces():
        before += size
        end = round(before * cells / scale) if scale else 0
        if end > drawn:
            spans.append(StyledText(part.drawn(window) * (end - drawn), part.meaning))
            drawn = end
    return (StyledText("|"), *spans, StyledText("|" + " " * (cells - drawn)))


def legend(bars: Sequence[MemoryBar], window: Window) -> list[Line]:
    """What the signs of these bars mean, in as many lines as it takes."""
    parts = dict.fromkeys(part for bar in bars for part, _ in bar.pieces())
    lines: list[list[StyledText]] = [[]]
    used = 0
    for part in sorted(parts, key=lambda part: part in (FREE, OTHERS, OVER)):
        cells = len(part.name) + 2
        if used and used + 2 + cells > window.width:
            lines.append([])
            used = 0
        if used:
            lines[-1].append(StyledText("  "))
        lines[-1] += [StyledText(part.drawn(window), part.meaning), StyledText(f" {part.name}")]
        used += cells + (2 if used else 0)
    return [tuple(line) for line in lines]


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a table's figures."""

    name: str
    size: int
    digits: int

    def of(self, size: int) -> str:
        """Bytes without the unit; what would round to nothing is written as less than the least that is shown.

        >>> gib = unit_for(12 << 30)
        >>> gib.of(3 << 29), gib.of(1 << 20), gib.of(0), gib.of(-(1 << 30))
        ('1.5', '<0.1', '0', '-1.0')
        """
        if not size:
            return "0"
        text = f"{size / self.size:.{self.digits}f}"
        return f"{'<' if size > 0 else '-<'}{10.0**-self.digits:.{self.digits}f}" if not float(text) else text


def unit_for(largest: int) -> Unit:
    """GiB, with as many digits as small models need; MiB for tiny ones."""
    if largest < 2 * GIB:
        return Unit("MiB", MIB, 0)
    return Unit("GiB", GIB, 1 if largest >= 10 * GIB else 2)


def headed_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], window: Window, unit: Unit | None = None
) -> list[Line]:
    """A table below its head, which names the unit of its sizes where there is room."""
    head, body = table(columns, rows, window)
    named = "" if unit is None else f"  ({unit.name})"
    return [(StyledText(head + (named if len(head) + len(named) <= window.width else ""), "head"),), *body]


# ---- the page of one result -----------------------------------------------------------------------------------------

Fact = tuple[str, str]
Step = tuple[str, list[str]]  # a sentence and a command

MOST_BARS = 32


@dataclass(frozen=True, slots=True)
class RenderContext:
    """What the page of a result needs in addition to the result.

    Attributes:
        gpus: all GPUs that it was planned for.
        request: the words of the question, to make commands of.
        remarks: on the GPUs: those left out, and why.
    """

    gpus: tuple[GpuSpec, ...]
    request: PlanRequest
    remarks: tuple[str, ...] = ()


def render_outcome(
    result: PlanOutcome[Any],
    context: RenderContext,
    window: Window,
    *,
    verdict: str,
    bars: Sequence[MemoryBar],
    bars_noun: str,
    figures: Sequence[Line],
    facts: Sequence[Fact],
    steps: Sequence[Step],
) -> list[Line]:
    """The page of one plan or refusal: the verdict, a bar for each GPU, figures, facts, notes, what to do next.

    Args:
        verdict: of a plan, in a sentence; a refusal has its reason.
        bars_noun: the plural of what a bar stands for.
        steps: of a plan; a refusal has its alternatives.
    """
    refusal = result if isinstance(result, Refusal) else None
    if refusal is None:
        lines = wrapped(verdict, window, "good")
    else:
        lines = wrapped(f"Doesn't fit: {refusal.reason}.", window, "bad")
    if bars:
        lines += [(), *_bars(bars, bars_noun, window), (), *figures]
    wide = max(len(name) for name, _ in facts) + 2
    lines.append(())
    lines += [line for name, text in facts for line in wrapped(text, window, first=f"{name:<{wide}}")]
    lines += notes((*result.warnings, *result.architecture.assumptions, *context.remarks), window)
    if refusal is not None:
        return [*lines, *_what_would_fit(refusal, context.request, window)]
    for sentence, words in steps:
        lines += [(), *wrapped(sentence, window, "head"), *command(words, window)]
    return lines


def bar(gpus: Sequence[GpuSpec], load: GpuLoad[Any], parts: Sequence[tuple[BarPart, int]], holds: str) -> MemoryBar:
    """The bar of GPUs that all have this load."""
    total, free = load.usage.total, load.gpu.free
    return MemoryBar(
        label=_label(gpus),
        parts=tuple(parts),
        free=free,
        total=load.gpu.total,
        figure=f"{gib(total).removesuffix(gib(free)[-4:])} of {gib(free)}",
        holds=holds,
    )


def bar_parts(figures: object, parts: Sequence[tuple[BarPart, Sequence[str]]]) -> list[tuple[BarPart, int]]:
    """The bytes of each part of a bar, which adds up these attributes of the figures."""
    return [(part, sum(getattr(figures, name) for name in names)) for part, names in parts]


def gpus_used(plan: PlanOutcome[Any], given: int) -> str:
    """``2 of 4 GPUs of 40.0 GiB``. ``given``: how many GPUs there are."""
    memory = gpus_with_memory([load.gpu for load in plan.loads]).partition(" of ")[2]
    return f"{plan.gpus} of {counted(given, 'GPU')} of {memory}"


def _label(gpus: Sequence[GpuSpec]) -> str:
    first, last = printable(gpus[0].label), printable(gpus[-1].label)
    if len(gpus) == 1:
        return f"GPU {first}"
    in_a_row = all(gpu.label.isdigit() for gpu in gpus) and int(last) - int(first) == len(gpus) - 1
    return f"GPU {first}-{last}" if in_a_row else f"{len(gpus)} GPUs"


def _bars(bars: Sequence[MemoryBar], noun: str, window: Window) -> list[Line]:
    """The bars on one scale, and a legend."""
    scale = max(max(bar.total, sum(size for _, size in bar.parts)) for bar in bars)
    lines = draw(bars[:MOST_BARS], scale, window)
    if len(bars) > MOST_BARS:
        lines.append((StyledText(f"and {len(bars) - MOST_BARS} more {noun}; --json has all"),))
    return [*lines, *legend(bars[:MOST_BARS], window)]


_SOURCES = {
    "weights": "shapes from the headers of its weights",
    "known": "shapes as published",
    "model": "as transformers builds it from its config",
}


def model_fact(architecture: Architecture) -> Fact:
    """The model that was planned, and where its shapes come from."""
    parts = (
        f"{architecture.model}: {architecture.parameters:,} parameters in {architecture.layers} layers "
        f"({architecture.model_type}); {_SOURCES[architecture.source]}"
    )
    return "model", parts


def notes(sentences: Sequence[str], window: Window) -> list[Line]:
    """Remarks, each once."""
    return [line for each in dict.fromkeys(sentences) for line in wrapped(each, window, "note", first="note: ")]


def _what_would_fit(refusal: Refusal, request: PlanRequest, window: Window) -> list[Line]:
    """Each change as a sentence and as a command."""
    if not refusal.alternatives:
        return [(), *wrapped("Nothing that was tried would fit.", window, "head")]
    lines: list[Line] = [(), *wrapped("What would fit:", window, "head")]
    for each in refusal.alternatives:
        lines += wrapped(each.sentence, window, first="- ")
        lines += command(command_words(request, each.words), window)
    return lines


# ---- what to do with a plan that fits -------------------------------------------------------------------------------

SCRIPT = "your_script.py"
# What a driver has in use on an idle GPU.
_DRIVER_MB = 500


def next_steps(
    plan: PlanOutcome[Any], request: PlanRequest, *, replicas: int = 1, device_map: bool = False
) -> Iterator[Step]:
    """What to do with a plan that fits. ``device_map``: it has one, for one process."""
    gpus = [load.gpu for load in plan.loads]
    memory = memory_option(plan.memory_mb, min(gpu.free for gpu in gpus))
    each = " (each replica is a job)" if replicas > 1 else ""
    # Tensor parallelism and training are a process a GPU; all else one process.
    program = _program(1 if device_map else plan.gpus)
    queue = ["gpuherd", "submit", "--num-gpus", str(plan.gpus), "--mem", memory, "--", *program]
    yield f"In your own queue{each}:", queue
    if request.here:
        yield "On these GPUs now, without a queue:", [*_showing(gpus), *program]
    else:
        array = [f"--array=0-{replicas - 1}"] if replicas > 1 else []
        yield "By SLURM:", ["sbatch", f"--gres=gpu:{plan.gpus}", *array, "your_job.sh"]
    if device_map:
        yield "The device map for from_pretrained, as JSON:", command_words(request, ("--device-map",))


def _program(processes: int) -> list[str]:
    return ["python", SCRIPT] if processes == 1 else ["torchrun", "--nproc-per-node", str(processes), SCRIPT]


def memory_option(memory_mb: int, free: int) -> str:
    """A size for ``--mem``: whole GB, unless a GPU that is not quite empty would have less free than that."""
    gigabytes = -(-memory_mb // 1024)
    return f"{gigabytes}GB" if (gigabytes * 1024 + _DRIVER_MB) * MIB <= free else f"{memory_mb}MB"


def _showing(gpus: Sequence[GpuSpec]) -> list[str]:
    """The words of a shell that show a command the GPUs of a plan: MIG instances by UUID."""
    names = [gpu.label if gpu.uuid is None or gpu.label.isdigit() else gpu.uuid for gpu in gpus]
    maker = Maker.AMD if any(gpu.name.startswith("AMD ") for gpu in gpus) else Maker.NVIDIA
    return [f"{name}={value}" for name, value in showing(names, maker).items()]


# ---- common kinds of GPUs --------------------------------------------------------------------------------------------

ON_GIVEN_GPUS = "For a plan on given GPUs, by size or kind:"


def common_gpus_page(
    verdict: tuple[str, Meaning],
    table_lines: Sequence[Line],
    architecture: Architecture,
    window: Window,
    *,
    example: tuple[str, list[str]] | None = None,
    remarks: Sequence[str] = (),
) -> list[Line]:
    """A table with a line for each common kind of GPU; ``example``: a sentence, and the command that it is about."""
    lines = [*wrapped(verdict[0], window, verdict[1]), (), *table_lines, ()]
    lines += wrapped(": ".join(model_fact(architecture)), window)
    lines += notes((*architecture.assumptions, *remarks), window)
    if example is not None:
        lines += [(), *wrapped(example[0], window, "head"), *command(example[1], window)]
    return lines


def gpus_cell(plan: PlanOutcome[Any] | None) -> str:
    """How many GPUs a plan takes; ``-`` without a plan."""
    return "-" if plan is None else str(plan.gpus)


# ---- JSON: what all results have in common. The schema is in docs/plan.md; scripts rely on it. -----------------------

_MODEL_KEYS = ("model_type", "class_name", "parameters", "layers", "stored", "source")


def model_to_dict(architecture: Architecture) -> dict[str, Any]:
    """The model that was planned."""
    facts = {name: getattr(architecture, name) for name in _MODEL_KEYS}
    return {"name": architecture.model, **facts, "assumptions": list(architecture.assumptions)}


def reserve_to_dict(reserve: Reserve) -> dict[str, Any]:
    """What is kept free on each GPU."""
    return {**sizes_to_dict({"context": reserve.context, "fixed": reserve.fixed}), "share": reserve.share}


def gpu_to_dict(gpu: GpuSpec) -> dict[str, Any]:
    """A GPU."""
    return {
        "label": gpu.label,
        "name": gpu.name,
        "uuid": gpu.uuid,
        **sizes_to_dict({"total": gpu.total, "free": gpu.free}),
        "capability": None if gpu.capability is None else "{}.{}".format(*gpu.capability),
    }


def sizes_to_dict(sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes by what they are for, under keys that name the unit."""
    return {f"{name}_bytes": size for name, size in sizes.items()}


def resources_to_dict(result: PlanOutcome[Any]) -> dict[str, Any]:
    """What a job with this plan requests of a queue."""
    return {"request": {"gpus": result.gpus, "memory_mb": result.memory_mb}}


def refusal_to_dict(refusal: Refusal, request: PlanRequest, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Why it doesn't fit, and what would. ``sizes``: of this refusal, in addition to what is missing."""
    return {
        "reason": refusal.reason,
        **sizes_to_dict({**sizes, "missing": refusal.missing}),
        "alternatives": [
            {"sentence": each.sentence, "options": list(each.words), "command": command_words(request, each.words)}
            for each in refusal.alternatives
        ],
    }
