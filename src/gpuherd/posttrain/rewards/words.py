"""Answers that are right by their words: the rules of ``qa.grading.lexical``, as rewards."""

from __future__ import annotations

from collections.abc import Sequence

from gpuherd.errors import UsageError
from gpuherd.posttrain.types import Problem, Reward
from gpuherd.qa.grading.rules import RULES
from gpuherd.qa.grading.verdicts import Verdict
from gpuherd.qa.record import Question
from gpuherd.qa.span import answer_in


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
        """What each completion earns; an empty one nothing."""
        return [self._reward(*each) for each in zip(problems, completions, strict=True)]

    def close(self) -> None:
        """Nothing was started."""

    def _reward(self, problem: Problem, completion: str) -> Reward:
        ruling = self._rule(answer_in(completion), Question(problem.id, problem.prompt, problem.answers))
        right = ruling.verdict is Verdict.CORRECT
        return Reward(float(right) if ruling.score is None else ruling.score, right, note=ruling.note)
