"""Brings together what an audit compares: a judging, rules computed on the fly, and the run's other judgings.

Reads files and applies rules; what follows from the verdicts is ``audit``'s, which knows no files.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from rich.console import Console

from gpuherd.qa.judging.agreement import Judged
from gpuherd.qa.judging.audit import Audit, audit
from gpuherd.qa.judging.doubts import Kind as DoubtKind
from gpuherd.qa.judging.files import judgings_of, judgments
from gpuherd.qa.judging.items import Item, items_of
from gpuherd.qa.judging.meta import BadJudging, JudgingMeta, Kind
from gpuherd.qa.judging.rules import judge_by_rule
from gpuherd.qa.judging.verdict import Judgment, Verdict
from gpuherd.qa.numbers import mostly_numbers
from gpuherd.qa.runs import Run
from gpuherd.runs.console import track

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
