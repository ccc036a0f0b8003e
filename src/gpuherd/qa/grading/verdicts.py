"""Verdicts: their classes, the words by which a judge gives them, and reading one from a reply or from probabilities.

A judge's template is one file, ``templates/WAY.toml``: prompt, cue, the instruction how to reply, the words of each
verdict. Pure but for reading that file; a tokenizer is a function here.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from gpuherd.errors import UsageError
from gpuherd.lm.tokens import without_longer
from gpuherd.qa.span import without_thoughts


class Verdict(StrEnum):
    """Classes that are kept apart everywhere; only the first two are labels."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    NOT_ATTEMPTED = "not_attempted"  # "I don't know", or nothing at all
    UNPARSED = "unparsed"  # the judge did not say; never the same as incorrect
    NAN = "nan"  # the model's numbers broke down: there is no answer to judge


@dataclass(frozen=True, slots=True)
class Ruling:
    """A judge's verdict on an answer.

    Attributes:
        verdict: the class.
        score: what a rule measured (F1, ROUGE-L, in [0, 1]), None where it only decides.
        note: why it is unparsed, or what was done again.
        p_correct: the judge's probability that it is correct, normalised over the verdict words; None where the judge
            gives none.
        mass: the probability that the verdict words have together, before that: how much the judge was in the form.
        reply: what a judge that writes wrote, None for the others.
    """

    verdict: Verdict
    score: float | None = None
    note: str | None = None
    p_correct: float | None = None
    mass: float | None = None
    reply: str | None = None


@dataclass(frozen=True, slots=True)
class Judgment:
    """The ruling on an answer of a run: ``id`` is the question's, ``which`` the answer's name (``greedy``,
    ``sample-0``, ...); the others are those of ``Ruling``."""

    id: str
    which: str
    verdict: Verdict
    p_correct: float | None = None
    mass: float | None = None
    score: float | None = None
    reply: str | None = None
    note: str | None = None


# --- Templates --------------------------------------------------------------------------------------------------------

Way = Literal["two-way", "three-way"]
WAYS: tuple[Way, ...] = get_args(Way)
Mode = Literal["tokens", "text"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True)
class VerdictScale:
    """A built-in template.

    Attributes:
        prompt: the text, with slots.
        cue: what stands before the verdict.
        reply: how to reply, by the mode in which the verdict is read.
        weighed: the spellings of each verdict whose probabilities are added up.
        words: of a written reply, in lower case -> the verdict.
    """

    prompt: str
    cue: str
    reply: Mapping[Mode, str]
    weighed: Mapping[Verdict, tuple[str, ...]]
    words: Mapping[str, Verdict]


@functools.cache
def scale(way: Way) -> VerdictScale:
    """The template of this name."""
    found = tomllib.loads((Path(__file__).parent / "templates" / f"{way}.toml").read_text("utf-8"))
    words = {word: Verdict(verdict) for verdict, each in found["words"].items() for word in each}
    spellings = {Verdict(verdict): tuple(each) for verdict, each in found["weighed"].items()}
    return VerdictScale(
        found["prompt"]["text"].strip(),
        found["cue"],
        MappingProxyType(found["reply"]),
        MappingProxyType(spellings),
        MappingProxyType(words),
    )


# --- A written reply --------------------------------------------------------------------------------------------------
#
# A verdict is a whole line that says nothing else: ``yes``, ``Verdict: no``, ``**Verdict:** B``. Everything else is
# unparsed: no verdict, two that contradict each other, one in quotation marks, one in the middle of a sentence. What
# is unparsed is counted and listed, and is never the same as incorrect: a substring "yes" would be found in
# "yesterday" and in "the eyes have it", and "CORRECT" in "INCORRECT".

_LABEL = re.compile(r"(?:(?:my|the|final) )*(?:verdict|grade|judge?ment|answer) ?(?:is ?)?[:=] ?(.*)")
_BOTH = re.compile(r"([a-z]) ?(?:\(([a-z_ ]+)\)|[:,.)-] ?([a-z_ ]+))")  # "A: CORRECT", "B (INCORRECT)"
_QUOTING = re.compile(r"^\s*[>|]|[\"“”„«»‘’`]|(?<!\w)'|'(?!\w)")
_MARKS = "*_#~ \t"
_ENDINGS = ".! \t"


def parse_reply(reply: str, way: Way, *, in_thought: bool = False) -> tuple[Verdict, str | None]:
    """The verdict in a judge's reply, and where there is none the reason. ``in_thought``: the reply begins in a thought
    that the judge's template opened.

    >>> parse_reply("<think>maybe yes?</think>No", "two-way")
    (<Verdict.INCORRECT: 'incorrect'>, None)
    >>> parse_reply("no, they left yesterday", "two-way")
    (<Verdict.UNPARSED: 'unparsed'>, 'no line of the reply is a verdict')
    """
    said = without_thoughts(reply, in_thought=in_thought)
    if said is None:
        return Verdict.UNPARSED, "the reply ends, or begins anew, in the middle of a thought"
    if not said.strip():
        return Verdict.UNPARSED, "the reply is empty"
    lines = _outside_code(said)
    found = [verdict for line in lines if (verdict := _verdict_of(line, way)) is not None]
    if Verdict.UNPARSED in found:
        return Verdict.UNPARSED, "a line that gives the verdict gives none of the words that were asked for"
    if not found:
        return Verdict.UNPARSED, "no line of the reply is a verdict"
    if len(set(found)) > 1:
        return Verdict.UNPARSED, "the reply gives verdicts that contradict each other"
    if any(_opening(line, way) not in (None, found[0]) for line in lines):
        return Verdict.UNPARSED, "the reply begins a line with a verdict that contradicts the one that it gives"
    return found[0], None


def _outside_code(text: str) -> list[str]:
    """The lines that stand in no block of code: there a judge quotes."""
    lines, quoting = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            quoting = not quoting
        elif not quoting:
            lines.append(line)
    return lines


def _verdict_of(line: str, way: Way) -> Verdict | None:
    """The verdict that a line is; UNPARSED for one that names the verdict and gives none; None for any other line."""
    if _QUOTING.search(line):
        return None
    plain = " ".join(line.lower().translate({ord(mark): " " for mark in "*#~"}).split()).strip(_MARKS).rstrip(_ENDINGS)
    label = _LABEL.fullmatch(plain)
    word = (label[1] if label else plain).strip(_MARKS).rstrip(_ENDINGS)
    verdict = _word(word, way)
    if verdict is None and label and label[0].partition(":")[0].strip().endswith(("verdict", "grade")):
        return Verdict.UNPARSED if word else None
    return verdict


def _word(word: str, way: Way) -> Verdict | None:
    words = scale(way).words
    both = _BOTH.fullmatch(word)
    if both:
        letter, name = words.get(both[1]), words.get((both[2] or both[3]).strip())
        return letter if letter is name else None
    return words.get(word)


def _opening(line: str, way: Way) -> Verdict | None:
    """The verdict that a line begins with before a comma, colon or dash: "No, it is another year"."""
    if _QUOTING.search(line):
        return None
    first = re.match(r"[\s*_#~]*([A-Za-z]+(?:_[A-Za-z]+)?)[*_~]*\s*(?:[,;:.!]|[-–—]|$)", line)
    if first is None or len(first[1]) == 1:
        return None
    return scale(way).words.get(first[1].lower())


# --- Probabilities of the verdict words -------------------------------------------------------------------------------

_MOST = 1.01  # of float32 or rounded log-probs; probabilities that add up to more are none

Encode = Callable[[str], Sequence[int]]  # text -> token ids, no special tokens


def verdict_tokens(way: Way, cue: str, encode: Encode) -> dict[Verdict, tuple[tuple[int, ...], ...]]:
    """For each verdict the continuations of the cue that mean it, as token ids: each spelling, with a space before it
    and without.

    Spellings of one token are enough where there are such; else all, as sequences. What two verdicts share, and what
    begins with another continuation of its verdict, is left out: nothing is counted twice. Raises UsageError where a
    verdict has none left.
    """
    found: dict[Verdict, set[tuple[int, ...]]] = {}
    for verdict, words in scale(way).weighed.items():
        behind = {_behind(cue, space + word, encode) for word in words for space in (" ", "")}
        ways = {each for each in behind if each}
        found[verdict] = {each for each in ways if len(each) == 1} or ways
    shared = {each for one in found for other in found if one is not other for each in found[one] & found[other]}
    tokens = {verdict: without_longer(sorted(ways - shared)) for verdict, ways in found.items()}
    if not all(tokens.values()):
        raise UsageError("the judge's tokenizer has no tokens by which its verdicts could be told apart; --mode text")
    return tokens


def _behind(cue: str, text: str, encode: Encode) -> tuple[int, ...]:
    """The tokens that the text adds behind the cue; none where the two melt into one."""
    before, whole = tuple(encode(cue)), tuple(encode(cue + text))
    return whole[len(before) :] if whole[: len(before)] == before else ()


def verdict_from_log_probs(
    log_probs: Mapping[Verdict, Sequence[float | None]], *, threshold: float | None, min_mass: float
) -> Ruling:
    """The verdict of the log-probs of all continuations of each verdict; unparsed where these are too improbable
    together, or nothing finite came.

    Args:
        threshold: from which probability of correct on an answer is correct; None: the most probable verdict counts.
        min_mass: the least that the verdict words must have together.
    """
    known = [each for values in log_probs.values() for each in values]
    if any(each is None or math.isnan(each) for each in known):
        return Ruling(Verdict.UNPARSED, note="the judge's probabilities are not finite")
    mass_of = {verdict: math.fsum(math.exp(each or 0.0) for each in v) for verdict, v in log_probs.items()}
    mass = math.fsum(mass_of.values())
    if mass > _MOST:
        return Ruling(Verdict.UNPARSED, note="the judge's probabilities add up to more than 1")
    mass = min(1.0, mass)
    if mass <= 0:
        return Ruling(Verdict.UNPARSED, note="the verdict words have no probability", mass=mass)
    p_correct = min(1.0, mass_of[Verdict.CORRECT] / math.fsum(mass_of.values()))
    note = None
    if mass < min_mass:
        note = f"the verdict words have {mass:.3g} together, less than {min_mass:g}"
    others = {verdict: value for verdict, value in mass_of.items() if verdict is not Verdict.CORRECT}
    best = max(others, key=others.__getitem__)
    if threshold is not None:
        right = p_correct >= threshold
    else:
        right = mass_of[Verdict.CORRECT] > others[best]
        if mass_of[Verdict.CORRECT] == others[best]:
            note = note or "two verdicts are equally probable"
    verdict = Verdict.UNPARSED if note else Verdict.CORRECT if right else best
    return Ruling(verdict, note=note, p_correct=p_correct, mass=mass)
