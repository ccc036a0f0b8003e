"""From verdicts to labels: right, wrong, or neither. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.qa.judging.label_quality import Counts, count
from gpuherd.qa.judging.verdicts import Judgment, Verdict

EXCLUDE, INCORRECT = "exclude", "incorrect"  # what is done with answers that are not attempted


@dataclass(frozen=True, slots=True)
class Labels:
    """One judging's labels of the answers that are evaluated.

    Attributes:
        wrong: of each question, in order: whether its answer is wrong; None where it has no label.
        counts: by verdict, of those that were judged.
        unjudged: questions without a judgment.
    """

    wrong: tuple[bool | None, ...]
    counts: Counts
    unjudged: int

    @property
    def right(self) -> int:
        """How many are right."""
        return sum(each is False for each in self.wrong)

    @property
    def wrong_ones(self) -> int:
        """How many are wrong."""
        return sum(each is True for each in self.wrong)

    @property
    def left_out(self) -> int:
        """How many have no label."""
        return sum(each is None for each in self.wrong)


def labels(ids: Sequence[str], judgments: Sequence[Judgment], which: str, not_attempted: str = EXCLUDE) -> Labels:
    """The labels of the answers named ``which`` to these questions.

    Args:
        not_attempted: ``exclude`` leaves such answers out; ``incorrect`` counts them as wrong. What could not be parsed
            has no label either way: nobody knows what the judge meant. Nor has a NaN, which is no answer.
    """
    meaning: dict[Verdict, bool | None] = {
        Verdict.CORRECT: False,
        Verdict.INCORRECT: True,
        Verdict.NOT_ATTEMPTED: True if not_attempted == INCORRECT else None,
        Verdict.UNPARSED: None,
        Verdict.NAN: None,
    }
    asked = set(ids)
    judged = {each.id: each for each in judgments if each.which == which and each.id in asked}
    return Labels(
        tuple(meaning[judged[name].verdict] if name in judged else None for name in ids),
        count(list(judged.values())),
        len(asked) - len(judged),
    )
