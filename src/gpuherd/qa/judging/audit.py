"""Can the labels of a judging be believed? Its yes-rate, its agreement with rules and other judges, and warnings.

Pure: verdicts in, counts with intervals and sentences out. Labels are only ``correct`` and ``incorrect``; what was not
attempted or could not be read is counted apart and takes no part in rates and agreement. Knows no files and no texts.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from gpuherd.qa.intervals import CONFIDENCE, Share
from gpuherd.qa.judging.files import BadJudging, JudgingMeta, Kind, judgings_of, judgments
from gpuherd.qa.judging.items import Item, items_of
from gpuherd.qa.judging.label_quality import (
    LABELS,
    Agreement,
    Counts,
    Judged,
    Warned,
    agreement,
    count,
    doubts,
    verdicts_of,
)
from gpuherd.qa.judging.label_quality import (
    Kind as DoubtKind,
)
from gpuherd.qa.judging.stage import judge_by_rule
from gpuherd.qa.judging.verdicts import Judgment, Verdict
from gpuherd.qa.numbers import mostly_numbers
from gpuherd.qa.runs import Run
from gpuherd.runs.console import track


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


# --- Audits of a run --------------------------------------------------------------------------------------------------
#
# Brings together what an audit compares: a judging, rules computed on the fly, and the run's other judgings.
#
# Reads files and applies rules; what follows from the verdicts is ``audit``'s, which knows no files.

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")

# Rules that need no library and no model, so that every judging can be held against them.
ALWAYS = (Kind.EXACT, Kind.CONTAINS, Kind.SQUAD, Kind.ROUGE)


@dataclass(frozen=True, slots=True)
class Audited:
    """An audit and what it is told with.

    Attributes:
        meta: the judging.
        audit: of it.
        answers: that were judged, by question id and name.
        reasons: why verdicts are unparsed: how many have a reason of one kind, and one such; the commonest first.
    """

    meta: JudgingMeta
    audit: Audit
    answers: Mapping[tuple[str, str], Item]
    reasons: tuple[tuple[int, str], ...]


def audits(
    run: Run, metas: Sequence[JudgingMeta] | None = None, console: Console | None = None, which: str | None = None
) -> list[Audited]:
    """The audit of each of these judgings against the rules and against all other judgings of the run.

    Judgings that are not asked for by name and are damaged, or of other answers than the run has, are logged and left
    out. ``metas`` None: of all judgings. ``which`` restricts it to the answers of that name (``greedy``,
    ``sample-0``); ``console`` shows how far it is, where it takes long. Raises BadJudging for one of these that can't
    be used.
    """
    there = _sound(run, set() if metas is None else {meta.name for meta in metas}, which)
    metas = [meta for meta, _ in there.values()] if metas is None else metas
    items, _ = items_of(run.answers(), "all" if any(meta.answers != "greedy" for meta in metas) else None)
    found: list[Audited] = []
    for meta in metas:
        _, judged = there[meta.name]
        keys = {(each.id, each.which) for each in judged.judgments}
        mine = {key: item for item in items if (key := (item.question.id, item.which)) in keys}
        others = [*_rules(list(mine.values()), meta, console), *_others(there, meta)]
        found.append(Audited(meta, _without_repeats(audit(judged, others), found), mine, reasons_of(judged.judgments)))
    return found


def _without_repeats(made: Audit, before: Sequence[Audited]) -> Audit:
    """The audit without warnings about two judges that an earlier audit already contains."""
    told = {each.text for audited in before for each in audited.audit.warnings if each.kind is DoubtKind.FLIPPED}
    return replace(made, warnings=tuple(each for each in made.warnings if each.text not in told))


def reasons_of(judged: Iterable[Judgment]) -> tuple[tuple[int, str], ...]:
    """Why verdicts are unparsed, the commonest reason first: how many have it, and the first of its kind. Reasons that
    differ in their numbers alone are of one kind."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for each in judged:
        if each.verdict is Verdict.UNPARSED and each.note is not None:
            kind = _NUMBER.sub("0", each.note)
            first.setdefault(kind, each.note)
            counts[kind] += 1
    return tuple((count, first[kind]) for kind, count in counts.most_common())


def _rules(items: Sequence[Item], meta: JudgingMeta, console: Console | None) -> list[Judged]:
    """What the rules say of the same answers; math too where its library is there and it is not just for words."""
    kinds = [kind for kind in ALWAYS if kind is not meta.kind]
    of_numbers = mostly_numbers(item.question for item in items)
    if meta.kind is not Kind.MATH and of_numbers and find_spec("math_verify") is not None:
        kinds.append(Kind.MATH)

    def shown(kind: Kind) -> Iterable[Item]:
        return items if console is None else track(console, items, f"auditing with {kind.value}")

    return [Judged(kind.value, kind.value, list(judge_by_rule(kind, shown(kind)))) for kind in kinds]


def _others(there: Mapping[str, tuple[JudgingMeta, Judged]], meta: JudgingMeta) -> list[Judged]:
    computed = {kind.value for kind in (*ALWAYS, Kind.MATH)}
    return [each for name, (_, each) in there.items() if name != meta.name and each.kind not in computed]


def _sound(run: Run, asked: Collection[str], which: str | None) -> dict[str, tuple[JudgingMeta, Judged]]:
    """All judgings of the run that can be used, by name. Raises BadJudging for one that is ``asked`` for and can't."""
    found = {}
    for meta in judgings_of(run.folder):
        try:
            if meta.answers_sha256 != run.answers_sha256:
                raise BadJudging(f"judging {meta.name} is of other answers than the run has; judge again")
            said = [each for each in judgments(run.folder, meta) if which is None or each.which == which]
            found[meta.name] = meta, Judged(meta.name, meta.kind.value, said)
        except BadJudging as problem:
            if meta.name in asked:
                raise
            logger.warning("left out: %s", problem)
    return found
