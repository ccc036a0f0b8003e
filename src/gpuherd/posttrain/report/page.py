"""The page of a run of post-training: one HTML file with all that it shows inside it, which needs no network; and as
many completions of policies as it has room for.

What strangers wrote (problems, completions, names) enters the page deflated and in base64, or through Jinja's
autoescape, and the script puts it on the screen as text only, with the signs that can't be seen written out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_write
from gpuherd.errors import CannotWrite, printable
from gpuherd.lm.backend import beyond_rounding
from gpuherd.posttrain.eval.answers import AnsweredProblem, Completion
from gpuherd.posttrain.report.figures import policy_words
from gpuherd.posttrain.report.reading import RunReport, Samples
from gpuherd.posttrain.report.views import first_state, views_of
from gpuherd.report.nodes import Node, card, choose, element, figure, given, missing, note, repeat, step
from gpuherd.report.page import MOST_BYTES, PageContents, View, frame_bytes, packed_json, packed_views, render_page

_LEAST_FOR_SAMPLES = 500_000


@dataclass(frozen=True, slots=True)
class Page:
    """The finished page.

    Attributes:
        html: its bytes, UTF-8.
        policies: how many rows its tables have.
        samples: of how many policies it holds completions.
        cut: whether there are fewer completions, or shorter texts, than there may be at most, for want of room.
    """

    html: bytes
    policies: int
    samples: int
    cut: bool


def write_page(run: RunReport, path: Path) -> Page:
    """Writes the page, whole or not at all. Returns it. Raises MissingExtra without Jinja2, CannotWrite."""
    page = make_page(run)
    try:
        atomic_write(path.absolute(), page.html)
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}; name another file with --output") from None
    return page


def make_page(run: RunReport, *, most_bytes: int = MOST_BYTES) -> Page:
    """The page of a run; ``most_bytes``: what it may grow to, completions are cut first. Raises MissingExtra."""
    contents = PageContents(
        title=run.title,
        views=[*views_of(run), *([View("samples", "Samples", samples_view())] if run.samples else [])],
        facts=run.facts,
        notes=run.notes,
        settings_title="What was asked for",
        settings=run.settings,
        without_script=(
            "The same is in the run folder: result.json and answers.jsonl of each evaluation, curves.jsonl of each "
            "training."
        ),
        state=first_state(run),
        scripts=[Path(__file__).parent / "samples.js"],
    )
    without = sum(map(len, packed_views(contents).values())) + frame_bytes(contents)
    chunks = chunks_of(run.samples, max(most_bytes - without, _LEAST_FOR_SAMPLES))
    held = run.samples[: len(chunks.texts)]
    extra = {
        "samples": [policy_words(each.row) for each in held],
        "left_out": len(run.samples) - len(chunks.texts),
    }
    blobs = {f"chunk-{at}": text for at, text in enumerate(chunks.texts)}
    html = render_page(replace(contents, extra=extra, blobs=blobs))
    cut = chunks.limits is not LEVELS[0] or len(chunks.texts) < len(run.samples)
    return Page(html, len(run.gathered.rows), len(chunks.texts), cut)


# --- completions that fit ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """The most of each: problems of a policy, completions of a problem, characters of a text."""

    problems: int
    completions: int
    characters: int


_MOST_WHY = 300  # characters of a reason
# The first that fits is taken.
LEVELS = (Limits(40, 8, 4000), Limits(40, 4, 1500), Limits(20, 4, 800), Limits(10, 2, 400), Limits(4, 1, 200))


@dataclass(frozen=True, slots=True)
class Chunks:
    """The completions of each policy, packed; a text each, in the order of ``RunReport.samples``; as many as fit."""

    texts: tuple[str, ...]
    limits: Limits


def chunks_of(samples: Sequence[Samples], room: int) -> Chunks:
    """The completions, as many and as long as fit into so many characters."""
    for limits in LEVELS:
        texts, left = [], room
        for each in samples:
            text = packed_json([_problem_values(row, limits) for row in each.answered[: limits.problems]])
            left -= len(text)
            if left < 0:
                break
            texts.append(text)
        else:
            return Chunks(tuple(texts), limits)
    return Chunks(tuple(texts), LEVELS[-1])


def _problem_values(answered: AnsweredProblem, limits: Limits) -> dict[str, Any]:
    return {
        "id": printable(answered.problem),
        "prompt": _cut(answered.prompt, limits.characters),
        "completions": [
            _completion_values(at, each, limits)
            for at, each in enumerate(answered.completions[: limits.completions], 1)
        ],
        "more": max(0, len(answered.completions) - limits.completions),
    }


def _completion_values(number: int, completion: Completion, limits: Limits) -> dict[str, Any]:
    cut = "" if completion.finished else ", cut by the limit"
    kl = None if completion.kl is None else _short(beyond_rounding(completion.kl))
    note = completion.note
    return {
        "number": number,
        "text": _cut(completion.text, limits.characters),
        "reward": _short(completion.reward),
        "right": completion.correct is True,
        "wrong": completion.correct is False,
        "facts": f"{len(completion.ids)} tokens{cut}" + ("" if kl is None else f", KL {figure(kl)} nats"),
        "why": note if note is None or len(note) <= _MOST_WHY else f"{note[:_MOST_WHY]}…",
    }


def _cut(text: str, most: int) -> str | list[Any]:
    """The text, or its beginning and how many characters are left out."""
    return text if len(text) <= most else [text[:most], len(text) - most]


def _short(value: float | None) -> float | None:
    """Five digits: more than the page shows."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


# --- the view ---------------------------------------------------------------------------------------------------------

_KINDS = (("all", "all"), ("right", "a right completion"), ("wrong", "a wrong completion"))


def samples_view() -> list[Node]:
    """A problem with a policy's completions, beside another policy's; ``samples.js`` makes the record."""
    before, after = step("problem", "Earlier", "earlier", "first"), step("problem", "Later", "later", "last")
    bar = element(
        "div",
        choose("sample", "policy", "{policies}"),
        choose("beside", "beside", "{others}"),
        given("judged", choose("kind", "with", _KINDS)),
        element("span", before, "{place}", after, kind="together"),
        kind="bar",
    )
    left_out = given("left_out", "The page has no room for the completions of {left_out} more policies. ")
    absent = element("p", "That policy was not asked this problem, or the page has no room for it.")
    cards = [given("known", _completions()), missing("known", card(None, absent))]
    shown = [
        card("Problem {id}", ["text", {"of": "prompt"}]),
        element("div", repeat("cards", *cards), kind="{layout}"),
        element("p", left_out, "The first problems of each evaluation; answers.jsonl has all.", kind="note"),
    ]
    none = card(None, element("p", "No problem of these fits."))
    return [bar, given("problem", *shown), missing("problem", none)]


def _completions() -> Node:
    facts = [
        element("b", "sample {number}"),
        given("right", element("span", "right", kind="pill right v0")),
        given("wrong", element("span", "wrong", kind="pill wrong v1")),
        "reward {reward:figure}",
        element("span", "{facts}", kind="soft"),
    ]
    completion = element(
        "article",
        element("div", *facts, kind="bar"),
        ["text", {"of": "text"}],
        given("why", note("{why}")),
        kind="part",
        aria_label="sample {number}",
    )
    more = given("more", note("{more} more are in answers.jsonl"))
    shown = repeat("completions", completion)
    return element("section", element("h3", "{policy}"), shown, more, kind="card completions")
