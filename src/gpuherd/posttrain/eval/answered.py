"""The completions of an evaluation as lines of JSON, a problem a line: what is kept, and read back. Light."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.posttrain.eval.result import Estimator
from gpuherd.posttrain.eval.scores import Scores
from gpuherd.posttrain.eval.voting import answer_of, asks_for_number, numbered
from gpuherd.posttrain.types import Problem
from gpuherd.runs import records
from gpuherd.runs.shard_file import unsealed


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


def line_of(answered: AnsweredProblem) -> str:
    """One line of JSON, without its end."""
    return json.dumps(records.jsonable(answered), allow_nan=False, separators=(",", ":"))


def read_answers(path: Path) -> Iterator[AnsweredProblem]:
    """The whole lines of a file, one after the other. Raises BadAnswers."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield _read(path, number, line)
    except OSError as problem:
        raise BadAnswers(f"can't read {path}: {problem.strerror}") from None


def _read(path: Path, number: int, line: bytes) -> AnsweredProblem:
    content = unsealed(line)
    if content is None:
        raise BadAnswers(f"{path}: line {number} is no answered problem: it is incomplete or has changed")
    try:
        found: AnsweredProblem = records.read(AnsweredProblem, json.loads(content))
    except (TypeError, ValueError, KeyError, RecursionError) as problem:
        raise BadAnswers(f"{path}: line {number} is no answered problem: {problem}") from None
    return found


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
