"""The answers as chunks of a page, and how much of long texts there is room for. Pure.

A chunk is the JSON of some answers, deflated, in base64 (``report.packing``). Texts are cut to a limit, and the page
says by how many characters; the run's answers.jsonl has all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.qa.judging.verdicts import Judgment, Verdict
from gpuherd.qa.look.shown import Shown
from gpuherd.qa.record import Answered, Generation
from gpuherd.qa.span import Span, has_thought, part_of
from gpuherd.report.packing import packed_json

CHUNK = 100  # answers
VERDICTS = tuple(Verdict)  # the page knows a verdict by its place here


@dataclass(frozen=True, slots=True)
class Limits:
    """The most characters of each kind of text; ``samples``: the most of them that are shown."""

    answer: int
    sample: int
    context: int
    reply: int
    samples: int


# The first that fits is taken. An answer of 20,000 characters is four screens of tokens; nobody reads on in a browser.
LEVELS = (
    Limits(answer=20_000, sample=4_000, context=6_000, reply=4_000, samples=50),
    Limits(answer=6_000, sample=1_000, context=1_500, reply=1_000, samples=20),
    Limits(answer=2_000, sample=300, context=300, reply=300, samples=10),
    Limits(answer=500, sample=100, context=0, reply=100, samples=3),
    Limits(answer=160, sample=0, context=0, reply=0, samples=0),
)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Packed answers.

    Attributes:
        texts: the chunks.
        answers: how many answers they have, from the first on.
        limits: to which their texts are cut.
    """

    texts: tuple[str, ...]
    answers: int
    limits: Limits

    @property
    def cut(self) -> bool:
        """Whether texts are shorter than they may be at most, for want of room."""
        return self.limits is not LEVELS[0]


def chunks_of(shown: Shown, room: int) -> Chunks:
    """The answers, their texts as long as fits into so many characters; else as many as fit with short texts."""
    for limits in LEVELS:
        texts: list[str] = []
        left = room
        for text in _packed(shown, limits):
            if len(text) > left:
                break
            left -= len(text)
            texts.append(text)
        else:
            return Chunks(tuple(texts), len(shown.answers), limits)
    return Chunks(tuple(texts), min(len(shown.answers), CHUNK * len(texts)), LEVELS[-1])


def _packed(shown: Shown, limits: Limits) -> Iterator[str]:
    for start in range(0, len(shown.answers), CHUNK):
        yield packed_json([answer_values(shown, each, limits) for each in shown.answers[start : start + CHUNK]])


def answer_values(shown: Shown, answered: Answered, limits: Limits) -> dict[str, Any]:
    """One answer as the page's script reads it."""
    question = answered.question
    main = "sample-0" if answered.greedy is None else "greedy"
    clusters = shown.clusters.get(question.id, ())
    samples = [
        _sample_values(generation, shown.span, limits)
        | {
            "cluster": clusters[number] if number < len(clusters) else None,
            "verdicts": [_code(each.judgments.get((question.id, f"sample-{number}"))) for each in shown.judgings],
        }
        for number, generation in enumerate(answered.samples[: limits.samples])
    ]
    return {
        "id": question.id,
        "question": _cut(question.question, limits.answer),
        "context": None if question.context is None else _cut(question.context, limits.context),
        "references": [_cut(each, limits.answer) for each in question.answers[:100]],
        "prompt": [answered.prompt.tokens, answered.prompt.cut],
        "main": _main_values(answered.main, shown.relevance.get(question.id), shown.span, limits),
        "judgments": [_judgment_values(each.judgments.get((question.id, main)), limits) for each in shown.judgings],
        "samples": samples,
        "more": len(answered.samples) - len(samples),
    }


def _main_values(
    generation: Generation, relevance: Sequence[float] | None, span: Span, limits: Limits
) -> dict[str, Any]:
    shown = sum(end <= limits.answer for end in generation.ends)
    text = generation.text[: generation.ends[shown - 1] if shown else 0]
    # Relevance is of the span's tokens; it may go on with the end token's, which is 0 by rule and stands apart here.
    measured = part_of(generation, span).tokens
    known = dict(zip(measured, relevance, strict=False)) if relevance and len(relevance) >= len(measured) else {}
    return {
        "text": text,
        "cut": len(generation.text) - len(text),
        "lengths": [_units(each) for each in generation.pieces[:shown]],
        "nll": [_nll(each) for each in generation.log_probs[:shown]],
        "relevance": [_short(known.get(at)) for at in range(shown)] if known else None,
        "thought": _runs(part_of(generation, "thought").tokens, shown) if has_thought(generation) else [],
        "tokens": len(generation.token_ids),
        "finish": generation.finish.value,
        "end": _nll(generation.end_log_prob),
    }


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


def _sample_values(generation: Generation, span: Span, limits: Limits) -> dict[str, Any]:
    """A sample: its answer, and its thought apart; the figures are of the span that is scored."""
    part = part_of(generation, span)
    log_probs = [generation.log_probs[at] for at in part.tokens]
    known = [each for each in log_probs if each is not None]
    whole = len(known) == len(log_probs) and not generation.is_nan
    thought = part_of(generation, "thought").text
    return {
        # Without a thought all that was written, white space too.
        "text": _cut(part_of(generation, "answer").text if thought else generation.text, limits.sample),
        "thought": _cut(thought, limits.sample) if thought else None,
        "nll": _nll(math.fsum(known)) if whole else None,
        "tokens": len(part.tokens),
        "finish": generation.finish.value,
    }


def _judgment_values(judgment: Judgment | None, limits: Limits) -> dict[str, Any] | None:
    if judgment is None:
        return None
    return {
        "p": _short(judgment.p_correct),
        "mass": _short(judgment.mass),
        "score": _short(judgment.score),
        "reply": None if judgment.reply is None else _cut(judgment.reply, limits.reply),
        "note": None if judgment.note is None else _cut(judgment.note, limits.reply),
    }


def _code(judgment: Judgment | None) -> int | None:
    return None if judgment is None else VERDICTS.index(judgment.verdict)


def _cut(text: str, most: int) -> str | list[Any]:
    """The text, or its beginning and how many characters are left out."""
    return text if len(text) <= most else [text[:most], len(text) - most]


def _units(text: str) -> int:
    """Its length as a browser counts: a character beyond the basic plane is two."""
    return len(text) + sum(sign > "\uffff" for sign in text)


def _nll(log_prob: float | None) -> float | None:
    return None if log_prob is None else _short(0.0 - log_prob)


def _short(value: float | None) -> float | None:
    """Four digits: what the page shows."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
