"""Which answers of a run are judged, and which of them a model has to be asked about at all. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpuherd.errors import UsageError
from gpuherd.qa.judging.files import Answers
from gpuherd.qa.judging.rules import attempts_nothing
from gpuherd.qa.judging.template import Case
from gpuherd.qa.judging.verdicts import Judgment, Verdict
from gpuherd.qa.record import Answered, Generation, Question
from gpuherd.qa.span import is_only_thought, part_of


class NoAnswer(StrEnum):
    """Why a generation is no answer."""

    NAN = "the model gave no finite numbers (NaN): this is no answer"
    OPEN_THOUGHT = "its thought was not closed: there is no answer"


@dataclass(frozen=True, slots=True)
class Item:
    """An answer to be judged.

    Attributes:
        which: its name.
        question: that it answers.
        text: the answer without the thought before it, and without white space at both ends.
        no_answer: why there is no answer at all: the model gave no numbers, or its thought was not closed.
    """

    which: str
    question: Question
    text: str
    no_answer: NoAnswer | None = None

    @property
    def case(self) -> Case:
        """As a form shows it."""
        return Case(self.question.question, self.question.answers, self.text, self.question.context)


def items_of(answers: Iterable[Answered], which: Answers | None) -> tuple[list[Item], Answers]:
    """The answers to judge in the order of the run, and which these are: as asked, else greedy ones where there are.

    Raises UsageError where the run has none such.
    """
    rows = list(answers)
    has_greedy = any(row.greedy is not None for row in rows)
    chosen: Answers = which or ("greedy" if has_greedy else "samples")
    items = [
        Item(name, row.question, part_of(generation, "answer").text, _no_answer(generation))
        for row in rows
        for name, generation in row.which.items()
        if chosen == "all" or (name == "greedy") == (chosen == "greedy")
    ]
    if rows and not items:
        there = "greedy" if has_greedy else "samples"
        raise UsageError(f"the run has no {'samples' if chosen == 'samples' else 'greedy answers'}; --answers {there}")
    return items, chosen


@dataclass(frozen=True, slots=True)
class Asking:
    """What a model is asked, and for whom.

    Attributes:
        cases: different (question, answer) pairs, in the order of their first item; samples often repeat each other,
            and a judge is asked once.
        of_item: for each item the place of its case; None where nobody is asked, since it is no attempt.
    """

    cases: tuple[Item, ...]
    of_item: tuple[int | None, ...]


def asking(items: Sequence[Item]) -> Asking:
    """What is to be asked about these items."""
    places: dict[tuple[str, str], int] = {}
    cases: list[Item] = []
    of_item: list[int | None] = []
    for item in items:
        if item.no_answer is not None or attempts_nothing(item.text, item.question):
            of_item.append(None)
            continue
        key = (item.question.id, item.text)
        if key not in places:
            places[key] = len(cases)
            cases.append(item)
        of_item.append(places[key])
    return Asking(tuple(cases), tuple(of_item))


def spread(items: Sequence[Item], asked: Asking, verdicts: Sequence[Judgment]) -> list[Judgment]:
    """A judgment an item: that of its case, under its own name."""
    return [
        unasked(item) if place is None else _renamed(verdicts[place], item)
        for item, place in zip(items, asked.of_item, strict=True)
    ]


def unasked(item: Item) -> Judgment:
    """The judgment of an answer that is none, or attempts nothing: no judge is asked."""
    if item.no_answer is NoAnswer.NAN:
        return Judgment(item.question.id, item.which, Verdict.NAN, note=item.no_answer.value)
    said = "empty" if not item.text else "says only that it doesn't know"
    note = said if item.no_answer is None else item.no_answer.value
    return Judgment(item.question.id, item.which, Verdict.NOT_ATTEMPTED, note=f"{note}; the judge was not asked")


def _no_answer(generation: Generation) -> NoAnswer | None:
    if generation.is_nan:
        return NoAnswer.NAN
    return NoAnswer.OPEN_THOUGHT if is_only_thought(generation) else None


def _renamed(judgment: Judgment, item: Item) -> Judgment:
    return Judgment(
        item.question.id,
        item.which,
        judgment.verdict,
        judgment.p_correct,
        judgment.mass,
        judgment.score,
        judgment.reply,
        judgment.note,
    )
