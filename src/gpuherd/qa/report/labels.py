"""The view of the labels of a run of answers, declared: what each judge said, and where judges differ. Pure."""

from __future__ import annotations

from gpuherd.qa.grading.audit import Audit, Disagreement
from gpuherd.qa.grading.label_quality import Agreement
from gpuherd.qa.grading.verdicts import Verdict
from gpuherd.qa.intervals import Interval
from gpuherd.qa.report.answers import VERDICT_WORDS, VERDICTS
from gpuherd.qa.report.reading import ReportedRun
from gpuherd.report.nodes import (
    NONE,
    Column,
    Node,
    card,
    cell,
    definitions,
    element,
    ends_words,
    fixed,
    is_known,
    link,
    note,
    percent,
    shares,
    table,
)

MOST_DISAGREEMENTS = 500  # of a judging; the command lists all


def labels_view(run: ReportedRun, held: int) -> list[Node]:
    """A card for each judging; ``held``: how many answers the page has texts of."""
    if not run.audits:
        return [card("Not judged", element("p", "gpuherd judge labels the answers."))]
    return [_audit_card(run, each, held) for each in run.audits]


def _pill(code: int) -> Node:
    return element("span", VERDICT_WORDS[code], kind=f"pill v{code}")


def _audit_card(run: ReportedRun, audit: Audit, held: int) -> Node:
    judged = next((each for each in run.judgings if each.meta.name == audit.name), None)
    counts = [getattr(audit.counts, verdict.value) for verdict in VERDICTS]
    rate, ends = audit.yes_rate, audit.yes_rate.interval
    share = f", {percent(rate.value)}" if is_known(rate.value) else ""
    share += f" [{percent(ends.low)}, {percent(ends.high)}]" if ends and share else ""
    words = ", ".join(f"{count} {VERDICT_WORDS[code]}" for code, count in enumerate(counts))
    keys = [element("span", _pill(code), f"{count:,}", kind="key") for code, count in enumerate(counts)]
    lonely = "There is no other judging to compare it with; gpuherd judge RUN exact makes one in a second."
    return card(
        audit.name,
        *(element("p", each.text, kind="warn") for each in audit.warnings),
        shares(counts, words),
        element("div", *keys, kind="legend"),
        element("p", f"Correct: {rate.count} of {rate.of} with a label{share}."),
        definitions([] if judged is None else _about(judged.meta), "How it judged"),
        _agreements(audit) if audit.agreements else note(lonely, "soft"),
        _disagreements(run, audit, held) if audit.disagreements else None,
    )


def _about(meta: object) -> list[tuple[str, Node]]:
    names = ("kind", "model", "threshold", "answers", "prompt_sha256", "made")
    about = {name.replace("_", " "): getattr(meta, name) for name in names} | dict(getattr(meta, "settings", {}))
    return [(name, str(getattr(value, "value", value))) for name, value in about.items() if value is not None]


def _agreements(audit: Audit) -> Node:
    columns = [
        Column("other", kind="name"),
        Column("agree", "share of the answers that both label", "num"),
        Column("kappa", "agreement beyond chance, by Cohen", "num"),
        Column("both correct", kind="num rare", format="text"),
        Column("only this", kind="num", format="text"),
        Column("only the other", kind="num", format="text"),
        Column("both incorrect", kind="num rare", format="text"),
        Column("p", "McNemar's exact test of equal yes-rates", "num rare", "figure"),
    ]
    return table(f"agreement of {audit.name}", columns, [_agreement(each) for each in audit.agreements])


def _agreement(found: Agreement) -> list[Node]:
    return [
        [found.other, _line(found.other, 60)],
        _with_ends(found.agreed.value, found.agreed.interval, None),
        _with_ends(found.kappa.value, found.kappa.interval, found.kappa.reason),
        found.both_correct,
        found.only_this,
        found.only_other,
        found.both_incorrect,
        found.mcnemar_p,
    ]


def _with_ends(value: float | None, found: Interval | None, why: str | None) -> Node:
    if not is_known(value):
        return cell(None, element("span", why, kind="ends why") if why else NONE)
    return cell(value, fixed(value), found and ends_words((found.low, found.high)))


def _line(text: str, most: int) -> Node:
    """One line of a text."""
    return element("bdi", " ".join(text[:most].split()) + ("…" if len(text) > most else ""), dir="auto")


def _disagreements(run: ReportedRun, audit: Audit, held: int) -> Node:
    numbers = {each.question.id: number for number, each in enumerate(run.answers)}
    listed = [e for e in audit.disagreements[:MOST_DISAGREEMENTS] if numbers.get(e.id, held) < held]
    columns = [
        Column("answer", kind="num"),
        Column("question", kind="rare", sorts=False),
        Column("this", sorts=False),
        Column("p(correct)", kind="num rare", format="figure"),
        Column("others", sorts=False),
    ]
    rows = [_disagreement(run, each, numbers[each.id]) for each in listed]
    count = len(audit.disagreements)
    title = f"{count:,} disagreements, the most telling first" + (f"; {len(rows)} listed" if len(rows) < count else "")
    found = table("disagreements", columns, rows, page=20, name=f"disagreements of {audit.name}")
    return element("div", element("h3", title), found)


def _disagreement(run: ReportedRun, found: Disagreement, number: int) -> list[Node]:
    by_verdict: dict[Verdict, list[str]] = {}
    for name, verdict in found.others:
        by_verdict.setdefault(verdict, []).append(name)
    others = [
        element("span", _pill(code), " ", _line(", ".join(by_verdict[verdict]), 200))
        for code, verdict in enumerate(VERDICTS)
        if verdict in by_verdict
    ]
    sample = f" {found.which}" if found.which.startswith("sample") and found.which != "sample-0" else ""
    return [
        cell(number, link(f"#/answers/{number}", f"{number + 1}{sample}")),
        cell(None, _line(run.answers[number].question.question, 70)),
        cell(None, _pill(VERDICTS.index(found.verdict))),
        found.p_correct,
        cell(None, element("span", *others, kind="legend")),
    ]
