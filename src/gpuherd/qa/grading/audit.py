"""The audit of a judging: its yes-rate, its agreement with rules and other judges, warnings; as lines for a terminal.

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

from gpuherd.columns import Column, fitted
from gpuherd.errors import printable
from gpuherd.qa.grading.files import BadJudging, JudgeKind, JudgingMeta, judgings_of, judgments
from gpuherd.qa.grading.label_quality import (
    LABELS,
    Agreement,
    JudgeVerdicts,
    LabelWarning,
    VerdictCounts,
    agreement,
    count,
    label_warnings,
    verdicts_of,
)
from gpuherd.qa.grading.label_quality import WarningKind as DoubtKind
from gpuherd.qa.grading.stage import GradingItem, items_of, judge_by_rule
from gpuherd.qa.grading.verdicts import Judgment, Verdict
from gpuherd.qa.intervals import CONFIDENCE, Interval, Share
from gpuherd.qa.numbers import mostly_numbers
from gpuherd.qa.runs import Run
from gpuherd.runs.console import track
from gpuherd.units import counted


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
    """The quality of a judging's labels, to be read before anything is concluded from them.

    Attributes:
        name: of the judging.
        counts: answers by verdict.
        yes_rate: correct ones among those with a label.
        agreements: with rules first, then with other judges, as they were given.
        disagreements: all of them, the most telling first.
        warnings: the gravest first; none is not a proof of quality.
    """

    name: str
    counts: VerdictCounts
    yes_rate: Share
    agreements: tuple[Agreement, ...]
    disagreements: tuple[Disagreement, ...]
    warnings: tuple[LabelWarning, ...]

    def as_dict(self) -> dict[str, Any]:
        """As JSON values, shares with their values and intervals."""
        return asdict(self) | {
            "yes_rate": _share_values(self.yes_rate),
            "agreements": [asdict(each) | {"agreed": _share_values(each.agreed)} for each in self.agreements],
            "disagreements": [asdict(each) | {"others": dict(each.others)} for each in self.disagreements],
        }


def audit(judged: JudgeVerdicts, others: Sequence[JudgeVerdicts], confidence: float = CONFIDENCE) -> Audit:
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
        warnings=tuple(label_warnings(judged, counts, agreements, in_order, confidence)),
    )


def _disagreements(judged: JudgeVerdicts, others: Sequence[JudgeVerdicts]) -> tuple[Disagreement, ...]:
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
ALWAYS = (JudgeKind.EXACT, JudgeKind.CONTAINS, JudgeKind.SQUAD, JudgeKind.ROUGE)


@dataclass(frozen=True, slots=True)
class Audited:
    """An audit, with what its lines are made of.

    Attributes:
        meta: the judging, and ``judged`` its verdicts.
        audit: of it.
        answers: that were judged, by question id and name.
        reasons: why verdicts are unparsed: how many have a reason of one kind, and one such; the commonest first.
    """

    meta: JudgingMeta
    judged: JudgeVerdicts
    audit: Audit
    answers: Mapping[tuple[str, str], GradingItem]
    reasons: tuple[tuple[int, str], ...]


def audits(
    run: Run, metas: Sequence[JudgingMeta] | None = None, console: Console | None = None, which: str | None = None
) -> list[Audited]:
    """The audit of each of these judgings against the rules and against all other judgings of the run.

    Args:
        metas: judgings that are requested by name; None: all. Others that are damaged or of other answers are logged
            and left out.
        console: shows progress where it takes long.
        which: only the answers of this name (``greedy``, ``sample-0``).

    Raises BadJudging for one that is requested and can't be used.
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
        whole = _without_repeats(audit(judged, others), found)
        found.append(Audited(meta, judged, whole, mine, reasons_of(judged.judgments)))
    return found


def _without_repeats(audit: Audit, before: Sequence[Audited]) -> Audit:
    """The audit without warnings about two judges that an earlier audit already contains."""
    repeated = {each.text for audited in before for each in audited.audit.warnings if each.kind is DoubtKind.FLIPPED}
    return replace(audit, warnings=tuple(each for each in audit.warnings if each.text not in repeated))


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


def _rules(items: Sequence[GradingItem], meta: JudgingMeta, console: Console | None) -> list[JudgeVerdicts]:
    """The verdicts of the rules on the same answers; of math if its library is there and references are numbers."""
    kinds = [kind for kind in ALWAYS if kind is not meta.kind]
    of_numbers = mostly_numbers(item.question for item in items)
    if meta.kind is not JudgeKind.MATH and of_numbers and find_spec("math_verify") is not None:
        kinds.append(JudgeKind.MATH)

    def tracked(kind: JudgeKind) -> Iterable[GradingItem]:
        return items if console is None else track(console, items, f"auditing with {kind.value}")

    return [JudgeVerdicts(kind.value, kind.value, list(judge_by_rule(kind, tracked(kind)))) for kind in kinds]


def _others(there: Mapping[str, tuple[JudgingMeta, JudgeVerdicts]], meta: JudgingMeta) -> list[JudgeVerdicts]:
    computed = {kind.value for kind in (*ALWAYS, JudgeKind.MATH)}
    return [each for name, (_, each) in there.items() if name != meta.name and each.kind not in computed]


def _sound(run: Run, requested: Collection[str], which: str | None) -> dict[str, tuple[JudgingMeta, JudgeVerdicts]]:
    """All judgings of the run that can be used, by name. Raises BadJudging for one that is ``requested`` and can't be
    used."""
    found = {}
    for meta in judgings_of(run.folder):
        try:
            if meta.answers_sha256 != run.answers_sha256:
                raise BadJudging(f"judging {meta.name} is of other answers than the run has; judge again")
            said = [each for each in judgments(run.folder, meta) if which is None or each.which == which]
            found[meta.name] = meta, JudgeVerdicts(meta.name, meta.kind.value, said)
        except BadJudging as problem:
            if meta.name in requested:
                raise
            logger.warning("left out: %s", problem)
    return found


# A judging and its audit as lines for a terminal. Pure; every text of a stranger is made printable here.

MOST_REASONS = 3
MOST_SHOWN = 8  # disagreements; --json has all
LONGEST_TEXT = 60

_AGREEMENT = (
    Column("with", 0, least=12, middle=True),
    Column("answers", 3, right=True),
    Column("agreed", 2, right=True),
    Column("95% interval", 4, right=True),
    Column("correct", 6, right=True),
    Column("kappa", 1, right=True),
    Column("95% interval", 3, right=True),
    Column("this/other", 5, right=True),
)
_DISAGREEMENT = (
    Column("question", 0, least=8, middle=True),
    Column("answer", 1, least=16),
    Column("reference", 2, least=12),
    Column("this", 1),
    Column("P", 3, right=True),
    Column("others", 4, least=16),
)


def audit_lines(audited: Audited, width: int | None) -> list[str]:
    """The audit of a judging: warnings first, then counts, agreement, and the most telling disagreements.

    ``width``: cells of a line, None for any number.
    """
    meta, audit = audited.meta, audited.audit
    lines = [f"{audit.name} on {audit.counts.total} answers ({meta.answers}){_by(meta)}"]
    lines += [f"WARNING {printable(each.text)}" for each in audit.warnings]
    lines.append(
        f"{audit.counts.correct} correct, {audit.counts.incorrect} incorrect, {audit.counts.not_attempted} not "
        f"attempted, {audit.counts.unparsed} unparsed" + (f", {audit.counts.nan} NaN" if audit.counts.nan else "")
    )
    lines += [f"unparsed: {count} like '{_short(note)}'" for count, note in audited.reasons[:MOST_REASONS]]
    if audit.yes_rate.of:
        lines.append(f"correct: {_rate(audit.yes_rate)} of {audit.yes_rate.of} with a label")
    compared = [each for each in audit.agreements if each.labelled]
    if compared:
        lines += ["", *fitted(_AGREEMENT, [_agreement(each) for each in compared], width).lines]
        lines += ["correct: by this judge and by the other; this/other: by this or the other alone"]
        lines += [f"kappa with {each.other}: none, {each.kappa.reason}" for each in compared if each.kappa.reason]
    if audit.disagreements:
        shown = audit.disagreements[:MOST_SHOWN]
        rest = "" if len(shown) == len(audit.disagreements) else f" (the {len(shown)} most telling; --json has all)"
        lines += ["", f"{counted(len(audit.disagreements), 'answer')} judged otherwise by others{rest}:"]
        lines += fitted(_DISAGREEMENT, [_disagreement(each, audited.answers) for each in shown], width).lines
    return [*lines, ""]


def _by(meta: JudgingMeta) -> str:
    parts = []
    if meta.model is not None:
        parts.append(f"by {printable(meta.model)}")
    if meta.threshold is not None:
        parts.append(f"correct from {meta.threshold:g}")
    return f", {', '.join(parts)}" if parts else ""


def _agreement(each: Agreement) -> tuple[str, ...]:
    kappa = each.kappa
    return (
        printable(each.other),
        str(each.labelled),
        "-" if each.agreed.value is None else f"{each.agreed.value:.1%}",
        _percent(each.agreed.interval),
        "-" if each.rates is None else f"{each.rates[0]:.1%}/{each.rates[1]:.1%}",
        "-" if kappa.value is None else f"{kappa.value:.2f}",
        "-" if kappa.interval is None else f"{kappa.interval.low:.2f} to {kappa.interval.high:.2f}",
        f"{each.only_this}/{each.only_other}",
    )


def _disagreement(each: Disagreement, answers: Mapping[tuple[str, str], GradingItem]) -> tuple[str, ...]:
    item = answers.get((each.id, each.which))
    name = each.id if each.which == "greedy" else f"{each.id} {each.which}"
    against = [other for other, verdict in each.others if verdict is not each.verdict]
    return (
        _short(name),
        "" if item is None else _short(item.text),
        "" if item is None else _short(item.question.answers[0]),
        _word(each.verdict),
        "" if each.p_correct is None else f"{each.p_correct:.2f}",
        "against " + ", ".join(printable(other) for other in against),
    )


def _word(verdict: Verdict) -> str:
    return verdict.value.replace("_", " ")


def _rate(share: Share) -> str:
    return "-" if share.value is None else f"{share.value:.1%} (95%: {_percent(share.interval)})"


def _percent(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.low:.1%} to {interval.high:.1%}"


def _short(text: str) -> str:
    plain = printable(" ".join(text.split()))
    return plain if len(plain) <= LONGEST_TEXT else f"{plain[: LONGEST_TEXT - 1]}…"
