"""The answers of a page: how many it has room for, packed, and their view: filters, the list, and one answer. Pure.

A chunk is the JSON of some answers, deflated, in base64 (``report.page``). Texts are cut to a limit, and the page says
by how many characters; the run's answers.jsonl has all. ``answers.js`` unpacks the answers, filters and sorts them, and
gives the record that each template is built with. On a narrow screen an answer stands in place of the list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import printable
from gpuherd.lm.backend import Finish, Generation
from gpuherd.qa.grading.verdicts import Judgment, Verdict
from gpuherd.qa.record import Answered
from gpuherd.qa.report.reading import Judged, ReportedRun
from gpuherd.qa.span import Span, has_thought, part_of
from gpuherd.report.nodes import (
    Node,
    axis,
    choose,
    counted,
    element,
    figure,
    fold,
    given,
    live,
    note,
    pick,
    repeat,
    step,
    when,
)
from gpuherd.report.page import packed_json

CHUNK = 100  # answers
VERDICTS = tuple(Verdict)  # the page knows a verdict by its place here
VERDICT_WORDS = ("correct", "incorrect", "not attempted", "unparsed", "NaN", "not judged")


@dataclass(frozen=True, slots=True)
class TextLimits:
    """The most characters of each kind of text; ``samples``: the most of them that are shown."""

    answer: int
    sample: int
    context: int
    reply: int
    samples: int


# The first that fits is taken. An answer of 20,000 characters is four screens of tokens; nobody reads on in a browser.
LEVELS = (
    TextLimits(answer=20_000, sample=4_000, context=6_000, reply=4_000, samples=50),
    TextLimits(answer=6_000, sample=1_000, context=1_500, reply=1_000, samples=20),
    TextLimits(answer=2_000, sample=300, context=300, reply=300, samples=10),
    TextLimits(answer=500, sample=100, context=0, reply=100, samples=3),
    TextLimits(answer=160, sample=0, context=0, reply=0, samples=0),
)


@dataclass(frozen=True, slots=True)
class AnswerChunks:
    """Packed answers.

    Attributes:
        texts: the chunks.
        answers: how many answers they have, from the first on.
        limits: to which their texts are cut.
    """

    texts: tuple[str, ...]
    answers: int
    limits: TextLimits

    @property
    def cut(self) -> bool:
        """Whether texts are shorter than they may be at most, for want of room."""
        return self.limits is not LEVELS[0]


def chunks_of(run: ReportedRun, room: int) -> AnswerChunks:
    """The answers, their texts as long as fits into so many characters; else as many as fit with short texts."""
    for limits in LEVELS:
        texts: list[str] = []
        left = room
        for text in _packed(run, limits):
            if len(text) > left:
                break
            left -= len(text)
            texts.append(text)
        else:
            return AnswerChunks(tuple(texts), len(run.answers), limits)
    return AnswerChunks(tuple(texts), min(len(run.answers), CHUNK * len(texts)), LEVELS[-1])


def _packed(run: ReportedRun, limits: TextLimits) -> Iterator[str]:
    for start in range(0, len(run.answers), CHUNK):
        yield packed_json([answer_values(run, each, limits) for each in run.answers[start : start + CHUNK]])


def answer_values(run: ReportedRun, answered: Answered, limits: TextLimits) -> dict[str, Any]:
    """One answer as the page's script reads it and its view shows it."""
    question, main = answered.question, (answered.question.id, answered.main_name)
    samples = _samples(run, answered, limits)
    judges = [judged for judged in run.judgings if any((question.id, name) in judged.judgments for name, _ in samples)]
    return {
        "id": question.id,
        "question": _cut(question.question, limits.answer),
        "context": None if question.context is None else _cut(question.context, limits.context),
        "references": [{"text": _cut(each, limits.answer)} for each in question.answers[:100]],
        "ending": _ending(answered),
        "main": _main_values(answered.main, run.relevance.get(question.id), run.span, limits),
        "judgments": [_judgment_values(each, each.judgments.get(main), limits) for each in run.judgings],
        "sampled": bool(answered.samples),
        "heads": [{"name": printable(each.meta.name)} for each in judges],
        "samples": [
            values | {"codes": [{"code": _code(each.judgments.get((question.id, name)))} for each in judges]}
            for name, values in samples
        ],
        "clustered": any(values["clustered"] for _, values in samples),
        "more": len(answered.samples) - len(samples),
    }


def _samples(run: ReportedRun, answered: Answered, limits: TextLimits) -> list[tuple[str, dict[str, Any]]]:
    """The samples by their names; those of one meaning together, under its number."""
    clusters = run.clusters.get(answered.question.id, ())
    shown = answered.samples[: limits.samples]
    meanings = [clusters[at] if at < len(clusters) else None for at in range(len(shown))]
    found: list[tuple[str, dict[str, Any]]] = []
    before: int | None = None
    for at in sorted(range(len(shown)), key=lambda at: meanings[at] or 0):
        meaning = meanings[at]
        opens = meaning is not None and meaning != before
        about = {"clustered": any(each is not None for each in meanings), "opens": "opens" if opens else None}
        values = _sample_values(shown[at], run.span, limits) | about
        found.append((f"sample-{at}", values | {"meaning": meaning + 1 if meaning is not None and opens else ""}))
        before = meaning
    return found


def _main_values(
    generation: Generation, relevance: Sequence[float] | None, span: Span, limits: TextLimits
) -> dict[str, Any]:
    shown = sum(end <= limits.answer for end in generation.ends)
    # Relevance is of the span's tokens; it may go on with the end token's, which is 0 by rule and stands apart here.
    measured = part_of(generation, span).tokens
    known = dict(zip(measured, relevance, strict=False)) if relevance and len(relevance) >= len(measured) else {}
    cut = len(generation.text) - (generation.ends[shown - 1] if shown else 0)
    return {
        "pieces": list(generation.pieces[:shown]),
        "cut": cut,
        "nll": [_nll(each) for each in generation.log_probs[:shown]],
        "relevance": [_short(known.get(at)) for at in range(shown)] if known else None,
        "share": _shares(generation, known) if known and not cut else None,
        "thought": _runs(part_of(generation, "thought").tokens, shown) if has_thought(generation) else [],
        "tokens": len(generation.token_ids),
    }


_ENDS = {
    Finish.EOS: "an end token",
    Finish.STOP: "a stop string",
    Finish.LENGTH: "as many tokens as were allowed",
    Finish.NAN: "numbers of the model that are not finite (NaN): this is no answer",
}


def _ending(answered: Answered) -> str:
    """How long the answer is and what ended it, and how long its prompt was."""
    main, prompt, end = answered.main, answered.prompt, _nll(answered.main.end_log_prob)
    likely = "" if end is None else f" (p {_probability(end)}, NLL {figure(end)} nats)"
    cut = f", {prompt.cut} of the context left out" if prompt.cut else ""
    ended = f"{counted(len(main.token_ids), 'token')}; ended by {_ENDS[main.finish]}{likely}."
    return f"{ended} Prompt: {prompt.tokens} tokens{cut}."


def _probability(nll: float) -> str:
    """Of a negative log-prob, as the page's script writes those of tokens."""
    p = math.exp(-nll)
    if p == 0:
        return "< 10⁻³⁰⁰"
    return "> 99.9 %" if 0.9995 < p < 1 else f"{100 * p:.1f} %" if p >= 0.001 else axis(p)


def _shares(generation: Generation, relevance: Mapping[int, float]) -> list[float | None]:
    """Each token's part in the sum of R(z) NLL(z): what it brings to token-SAR. None without a sum above 0."""
    parts = [
        math.nan if log_prob is None else (0.0 - log_prob) * relevance.get(at, 0.0)
        for at, log_prob in enumerate(generation.log_probs)
    ]
    whole = math.fsum(parts)
    return [_short(part / whole) if whole > 0 else None for part in parts]


def _runs(places: Sequence[int], shown: int) -> list[list[int]]:
    """Places of tokens as runs, from a place to before another, as far as tokens are shown."""
    runs: list[list[int]] = []
    for at in places:
        if at >= shown:
            break
        if runs and runs[-1][1] == at:
            runs[-1][1] = at + 1
        else:
            runs.append([at, at + 1])
    return runs


def _sample_values(generation: Generation, span: Span, limits: TextLimits) -> dict[str, Any]:
    """A sample: its answer, and its thought apart; the figures are of the span that is scored."""
    part = part_of(generation, span)
    log_probs = [generation.log_probs[at] for at in part.tokens]
    known = [each for each in log_probs if each is not None]
    whole = len(known) == len(log_probs) and not generation.is_nan
    thought = part_of(generation, "thought").text if has_thought(generation) else ""
    return {
        # Without a thought all that was written, white space too.
        "text": _cut(part_of(generation, "answer").text if thought else generation.text, limits.sample),
        "thought": _cut(thought, limits.sample) if thought else None,
        "nll": _nll(math.fsum(known)) if whole else None,
        "tokens": len(part.tokens),
        "finish": generation.finish.value,
    }


def _judgment_values(judged: Judged, judgment: Judgment | None, limits: TextLimits) -> dict[str, Any]:
    about = {"name": printable(judged.meta.name), "code": _code(judgment), "figures": ""}
    if judgment is None:
        return about
    figures = (("p(correct)", judgment.p_correct), ("mass", judgment.mass), ("score", judgment.score))
    return about | {
        "p": _short(judgment.p_correct),
        "figures": ", ".join(f"{word} {figure(_short(value))}" for word, value in figures if value is not None),
        "replied": judgment.reply is not None,
        "reply": None if judgment.reply is None else _cut(judgment.reply, limits.reply),
        "note": None if judgment.note is None else judgment.note[: limits.reply],
    }


def _code(judgment: Judgment | None) -> int | None:
    return None if judgment is None else VERDICTS.index(judgment.verdict)


def _cut(text: str, most: int) -> str | list[Any]:
    """The text, or its beginning and how many characters are left out."""
    return text if len(text) <= most else [text[:most], len(text) - most]


def _nll(log_prob: float | None) -> float | None:
    return None if log_prob is None else _short(0.0 - log_prob)


def _short(value: float | None) -> float | None:
    """Four digits: what the page shows."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def index_values(run: ReportedRun, chunks: AnswerChunks, scored: int) -> dict[str, Any]:
    """The values of the index that the script of the answers reads.

    Args:
        chunks: the answers that the page holds.
        scored: of how many answers, from the first on, it holds scores and verdicts.
    """
    return {
        "answers": len(run.answers),
        "shown": chunks.answers,
        "scored": scored,
        "chunk": CHUNK,
        "relevance": bool(run.relevance),
        "judges": [printable(each.meta.name) for each in run.judgings],
        "measures": [printable(each.name) for each in run.scores],
        "verdicts": VERDICT_WORDS,
    }


# --- the view ---------------------------------------------------------------------------------------------------------

# What the list follows, by key; the script filters and sorts by their values.
FILTERS = ("words", "verdicts", "low", "high", "sort", "descending", "judge")
# What is chosen at first.
BROWSED: dict[str, Any] = {
    "words": "",
    "verdicts": [],
    "low": "",
    "high": "",
    "sort": "order",
    "descending": False,
    "colour": "nll",
}
# By what tokens are coloured: the edges between classes of its value, and their words.
SCALES: dict[str, dict[str, Any]] = {
    "nll": {
        "word": "probability",
        "tint": "warm",
        "edges": (0.10536, 0.69315, 2.30259, 4.60517),
        "classes": ("p ≥ 90 %", "50 to 90 %", "10 to 50 %", "1 to 10 %", "below 1 %"),
        "none": "not finite",
    },
    "relevance": {
        "word": "relevance",
        "tint": "cool",
        "edges": (0.05, 0.15, 0.3, 0.5),
        "classes": ("below 0.05", "0.05 to 0.15", "0.15 to 0.3", "0.3 to 0.5", "above 0.5"),
        "none": "not known",
    },
    "share": {
        "word": "share of token-SAR",
        "tint": "cool",
        "edges": (0.02, 0.1, 0.25, 0.5),
        "classes": ("below 2 %", "2 to 10 %", "10 to 25 %", "25 to 50 %", "above 50 %"),
        "none": "not known",
    },
}


def answers_view(run: ReportedRun, held: int) -> list[Node]:
    """The list with its filters, and the chosen answer; ``held``: how many answers the page has texts of."""
    part = f"The first {held:,} of {len(run.answers):,} answers; all are in answers.jsonl and in every figure."
    count = element("div", live(FILTERS, "{words}", part="tally"), kind="soft", role="status")
    clear = live(FILTERS, given("filtered", pick("clear", True, "show all")), part="tally")
    near = element(
        "div",
        _filters(run),
        element("div", count, clear, kind="bar told"),
        ["answers", {}],
        note(part, "note warn") if held < len(run.answers) else None,
        kind="near",
    )
    side = element("div", live((*FILTERS, "answer"), _answer(bool(run.relevance)), part="card"), kind="side")
    return [element("div", near, side, kind="browse {single}")]


def _filters(run: ReportedRun) -> Node:
    orders: list[tuple[Any, str]] = [("order", "order of the questions"), ("tokens", "length of the answer")]
    if run.judgings:
        orders.append(("p", "judge's p(correct)"))
    orders += [(at, printable(each.name)) for at, each in enumerate(run.scores)]
    words = "words of question, answer or reference"
    search = _field("words", words, "filter by words", type="search")
    ends = [
        _field(key, word, f"score {word}", type="number", step="any") for key, word in (("low", "from"), ("high", "to"))
    ]
    valued = [value for value, _ in orders if value != "order"]
    arrow = [when("descending", True, "↓"), when("descending", False, "↑")]
    turn = element("toggle", *arrow, key="descending", label="descending", title="turn the order round")
    names = [(at, printable(each.meta.name)) for at, each in enumerate(run.judgings)]
    pill = ["toggle", {"key": "verdicts", "value": "{code}", "class": "pill v{code}"}, "{word} {count:count}"]
    bar = element(
        "div",
        choose("sort", "sort by", orders),
        live("descending", turn),
        live("sort", when("sort", valued, element("span", *ends, kind="together range"))),
        choose("judge", "verdicts of", names) if len(names) > 1 else None,
        kind="bar",
    )
    pills = live(
        ("judge", "verdicts"), element("div", repeat("verdicts", given("seen", pill)), kind="bar"), part="pills"
    )
    return element("div", search, bar, pills, kind="filters")


def _field(key: str, words: str, label: str, **attributes: str) -> Node:
    return element("field", key=key, placeholder=words, aria_label=label, **attributes)


def _colours(several: bool) -> list[Node]:
    """By what tokens are coloured: buttons where there is a choice, and what the colours mean."""
    buttons = [element("toggle", scale["word"], key="colour", value=name, only=True) for name, scale in SCALES.items()]
    choice = element("div", *buttons, kind="choice", role="group", aria_label="colour tokens by")
    meanings = []
    for name, scale in SCALES.items():
        classes = [element("span", each, kind=f"t {scale['tint']} c{at}") for at, each in enumerate(scale["classes"])]
        label = f"{scale['word']}: {', '.join(scale['classes'])}"
        none = element("span", scale["none"], kind="t unknown")
        line = element("div", _soft(f"{scale['word']}:"), *classes, none, kind="scale", role="img", aria_label=label)
        meanings.append(when("colour", name, line))
    return [choice, *meanings] if several else meanings


def _answer(relevance: bool) -> Node:
    """An answer with all that is known of it; ``relevance``: whether that of its tokens is known in this run."""

    def part(word: str, *children: Node) -> Node:
        return element("section", element("h3", word), *children, kind="part")

    back = element("a", "← all answers", href="#/answers", kind="back")
    steps = [step("place", "Previous", "before", "first"), step("place", "Next", "after", "last")]
    place = element("span", "{place}", " · ", ["brief", {"of": "id", "most": 80}], kind="soft")
    question = {"of": "question", "class": "question", "role": "heading", "aria-level": "2"}
    judgment = element(
        "div",
        element("div", element("b", ["brief", {"of": "name", "most": 60}]), _VERDICT, _soft("{figures}"), kind="bar"),
        given("note", note("{note}")),
        given("replied", _text("reply")),
        kind="part",
    )
    colours = live("colour", element("div", *_colours(relevance), kind="bar"))
    return element(
        "article",
        element("div", back, *steps, place, kind="bar"),
        ["text", question],
        given("context", element("details", element("summary", "Context"), _text("context"))),
        part("References", element("ul", repeat("references", element("li", _text("text", ""))), kind="references")),
        part("Answer", colours, ["tokens", {}], note("{ending}")),
        given("judgments", part("Judgments", repeat("judgments", judgment))),
        given("sampled", part("Samples", _sample_table(), _sample_note())),
        given("scores", part("Scores", *_score_lists())),
        kind="card answer",
        aria_label="answer {name}",
    )


_VERDICT = ["verdict", {"code": "{code}"}]


def _text(of: str, kind: str = "framed") -> Node:
    return ["text", {"of": of, "class": kind}]


def _soft(words: str) -> Node:
    return element("span", words, kind="soft")


def _sample_table() -> Node:
    """Samples of one meaning together, under its number."""

    def head(*words: Node, kind: str | None = None) -> Node:
        return element("th", *words, scope="col", kind=kind)

    heads = [
        given("clustered", head("meaning", kind="num")),
        head("sample"),
        head("NLL", kind="num"),
        head("tokens", kind="num"),
        repeat("heads", head(["brief", {"of": "name", "most": 24}])),
    ]
    thought = element("details", element("summary", "thought", kind="soft"), _text("thought"))
    line = element(
        "tr",
        given("clustered", element("td", "{meaning}", kind="num")),
        element("td", _text("text", ""), given("thought", thought)),
        element("td", "{nll:figure}", kind="num"),
        element("td", "{tokens}", kind="num"),
        repeat("codes", element("td", _VERDICT)),
        kind="{opens}",
    )
    rows = element("tbody", repeat("samples", line))
    whole = element("grid", element("thead", element("tr", *heads)), rows, label="samples")
    return element("div", whole, kind="scroll")


def _sample_note() -> Node:
    return element(
        "p",
        given("clustered", "Samples of one number mean the same. "),
        given("more", "{more} more samples are in answers.jsonl."),
        kind="note",
    )


def _score_lists() -> list[Node]:
    """The scores with the share of answers that score less; token weightings are folded away."""
    value = element("dd", "{value} ", _soft("{share}"), title="{why}")
    score = element("div", element("dt", "{name}"), value)
    weightings = element("dl", repeat("weightings", score), kind="figures scores")
    return [
        note("In grey the share of answers that score less, ties by half."),
        element("dl", repeat("scores", score), kind="figures scores"),
        given("weightings", fold("{weightings.length} token weightings", weightings, name="weightings", kind="how")),
    ]
