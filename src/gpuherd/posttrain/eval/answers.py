"""The completions of an evaluation: a line of JSON a problem, which of them gave the same answer, and what each earned.

``Scores`` is all that metrics and comparisons are made of. Light: no numpy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import TypeVar

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.posttrain.eval.results import Estimator
from gpuherd.posttrain.rewards.answers import CONFIDENCE, VALUE
from gpuherd.posttrain.types import Problem
from gpuherd.qa.grading.formulas import formula_of, normalised_formula, result_of
from gpuherd.qa.numbers import number_of
from gpuherd.qa.span import answer_in
from gpuherd.runs import records
from gpuherd.runs.shard_file import unsealed

T = TypeVar("T")

# ---- completions, a line a problem


class BadAnswers(GpuherdError):
    """A file of completions is damaged, or not of these problems."""

    exit_code = ExitCode.BAD_INPUT


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion.

    Attributes:
        ids: its tokens, the end token included.
        log_probs: of each, under the unguided model at the sampling temperature; None where not finite.
        text: without the end token.
        finished: the policy ended it itself.
        reward, correct, note: what it earned, and why.
        kl: of a guided policy the divergence from the reference, summed over its tokens; None of others.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float | None, ...]
    text: str
    finished: bool
    reward: float
    correct: bool | None
    note: str | None = None
    kl: float | None = None


@dataclass(frozen=True, slots=True)
class AnsweredProblem:
    """A problem and its completions, in the order of the draws.

    Attributes:
        problem: its id.
        prompt: as the task asks.
        prompt_ids: as the policy reads it.
        seconds: its share of the time that its batch took.
    """

    problem: str
    prompt: str
    prompt_ids: tuple[int, ...]
    seconds: float
    completions: tuple[Completion, ...]


def read_lines(path: Path, kind: type[T], what: str) -> Iterator[T]:
    """The whole lines of a file, one after the other; ``what`` a line is, for messages. Raises BadAnswers."""
    number = 0
    try:
        with path.open("rb") as file:
            for line in file:
                number += 1
                if (content := unsealed(line)) is None:
                    raise ValueError("it is incomplete or has changed")
                yield records.read(kind, json.loads(content))
    except OSError as problem:
        raise BadAnswers(f"can't read {path}: {problem.strerror}") from None
    except (TypeError, ValueError, KeyError, RecursionError) as problem:
        raise BadAnswers(f"{path} is damaged: line {number} is no {what}: {problem}; move it away") from None


def read_answers(path: Path) -> Iterator[AnsweredProblem]:
    """The problems of a file with their completions, one after the other. Raises BadAnswers."""
    return read_lines(path, AnsweredProblem, "answered problem")


# ---- which completions gave the same answer


def asks_for_number(problem: Problem) -> bool:
    """Whether the right result of a problem is a number, so that answers to it are compared by theirs.

    >>> asks_for_number(Problem("a", "1+1=", ("2",))), asks_for_number(Problem("b", "path", ("3,4,5",)))
    (True, False)
    """
    first = problem.answers[0] if problem.answers else ""
    return number_of(problem.hidden.get(VALUE, first)) is not None


def answer_of(text: str, *, number: bool = False) -> str | None:
    """A completion's answer in the form in which answers are compared; None where it says nothing, or thinks alone.

    What is marked as the result (``####``, ``\\boxed{}``) or said to be it ("the answer is"); else all of the text, or,
    where a number is asked for, the last one in it, as math answers are judged. Numbers are compared by their value,
    all else without white space and case. A confidence that is stated in its tag is no part of it.

    >>> answer_of("6 + 6 = 12, so the answer is 12.0"), answer_of("#### $1,200"), answer_of("3, 4,5"), answer_of(" ")
    ('12', '1200', '3,4,5', None)
    >>> answer_of("That makes 4 + 5 = 9 apples", number=True), answer_of("no idea", number=True)
    ('9', 'noidea')
    >>> answer_of("9 <confidence>0.7</confidence>", number=True)
    '9'
    """
    text = CONFIDENCE.sub("", answer_in(text))
    result = result_of(text) if number else None
    formula = formula_of(text) if result is None else result
    value = number_of(formula)
    if value is not None:
        return f"{value[0]}%" if value[1] else str(value[0])
    return normalised_formula(formula).casefold() or None


def numbered(answers: Sequence[str | None]) -> tuple[int | None, ...]:
    """Equal answers as equal numbers, in the order in which they first came; None stays None.

    >>> numbered(["b", None, "a", "b"])
    (0, None, 1, 0)
    """
    seen: dict[str, int] = {}
    return tuple(None if each is None else seen.setdefault(each, len(seen)) for each in answers)


# ---- scores


@dataclass(frozen=True, slots=True)
class Scores:
    """Tables with a row a problem and a column a sample, in the order of the draws.

    Attributes:
        problems: ids.
        reward: finite.
        correct: None as a whole where the task knows no right and wrong.
        answer: what votes in a majority: equal numbers in a row are equal answers; None abstains.
        tokens: how many, the end token counted.
        finished: whether the policy ended it itself.
        estimator: how ``kl`` was had; None where it was not measured.
        kl: in nats, summed over the completion's tokens; None of a completion where it was not measured.
    """

    problems: tuple[str, ...]
    reward: tuple[tuple[float, ...], ...]
    correct: tuple[tuple[bool, ...], ...] | None
    answer: tuple[tuple[int | None, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    finished: tuple[tuple[bool, ...], ...]
    estimator: Estimator | None = None
    kl: tuple[tuple[float | None, ...], ...] | None = None

    def __post_init__(self) -> None:
        tables: list[Sequence[Sequence[object]]] = [self.reward, self.answer, self.tokens, self.finished]
        tables += [each for each in (self.correct, self.kl) if each is not None]
        if any(len(table) != len(self.problems) for table in tables):
            raise ValueError("each table has a row a problem")
        if len({len(row) for table in tables for row in table}) > 1:
            raise ValueError("each problem has the same number of samples")
        if len(set(self.problems)) < len(self.problems):
            raise ValueError("a problem is there twice")
        if not self.problems or not self.reward[0]:
            raise ValueError("there is no completion")
        if (self.kl is None) != (self.estimator is None):
            raise ValueError("a divergence has an estimator")

    @property
    def samples(self) -> int:
        """Completions a problem."""
        return len(self.reward[0])

    @property
    def completions(self) -> int:
        """In all."""
        return len(self.problems) * self.samples


def kl_pairs(scores: Scores) -> tuple[tuple[float, int, int], ...]:
    """Of each problem: divergence summed over the completions where it was measured, their number, and their tokens."""
    if scores.kl is None:
        return ()

    def pair(kl: Sequence[float | None], tokens: Sequence[int]) -> tuple[float, int, int]:
        known = [(value, length) for value, length in zip(kl, tokens, strict=True) if value is not None]
        return sum(value for value, _ in known), len(known), sum(length for _, length in known)

    return tuple(starmap(pair, zip(scores.kl, scores.tokens, strict=True)))


def scores_of(
    answered: Sequence[AnsweredProblem],
    problems: Sequence[Problem],
    kl: Sequence[Sequence[float | None]] | None,
    estimator: Estimator | None,
) -> Scores:
    """What the completions earned, as tables.

    Args:
        problems: those that were answered, in the same order.
        kl: a divergence a completion, measured by ``estimator``; both None where none was.
    """
    known = all(each.correct is not None for row in answered for each in row.completions)
    return Scores(
        problems=tuple(each.problem for each in answered),
        reward=tuple(tuple(each.reward for each in row.completions) for row in answered),
        correct=tuple(tuple(bool(each.correct) for each in row.completions) for row in answered) if known else None,
        answer=tuple(_votes(row, problem) for row, problem in zip(answered, problems, strict=True)),
        tokens=tuple(tuple(len(each.ids) for each in row.completions) for row in answered),
        finished=tuple(tuple(each.finished for each in row.completions) for row in answered),
        estimator=estimator,
        kl=None if kl is None else tuple(tuple(row) for row in kl),
    )


def _votes(row: AnsweredProblem, problem: Problem) -> tuple[int | None, ...]:
    number = asks_for_number(problem)
    return numbered([answer_of(each.text, number=number) for each in row.completions])
