"""A judging beside another: counts by verdict, the two-by-two table of labels, agreement and Cohen's kappa.

Pure. Labels are only ``correct`` and ``incorrect``; the other verdicts are counted and take no part in agreement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.qa.intervals import CONFIDENCE, Kappa, Share, cohen_kappa, mcnemar_p
from gpuherd.qa.judging.verdict import Judgment, Verdict

RULES = frozenset({"exact", "contains", "squad", "rouge", "math"})  # judges that compare letters or numbers
LABELS = frozenset({Verdict.CORRECT, Verdict.INCORRECT})


@dataclass(frozen=True, slots=True)
class Judged:
    """A judging: its name, the kind of judge (exact, contains, squad, rouge, math, model, url), and its verdicts."""

    name: str
    kind: str
    judgments: Sequence[Judgment]

    @property
    def by_rule(self) -> bool:
        """Whether no model decided."""
        return self.kind in RULES


@dataclass(frozen=True, slots=True)
class Counts:
    """Answers by verdict."""

    correct: int = 0
    incorrect: int = 0
    not_attempted: int = 0
    unparsed: int = 0
    nan: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.correct + self.incorrect + self.not_attempted + self.unparsed + self.nan

    @property
    def labelled(self) -> int:
        """Those that are correct or incorrect."""
        return self.correct + self.incorrect


@dataclass(frozen=True, slots=True)
class Agreement:
    """A judging beside another, over the answers that both call correct or incorrect.

    Attributes:
        other: the other's name.
        by_rule: whether the other compares letters or numbers.
        both_correct, only_this, only_other, both_incorrect: the two-by-two table.
        left_out: answers that both have judged, but not both with a label.
        agreed: the share on which they agree.
        kappa: that, corrected for chance.
        mcnemar_p: exact p of equal yes-rates; None where they part nowhere.
    """

    other: str
    by_rule: bool
    both_correct: int
    only_this: int
    only_other: int
    both_incorrect: int
    left_out: int
    agreed: Share
    kappa: Kappa
    mcnemar_p: float | None

    @property
    def labelled(self) -> int:
        """Answers in the table."""
        return self.both_correct + self.only_this + self.only_other + self.both_incorrect

    @property
    def rates(self) -> tuple[float, float] | None:
        """The yes-rates of this and of the other over these answers."""
        n = self.labelled
        return None if n == 0 else ((self.both_correct + self.only_this) / n, (self.both_correct + self.only_other) / n)


def count(judgments: Sequence[Judgment]) -> Counts:
    """How many there are of each verdict."""
    found = Counter(each.verdict for each in judgments)
    return Counts(**{verdict.value: found[verdict] for verdict in Verdict})


def verdicts_of(judged: Judged) -> dict[tuple[str, str], Verdict]:
    """Verdicts by answer, (id, which)."""
    return {(each.id, each.which): each.verdict for each in judged.judgments}


def agreement(judged: Judged, other: Judged, confidence: float = CONFIDENCE) -> Agreement:
    """The two over the answers that both have judged; each (id, which) counts once."""
    theirs = verdicts_of(other)
    pairs = [(verdict, theirs[key]) for key, verdict in verdicts_of(judged).items() if key in theirs]
    table = Counter(pair for pair in pairs if LABELS.issuperset(pair))
    cells = [table[(mine, said)] for mine in (Verdict.CORRECT, Verdict.INCORRECT) for said in (mine, _not(mine))]
    both_correct, only_this, both_incorrect, only_other = cells
    return Agreement(
        other=other.name,
        by_rule=other.by_rule,
        both_correct=both_correct,
        only_this=only_this,
        only_other=only_other,
        both_incorrect=both_incorrect,
        left_out=len(pairs) - table.total(),
        agreed=Share(both_correct + both_incorrect, table.total(), confidence),
        kappa=_named(cohen_kappa(both_correct, only_this, only_other, both_incorrect, confidence), judged, other),
        mcnemar_p=mcnemar_p(only_this, only_other),
    )


def _not(verdict: Verdict) -> Verdict:
    return Verdict.INCORRECT if verdict is Verdict.CORRECT else Verdict.CORRECT


def _named(kappa: Kappa, judged: Judged, other: Judged) -> Kappa:
    """The reason with the judges' names in place of "one" and "the other"."""
    if kappa.reason is None:
        return kappa
    for word, name in (("the other calls", other.name), ("one calls", judged.name)):
        if kappa.reason.startswith(word):
            return Kappa(None, reason=f"{name} calls{kappa.reason.removeprefix(word)}")
    return kappa
