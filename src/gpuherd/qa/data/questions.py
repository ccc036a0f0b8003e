"""Questions, the rows that can't be asked and why, and the checks between a row and a question. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.qa.record import Question


class BadQuestions(GpuherdError):
    """A data set can't be used: it is damaged, lacks a needed column, or has no usable row."""

    exit_code = ExitCode.BAD_INPUT


class MissingQuestions(BadQuestions):
    """A file or data set does not exist, or the Hub does not grant access to it."""

    exit_code = ExitCode.MISSING


class BadRow(ValueError):
    """A row can't be used; the exception's text is the reason."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that is not asked.

    Attributes:
        row: its place: ``line 7``, ``row 12``, ``row 3, turn 2``.
        id: its id, if it has one.
        reason: why, as the end of a sentence.
    """

    row: str
    id: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class DataSource:
    """Where questions are from.

    Attributes:
        name: the path, or the id of the Hub.
        config, split, revision: of a data set of the Hub; ``revision`` is the commit if it is known.
        sha256: of the file's bytes, or of all questions of the data set as JSON lines; in hex.
        rows: how many rows were read.
    """

    name: str
    config: str | None
    split: str | None
    revision: str | None
    sha256: str
    rows: int

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FewShotExample:
    """A question that is shown to the model with its answer.

    Attributes:
        worked: an answer with its derivation, if the data set has one (gsm8k).
    """

    question: Question
    worked: str | None = None

    @property
    def answer(self) -> str:
        """The short answer: the first reference."""
        return self.question.answers[0]


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """The questions of a data set, ready to be asked.

    Attributes:
        questions: in the order in which they are asked; ids and texts (question and context) are unique.
        refused: the rows that are not asked.
        source: where the questions are from.
        examples: the examples before each question; none of them is asked.
        examples_source: where the examples are from, if there are any.
    """

    questions: tuple[Question, ...]
    refused: tuple[RefusedRow, ...]
    source: DataSource
    examples: tuple[FewShotExample, ...] = ()
    examples_source: DataSource | None = None


# ---- from a row to a question ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DataRow:
    """A row as it was read: its place, and its values by column or the problem with it."""

    place: str
    values: Mapping[str, Any] | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class UncheckedQuestion:
    """A question as a dataset reader found it in a row, unchecked.

    Attributes:
        answers: a text, a number, or a list of these.
        context: a text, or a list of texts.
        part: its place in the row, if a row has several (``turn 2``).
        worked: an answer with its derivation, for examples.
    """

    question: Any
    answers: Any
    context: Any = None
    id: Any = None
    part: str | None = None
    worked: str | None = None


@dataclass(frozen=True, slots=True)
class Unusable:
    """A row that has no question, as its dataset reader knows, and why."""

    reason: str
    id: Any = None


@dataclass(slots=True)
class QuestionCollector:
    """Collects questions in order; each id and each text is accepted once.

    Attributes:
        with_context: whether questions are asked with their contexts; without, the same words about two contexts are
            the same question.
    """

    with_context: bool = True
    examples: list[FewShotExample] = field(default_factory=list)
    refused: list[RefusedRow] = field(default_factory=list)
    rows: int = 0
    _ids: dict[str, str] = field(default_factory=dict)
    _texts: dict[tuple[str, str | None], str] = field(default_factory=dict)

    def add(self, place: str, found: UncheckedQuestion | Unusable) -> None:
        """Accepts a draft, or records it as refused."""
        if isinstance(found, UncheckedQuestion) and found.part is not None:
            place = f"{place}, {found.part}"
        known_id = None if found.id is None else str(found.id)
        if isinstance(found, Unusable):
            self.refused.append(RefusedRow(place, known_id, found.reason))
            return
        try:
            question = checked_question(found)
        except BadRow as problem:
            self.refused.append(RefusedRow(place, known_id, str(problem)))
            return
        text = (question.question, question.context if self.with_context else None)
        if (same := self._texts.get(text)) is not None:
            reason = f"the same question{' and context' if text[1] else ''} as {same}"
            self.refused.append(RefusedRow(place, known_id, reason))
        elif (same := self._ids.get(question.id)) is not None:
            self.refused.append(RefusedRow(place, known_id, f"the same id as {same}"))
        else:
            self._texts[text] = self._ids[question.id] = place
            self.examples.append(FewShotExample(question, found.worked))


def checked_question(draft: UncheckedQuestion) -> Question:
    """The question of a draft, its texts stripped. Raises BadRow."""
    question = text_of(draft.question, "question").strip()
    if not question:
        raise BadRow("the question is empty")
    answers = _answers(draft.answers)
    context = _context(draft.context)
    text_of(draft.worked or "", "worked answer")
    own_id = "" if draft.id is None else text_of(draft.id, "id").strip()
    return Question(own_id or content_id(question, context), question, answers, context)


def content_id(question: str, context: str | None) -> str:
    """An id for a question that has none: 16 hex digits of its text and context, whatever its place."""
    return hashlib.sha256(f"{question}\0{context or ''}".encode()).hexdigest()[:16]


def text_of(value: Any, what: str) -> str:
    """A text or number as a text. Raises BadRow for another value, and for text that is no Unicode."""
    value = _present(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"there is no {what}" if value is None else f"the {what} is no text but {_short(value)}")
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow(f"the {what} holds half of a surrogate pair, which is no character") from None
    return text


def _answers(value: Any) -> tuple[str, ...]:
    """Acceptable answers without empty ones and repetitions. Raises BadRow."""
    if isinstance(value, Mapping) and "text" in value:  # SQuAD's form
        value = value["text"]
    found = dict.fromkeys(text for one in _listed(value) if (text := text_of(one, "answer").strip()))
    if not found:
        raise BadRow("there is no reference answer")
    return tuple(found)


def _context(value: Any) -> str | None:
    parts = [text_of(one, "context").strip() for one in _listed(value)]
    return "\n\n".join(part for part in parts if part) or None


def _present(value: Any) -> Any:
    """None for NaN, which stands for a missing value in tables that were written by pandas."""
    return None if isinstance(value, float) and value != value else value


def _listed(value: Any) -> list[Any]:
    """The values of a list, or the one value, without missing ones."""
    return [one for one in (value if isinstance(value, list | tuple) else [value]) if _present(one) is not None]


def _short(value: Any) -> str:
    """A value of the wrong type, in at most 40 characters."""
    try:
        words = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        words = type(value).__name__
    return words if len(words) <= 40 else words[:39] + "…"


def in_seeded_order(examples: Iterable[FewShotExample], seed: int, purpose: str) -> list[FewShotExample]:
    """The examples, ordered by a hash of the seed and their ids: independent of the order in the file, and the first N
    are among the first N + 1."""

    def drawn(example: FewShotExample) -> bytes:
        return hashlib.sha256(f"{purpose}\0{seed}\0{example.question.id}".encode()).digest()

    return sorted(examples, key=drawn)
