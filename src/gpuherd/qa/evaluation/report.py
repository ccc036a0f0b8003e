"""An evaluation in words and tables for the terminal. Pure: lines of printable text; prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuherd.columns import Column
from gpuherd.errors import printable
from gpuherd.qa.evaluation.result import AurocDifference, ByJudge, EvaluateSettings, MeasureResult, RunEvaluation
from gpuherd.qa.intervals import FEWEST_OF_A_CLASS, Figure, Interval, Share

Row = tuple[str, ...]


def columns(against: str, *, first: str = "measure") -> tuple[Column, ...]:
    """The columns of the table of measures, ``against`` being what they are compared with."""
    return (
        Column(first, 0, least=24, middle=True),
        Column("AUROC", 1, right=True),
        Column("interval", 2),
        Column("AUPRC", 5, right=True),
        Column("PRR", 4, right=True),
        Column("AURAC", 7, right=True),
        Column("ECE", 8, right=True),
        Column(f"vs {printable(against)}", 3, right=True),
        Column("p (Holm)", 6, right=True),
        Column("answers", 9, right=True),
    )


def rows(judge: ByJudge, measures: Sequence[MeasureResult]) -> list[Row]:
    """A row a measure, the best AUROC first, those without one last."""
    differences = {each.name: each for each in judge.differences}
    in_order = sorted(measures, key=lambda each: (each.auroc.value is None, -(each.auroc.value or 0)))
    return [_row(each, differences.get(each.name)) for each in in_order]


def _row(each: MeasureResult, difference: AurocDifference | None) -> Row:
    return (
        printable(each.weighting or each.name),
        number(each.auroc.value),
        between(each.auroc.interval),
        number(each.auprc.value),
        number(each.prr.value),
        number(each.aurac.value),
        number(each.ece.value),
        "-" if difference is None else number(difference.auroc.value, sign=True),
        "-" if difference is None else p_value(difference.p_holm),
        str(each.scored),
    )


def heading(evaluation: RunEvaluation) -> list[str]:
    """The lines that name the run, the scoring and the rules of the evaluation."""
    settings = evaluation.settings
    end = "counts" if evaluation.eos == "include" else "doesn't count"
    kind = "BCa" if settings.interval == "bca" else "percentile"
    return [
        f"run {printable(evaluation.run_id)}, scoring {printable(evaluation.scoring)} (the end token {end})",
        f"{100 * settings.confidence:.6g}% intervals: {kind}, {settings.bootstrap} resamples of the questions, "
        f"seed {settings.seed}",
    ]


def labels(judge: ByJudge, settings: EvaluateSettings) -> list[str]:
    """Whose labels, how many, and what makes them doubtful."""
    wrong = Share(judge.wrong, judge.right + judge.wrong, settings.confidence)
    rate = ""
    if wrong.value is not None and wrong.interval is not None:
        rate = f", {wrong.value:.1%} wrong ({wrong.interval.low:.1%} to {wrong.interval.high:.1%})"
    lines = [
        f"judging {printable(judge.judging)}, {judge.which} answers: {judge.right} right, {judge.wrong} wrong{rate}; "
        f"{_without_label(judge, settings)}"
    ]
    return lines + [f"warning: {printable(each.text)}" for each in judge.warnings]


def _without_label(judge: ByJudge, settings: EvaluateSettings) -> str:
    """The answers that are left out, and why; those that count as wrong although no judge called them so."""
    counts, excluded = judge.counts, settings.not_attempted == "exclude"
    unjudged = judge.left_out - counts.unparsed - counts.nan - (counts.not_attempted if excluded else 0)
    why = [f"{counts.not_attempted} not attempted"] if excluded else []
    why += [f"{counts.unparsed} unparsed"]
    why += [f"{counts.nan} NaN"] if counts.nan else []
    why += [f"{unjudged} not judged"] if unjudged else []
    wrong = "" if excluded else f"{counts.not_attempted} of the wrong ones not attempted, "
    return f"{wrong}{judge.left_out} left out ({', '.join(why)})"


def notes(judge: ByJudge, against: str) -> Iterator[str]:
    """Notes to the table: few of a class, scores that are missing, what was not compared."""
    if not judge.measures:
        return
    if not judge.both_classes:
        yield "There is nothing to tell apart: no AUROC, and no table."
        return
    yield (
        f"By chance AUROC is 0.5, PRR 0, AURAC {number(judge.right / (judge.right + judge.wrong))} and AUPRC "
        f"{number(judge.wrong / (judge.right + judge.wrong))}, the shares of right and wrong answers."
    )
    yield from _few(judge)
    for (reason, count), names in _missing(judge).items():
        which = names[0] if len(names) == 1 else f"{len(names)} measures ({names[0]}, …)"
        yield f"{which}: {count} answers have no score and are left out: {printable(reason)}"
    dropped = max(each.auroc.dropped for each in judge.measures)
    if dropped:
        yield f"up to {dropped} resamples had one class only and were left out"
    if not judge.differences and len(judge.measures) > 1:
        yield f"nothing is compared: the scoring has no {printable(against)}; --against names another measure"
    if len(judge.weightings) > 1:
        yield (
            f"The best of {len(judge.weightings)} weightings is chosen after looking: its AUROC flatters it, and "
            "p (Holm) is what remains."
        )


def _few(judge: ByJudge) -> Iterator[str]:
    """Where no conclusion is possible: by the labels, or for measures that too few answers have a score of."""
    few = [each for each in judge.measures if not each.conclusive]
    if not few:
        return
    fewest = min(judge.right, judge.wrong)
    nothing = f"Nothing can be concluded where a class has fewer than {FEWEST_OF_A_CLASS} answers; "
    if fewest < FEWEST_OF_A_CLASS:
        yield f"{nothing}here it is {fewest}. The intervals say how little the figures mean."
        return
    with_fewest = min(few, key=lambda each: min(each.right, each.wrong))
    which = f"so few have a score by {len(few)} measures, fewest by " if len(few) > 1 else "so few have a score by "
    name = printable(with_fewest.name)
    yield f"{nothing}{which}{name}: {with_fewest.right} right and {with_fewest.wrong} wrong ones."


def by_judging(judges: Sequence[ByJudge]) -> tuple[tuple[Column, ...], list[Row]] | None:
    """AUROC of every measure under every judging, side by side: do conclusions depend on who judged? None where
    fewer than two have both classes."""
    both = [judge for judge in judges if judge.both_classes]
    if len(both) < 2:
        return None
    found = [{each.name: each.auroc.value for each in judge.measures} for judge in both]
    names = sorted(found[0], key=lambda name: (found[0][name] is None, -(found[0][name] or 0)))
    heads = [Column(printable(judge.judging), rank, right=True) for rank, judge in enumerate(both, start=1)]
    table = [(printable(name), *(number(each[name]) for each in found)) for name in names]
    return (Column("AUROC", 0, least=24, middle=True), *heads), table


def _missing(judge: ByJudge) -> dict[tuple[str, int], list[str]]:
    """The measures that lack scores, by the reason and the number of answers."""
    found: dict[tuple[str, int], list[str]] = {}
    for each in judge.measures:
        for reason, count in each.undefined.items():
            found.setdefault((reason, count), []).append(printable(each.name))
    return found


def by_prefix(judge: ByJudge) -> str | None:
    """AUROC by the number of first tokens, as one line; None where there is none."""
    parts = [
        f"{each.length}: {number(each.nll.value)} ({between(each.nll.interval)})"
        for before, each in zip((None, *judge.prefixes), judge.prefixes, strict=False)
        # Behind the first prefix that every answer is shorter than there is nothing new.
        if each.nll.value is not None and (before is None or before.shorter < before.answers)
    ]
    return f"AUROC of the NLL of the first tokens: {', '.join(parts)}" if parts else None


def accuracy(judge: ByJudge, name: str) -> str | None:
    """Accuracy of the least uncertain answers by one measure, as a line; None where it has none."""
    found = next((each for each in judge.measures if each.name == name), None)
    if found is None or not found.at:
        return None
    parts = [
        f"{at.coverage:.0%} kept {at.accuracy.value:.1%}{_within(at.accuracy)}"
        for at in found.at
        if at.accuracy.value is not None
    ]
    return f"accuracy by {printable(name)}: {', '.join(parts)}" if parts else None


def _within(figure: Figure) -> str:
    interval = figure.interval
    return "" if interval is None else f" ({interval.low:.1%} to {interval.high:.1%})"


def number(value: float | None, *, sign: bool = False) -> str:
    """Three digits behind the point; a dash for what there is not."""
    return "-" if value is None else f"{value:+.3f}" if sign else f"{value:.3f}"


def between(interval: Interval | None) -> str:
    """An interval as two numbers."""
    return "-" if interval is None else f"{interval.low:.3f} to {interval.high:.3f}"


def p_value(p: float | None) -> str:
    """A p value; very small ones are all alike."""
    return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"
