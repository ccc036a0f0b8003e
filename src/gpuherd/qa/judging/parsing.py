"""Reads the verdict in what a judge wrote: strictly, or not at all. Pure.

A verdict is a whole line that says nothing else: ``yes``, ``Verdict: no``, ``**Verdict:** B``. Everything else is
unparsed: no verdict, two that contradict each other, one in quotation marks, one in the middle of a sentence. What is
unparsed is counted and listed, and is never the same as incorrect: a substring "yes" would be found in "yesterday" and
in "the eyes have it", and "CORRECT" in "INCORRECT".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuherd.qa.judging.form import Way
from gpuherd.qa.judging.verdict import Verdict
from gpuherd.qa.span import without_thoughts

# Words that are verdicts, in lower case; those of three grades by letter or by name.
WORDS: Mapping[Way, Mapping[str, Verdict]] = {
    "two-way": {"yes": Verdict.CORRECT, "no": Verdict.INCORRECT},
    "three-way": {
        "a": Verdict.CORRECT,
        "b": Verdict.INCORRECT,
        "c": Verdict.NOT_ATTEMPTED,
        "correct": Verdict.CORRECT,
        "incorrect": Verdict.INCORRECT,
        "not_attempted": Verdict.NOT_ATTEMPTED,
        "not attempted": Verdict.NOT_ATTEMPTED,
    },
}

_LABEL = re.compile(r"(?:(?:my|the|final) )*(?:verdict|grade|judge?ment|answer) ?(?:is ?)?[:=] ?(.*)")
_BOTH = re.compile(r"([abc]) ?(?:\(([a-z_ ]+)\)|[:,.)-] ?([a-z_ ]+))")  # "A: CORRECT", "B (INCORRECT)"
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
    words = WORDS[way]
    both = _BOTH.fullmatch(word) if way == "three-way" else None
    if both:
        letter, name = words.get(both[1]), words.get((both[2] or both[3]).strip())
        return letter if letter is name else None
    return words.get(word)


def _opening(line: str, way: Way) -> Verdict | None:
    """The verdict that a line begins with before a comma, colon or dash: "No, it is another year"."""
    if _QUOTING.search(line):
        return None
    first = re.match(r"[\s*_#~]*([A-Za-z]+(?:_[A-Za-z]+)?)[*_~]*\s*(?:[,;:.!]|[-–—]|$)", line)
    if first is None or (way == "three-way" and len(first[1]) == 1):
        return None
    return WORDS[way].get(first[1].lower())
