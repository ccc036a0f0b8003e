"""Can the labels of a judging be believed? Its yes-rate, its agreement with rules and other judges, and warnings.

Pure: verdicts in, counts with intervals and sentences out. Labels are only ``correct`` and ``incorrect``; what was not
attempted or could not be read is counted apart and takes no part in rates and agreement. Knows no files and no texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpuherd.qa.intervals import CONFIDENCE, Share
from gpuherd.qa.judging.agreement import LABELS, Agreement, Counts, Judged, agreement, count, verdicts_of
from gpuherd.qa.judging.doubts import Warned, doubts
from gpuherd.qa.judging.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Disagreement:
    """An answer on which others don't say what this judging says.

    Attributes:
        id, which: the answer.
        verdict: this judging's.
        p_correct: its probability, where it gives one.
        others: what each other says, by name, those that agree too.
    """

    id: str
    which: str
    verdict: Verdict
    p_correct: float | None
    others: tuple[tuple[str, Verdict], ...]


@dataclass(frozen=True, slots=True)
class Audit:
    """What is to be known of a judging before anything is concluded from it.

    Attributes:
        name: of the judging.
        counts: answers by verdict.
        yes_rate: correct ones among those with a label.
        agreements: with rules first, then with other judges, as they were given.
        disagreements: all of them, the most telling first.
        warnings: the gravest first; none is not a proof of quality.
    """

    name: str
    counts: Counts
    yes_rate: Share
    agreements: tuple[Agreement, ...]
    disagreements: tuple[Disagreement, ...]
    warnings: tuple[Warned, ...]

    def as_dict(self) -> dict[str, Any]:
        """As JSON values, shares with their values and intervals."""
        return asdict(self) | {
            "yes_rate": _share_values(self.yes_rate),
            "agreements": [asdict(each) | {"agreed": _share_values(each.agreed)} for each in self.agreements],
            "disagreements": [asdict(each) | {"others": dict(each.others)} for each in self.disagreements],
        }


def audit(judged: Judged, others: Sequence[Judged], confidence: float = CONFIDENCE) -> Audit:
    """The audit of a judging against other judgings of the same run.

    Args:
        judged: the judging in question; each (id, which) at most once.
        others: rules and other judges, over the same answers or some of them.
        confidence: of all intervals.
    """
    counts = count(judged.judgments)
    in_order = sorted(others, key=lambda other: not other.by_rule)  # stable
    agreements = tuple(agreement(judged, other, confidence) for other in in_order)
    return Audit(
        name=judged.name,
        counts=counts,
        yes_rate=Share(counts.correct, counts.labelled, confidence),
        agreements=agreements,
        disagreements=_disagreements(judged, in_order),
        warnings=tuple(doubts(judged, counts, agreements, in_order, confidence)),
    )


def _disagreements(judged: Judged, others: Sequence[Judged]) -> tuple[Disagreement, ...]:
    """The most telling first: called incorrect although the letters are those of a reference, which hardly any right
    judge does; then by how many contradict, then by how sure the judge was."""
    theirs = [(other, verdicts_of(other)) for other in others]
    found: list[tuple[tuple[bool, float, float, int], Disagreement]] = []
    for place, mine in enumerate(judged.judgments):
        said = [(other, verdicts.get((mine.id, mine.which))) for other, verdicts in theirs]
        labels = [(other, verdict) for other, verdict in said if verdict in LABELS]
        against = [other for other, verdict in labels if verdict is not mine.verdict]
        if mine.verdict not in LABELS or not against:
            continue
        literal = mine.verdict is Verdict.INCORRECT and any(other.kind == "exact" for other in against)
        sure = 0.0 if mine.p_correct is None else abs(mine.p_correct - 0.5)
        row = Disagreement(
            mine.id,
            mine.which,
            mine.verdict,
            mine.p_correct,
            tuple((other.name, verdict) for other, verdict in said if verdict is not None),
        )
        found.append(((not literal, -len(against) / len(labels), -sure, place), row))
    return tuple(row for _, row in sorted(found, key=lambda each: each[0]))


def _share_values(share: Share) -> dict[str, Any]:
    interval = share.interval
    return {
        "count": share.count,
        "of": share.of,
        "value": share.value,
        "interval": None if interval is None else asdict(interval),
    }
