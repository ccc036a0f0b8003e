"""Completions of policies: how many a page has room for, packed, a text for each policy; and the view of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import printable
from gpuherd.lm.backend import beyond_rounding
from gpuherd.posttrain.eval.answers import AnsweredProblem, Completion
from gpuherd.posttrain.report.reading import Samples
from gpuherd.report.nodes import Node, card, choose, element, figure, given, missing, note, repeat, step
from gpuherd.report.page import packed_json


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
