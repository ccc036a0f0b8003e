"""A judging and its audit as lines for a terminal. Pure; every text of a stranger is made printable here."""

from __future__ import annotations

from collections.abc import Mapping

from gpuherd.columns import Column, fitted
from gpuherd.errors import ExitCode, printable
from gpuherd.qa.intervals import Interval, Share
from gpuherd.qa.judging.audit import Audited, Disagreement
from gpuherd.qa.judging.config import Judge
from gpuherd.qa.judging.files import JudgingMeta
from gpuherd.qa.judging.items import Item
from gpuherd.qa.judging.judging import Planned
from gpuherd.qa.judging.label_quality import Agreement
from gpuherd.qa.judging.stage import JudgingOutcome
from gpuherd.qa.judging.verdicts import Verdict
from gpuherd.qa.runs import Run

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


def plan_lines(judge: Judge, planned: Planned) -> list[str]:
    """What a judging would do."""
    lines = [f"{planned.count} answers ({planned.answers}) by {printable(judge.said)}"]
    if planned.longest is not None:
        what = "requests" if judge.url is not None else "cases"
        lines.append(f"{planned.cases} different {what}, the longest of about {planned.longest} tokens")
    if planned.asks is not None:
        lines.append(f"{_counted(planned.jobs, 'job')}; each: {printable(planned.asks)}")
    engine = [] if planned.outlook is None else planned.outlook.lines
    return [*lines, *map(printable, engine), "nothing was started"]


def made_lines(run: Run, made: JudgingOutcome) -> list[str]:
    """How a judging ended."""
    if made.meta is None:
        lines = [f"failed  {printable(job)}: {printable(reason)}" for job, reason in made.failures]
        if made.exit_code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED) or not lines:
            lines.append("stopped: the same command goes on from here")
        return lines
    there = ", as it was there already" if made.already else ""
    return [f"{made.meta.name}{there}: {run.folder.judging(made.meta.name)}"]


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
        lines.append(f"correct: {_share(audit.yes_rate)} of {audit.yes_rate.of} with a label")
    compared = [each for each in audit.agreements if each.labelled]
    if compared:
        lines += ["", *fitted(_AGREEMENT, [_agreement(each) for each in compared], width).lines]
        lines += ["correct: by this judge and by the other; this/other: by this or the other alone"]
        lines += [f"kappa with {each.other}: none, {each.kappa.reason}" for each in compared if each.kappa.reason]
    if audit.disagreements:
        shown = audit.disagreements[:MOST_SHOWN]
        rest = "" if len(shown) == len(audit.disagreements) else f" (the {len(shown)} most telling; --json has all)"
        lines += ["", f"{_counted(len(audit.disagreements), 'answer')} judged otherwise by others{rest}:"]
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


def _disagreement(each: Disagreement, answers: Mapping[tuple[str, str], Item]) -> tuple[str, ...]:
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


def _share(share: Share) -> str:
    return "-" if share.value is None else f"{share.value:.1%} (95%: {_percent(share.interval)})"


def _percent(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.low:.1%} to {interval.high:.1%}"


def _short(text: str) -> str:
    plain = printable(" ".join(text.split()))
    return plain if len(plain) <= LONGEST_TEXT else f"{plain[: LONGEST_TEXT - 1]}…"


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
