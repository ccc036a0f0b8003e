"""Answers compared with the right ones: sums and formulas by the rules of ``qa.grading.formulas``, words by those of
``qa.grading.rules``; and scoring of any kind that never raises because of a completion (``guarded``).

A batch of formulas is judged twice. The first time no two formulas are compared, only those noted that would have to
be: numbers and formulas that are written alike decide most cases at once. Each different pair is then compared once, in
processes side by side (``qa.grading.formulas``, 10 to 960 ms a pair), and the second judging finds the results.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gpuherd.errors import GpuherdError, UsageError, printable
from gpuherd.posttrain.types import Problem, Reward, Scoring
from gpuherd.qa.grading.formulas import FormulaProcess, math_judge
from gpuherd.qa.grading.rules import RULES
from gpuherd.qa.grading.verdicts import Ruling, Verdict
from gpuherd.qa.record import Question
from gpuherd.qa.span import answer_in
from gpuherd.runs.console import warn_once

logger = logging.getLogger(__name__)

VALUE = "value"  # the hidden part of a problem that has its bare result
# What an answer states its confidence in, beside the answer itself.
CONFIDENCE = re.compile(r"<confidence>(.*?)</confidence>", re.IGNORECASE | re.DOTALL)
_MOST_PROCESSES = 4
_MOST_KEPT = 100_000  # compared pairs that are remembered

Pair = tuple[str, str]
Scored = TypeVar("Scored")


class MathRewards:
    """Scores completions by the results of their answers, thoughts left out: 1 or 0.

    The right results of a problem are its hidden ``value`` where it has one, else its answers. Processes start when a
    formula has first to be compared.
    """

    verifiable = True
    reward_range = (0.0, 1.0)

    def __init__(self, processes: int | None = None):
        """``processes``: how many compare formulas; None: one a core, four at most."""
        count = min(_MOST_PROCESSES, os.cpu_count() or 1) if processes is None else processes
        self._idle = [FormulaProcess() for _ in range(count)]
        self._all = tuple(self._idle)
        self._known: dict[Pair, bool | None] = {}

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """The reward of each completion, in order. Raises MissingExtra for formulas without math-verify."""
        pairs = zip(problems, completions, strict=True)
        asked = [(answer_in(completion), _question(problem)) for problem, completion in pairs]
        wanted: dict[Pair, None] = {}

        def noted(reference: str, answer: str) -> bool | None:
            if (reference, answer) not in self._known:
                wanted[reference, answer] = None
            return self._known.get((reference, answer))

        first = [math_judge(completion, question, noted) for completion, question in asked]
        if not wanted:
            return [_reward(each) for each in first]
        self._compare(list(wanted))
        known = dict(self._known)
        if len(self._known) > _MOST_KEPT:
            self._known.clear()
        return [_reward(math_judge(*each, lambda *pair: known[pair])) for each in asked]

    def close(self) -> None:
        """Ends the processes; they start again where they are needed again."""
        for process in self._all:
            process.close()

    def _compare(self, pairs: Sequence[Pair]) -> None:
        """Compares all pairs, each process one after the other."""
        workers = min(len(self._all), len(pairs))
        if workers == 1:
            found = [self._one(pair) for pair in pairs]
        else:
            with ThreadPoolExecutor(workers) as pool:
                found = list(pool.map(self._one, pairs))
        self._known.update(zip(pairs, found, strict=True))

    def _one(self, pair: Pair) -> bool | None:
        process = self._idle.pop()  # as many as threads, so there is one
        try:
            return process.equal(*pair)
        finally:
            self._idle.append(process)


def _question(problem: Problem) -> Question:
    value = problem.hidden.get(VALUE)
    return Question(problem.id, problem.prompt, problem.answers if value is None else (value,))


def _reward(ruling: Ruling) -> Reward:
    right = ruling.verdict is Verdict.CORRECT
    note = ruling.note or ("nothing is answered" if ruling.verdict is Verdict.NOT_ATTEMPTED else None)
    return Reward(float(right), right, note=note)


class WordRewards:
    """Scores the answers of completions by a rule, thoughts left out: ``exact`` and ``contains`` give 1 or 0; ``squad``
    and ``rouge`` the score itself, and say by their own threshold what is right."""

    reward_range = (0.0, 1.0)

    def __init__(self, rule: str):
        """Raises UsageError for a rule that there is not."""
        if rule not in RULES:
            raise UsageError(f"no rule {rule!r}; there are {', '.join(RULES)}")
        self._rule = RULES[rule]
        self.verifiable = self._rule.threshold is None

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """The reward of each completion, in order; 0 for an empty one."""
        return [self._reward(*each) for each in zip(problems, completions, strict=True)]

    def close(self) -> None:
        """Nothing was started."""

    def _reward(self, problem: Problem, completion: str) -> Reward:
        ruling = self._rule(answer_in(completion), Question(problem.id, problem.prompt, problem.answers))
        right = ruling.verdict is Verdict.CORRECT
        return Reward(float(right) if ruling.score is None else ruling.score, right, note=ruling.note)


# ---- scoring that never raises because of a completion ---------------------------------------------------------------
#
# After an unexpected exception a completion counts as a wrong answer. Draws are deterministic, so a training that one
# completion ended would meet it again whenever it is resumed. Faults of the installation, of the data and of the
# machine are GpuherdErrors, and pass: no completion is to blame for them.


class BadReward(GpuherdError):
    """A task gave a reward that is no finite number, or another number of rewards than of completions."""


def rewards_of(scorer: Scoring, name: str, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
    """The rewards of completions; the least reward, and wrong, for those that the scorer raises for.

    A reward model has no least reward and no wrong answers: what it raises is raised.
    """
    least = scorer.reward_range[0]
    if not math.isfinite(least):
        return scorer.rewards(problems, completions)
    return guarded(
        scorer.rewards, name, problems, completions, lambda reason: Reward(least, correct=False, note=reason)
    )


def guarded(
    score: Callable[[Sequence[Problem], Sequence[str]], list[Scored]],
    name: str,
    problems: Sequence[Problem],
    completions: Sequence[str],
    wrong: Callable[[str], Scored],
) -> list[Scored]:
    """The results of ``score``. Where it raises, it is called for each completion by itself; one for which it raises
    again gets ``wrong`` of the reason."""
    try:
        return score(problems, completions)
    except GpuherdError:
        raise
    except Exception as problem:
        if len(completions) == 1:
            return [wrong(_reason(name, problem, problems[0].id))]
    alone = zip(problems, completions, strict=True)
    return [found for one, text in alone for found in guarded(score, name, [one], [text], wrong)]


def _reason(name: str, problem: Exception, which: str) -> str:
    """The reason of a reward where scoring raised. Logs the exception, the first of its kind with the traceback."""
    reason = f"scoring failed: {type(problem).__name__}: {problem}"
    message = "%s, problem %s: %s; this counts as a wrong answer, and so do others, of which the log says nothing more"
    warn_once(logger, f"scorer {name}", problem, message, name, printable(which), printable(reason))
    return reason
