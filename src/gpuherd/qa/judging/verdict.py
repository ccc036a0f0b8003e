"""What a judge says of an answer. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Classes that are kept apart everywhere; only the first two are labels."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    NOT_ATTEMPTED = "not_attempted"  # "I don't know", or nothing at all
    UNPARSED = "unparsed"  # the judge did not say; never the same as incorrect
    NAN = "nan"  # the model's numbers broke down: there is no answer to judge


@dataclass(frozen=True, slots=True)
class Judgment:
    """One judge's verdict on one answer.

    Attributes:
        id: the question's.
        which: the answer's name: ``greedy``, ``sample-0``, ...
        verdict: the class.
        p_correct: the judge's probability that it is correct, normalised over the verdict words; None where the judge
            gives none.
        mass: the probability that the verdict words have together, before that: how much the judge was in the form.
        score: what a rule measured (F1, ROUGE-L), None where it only decides.
        reply: what a judge that writes wrote, None for the others.
        note: why it is unparsed, or what was done again.
    """

    id: str
    which: str
    verdict: Verdict
    p_correct: float | None = None
    mass: float | None = None
    score: float | None = None
    reply: str | None = None
    note: str | None = None
