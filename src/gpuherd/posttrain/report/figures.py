"""Policies and their figures as the page calls them: names, order, meanings, digits, the look of each method, and what
their differences say, in sentences and as a table. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from gpuherd.posttrain.eval.compare import Difference, DifferenceAtKL
from gpuherd.posttrain.eval.results import REFERENCE
from gpuherd.posttrain.eval.summary import divergence
from gpuherd.posttrain.eval.tables import Comparison, Row, grouped
from gpuherd.qa.intervals import Figure, Interval
from gpuherd.report.charts import Stroke, stroke
from gpuherd.report.nodes import (
    NONE,
    Column,
    Ends,
    Node,
    axis,
    card,
    cell,
    counted,
    element,
    ends_words,
    fixed,
    interval,
    is_known,
    key,
    listed,
    note,
    share_spread,
    spread,
    table,
)

if TYPE_CHECKING:
    from gpuherd.posttrain.report.reading import RunReport

DIVERGENCES = ("kl", "kl a token")
_CLEAR = 0.05  # a corrected p below it is beyond chance
_USUAL = ("pass@1", "first", "reward", "kl", "kl a token", "tokens", "finished")
_TITLES = {"kl": "KL, nats", "kl a token": "KL a token, nats"}
_MEANINGS = {
    "pass@1": "share of right completions, all samples of a problem counted",
    "first": "share of problems whose first sample is right",
    "reward": "mean reward of a completion",
    "kl": "KL(policy || reference) of a whole completion, in nats",
    "kl a token": "the same for each token",
    "tokens": "mean length of a completion, its end token counted",
    "finished": "share of completions that the policy ended by itself",
}
Compared = Difference | DifferenceAtKL


def title_of(name: str) -> str:
    """A figure as headings and axes call it, with its unit."""
    return _TITLES.get(name, name)


def meaning(name: str) -> str:
    """What a figure is, in a line; nothing for one that is not known."""
    if name.startswith("pass@") and name not in _MEANINGS:
        return f"chance that at least one of {name[5:]} completions is right, estimated without bias"
    if name.startswith("maj@"):
        return f"is the answer with the most votes of {name[4:]} right?"
    return _MEANINGS.get(name, "")


def figure_names(rows: Iterable[Row]) -> list[str]:
    """The names of figures that rows have, the usual ones first."""

    def place(name: str) -> tuple[float, list[tuple[int, str]]]:
        return (_USUAL.index(name) if name in _USUAL else 2.5), natural(name)

    return sorted({name for row in rows for name in row.figures}, key=place)


def natural(word: str) -> list[tuple[int, str]]:
    """Sorts numbers in words by their size.

    >>> sorted(["pass@16", "pass@4"], key=natural)
    ['pass@4', 'pass@16']
    """
    return [(int(each), "") if each.isdigit() else (-1, each.lower()) for each in re.split(r"([0-9]+)", word)]


def main_names(rows: Sequence[Row]) -> list[str]:
    """The figures that say most, which are shown where not all are wanted; of pass@k and maj@k the largest k."""
    names = figure_names(rows)
    largest = {name for start in ("maj@", "pass@") for name in [n for n in names if n.startswith(start)][-1:]}
    same = all(
        value_of(row, "pass@1") is not None and value_of(row, "reward") == value_of(row, "pass@1") for row in rows
    )
    wanted = {"pass@1", "kl", *largest} | (set() if same else {"reward"})
    return [name for name in names if name in wanted]


def is_share(name: str) -> bool:
    """Whether the figure is between 0 and 1."""
    return name.startswith(("pass@", "maj@")) or name in ("first", "finished")


def figure_of(row: Row, name: str) -> Figure:
    """A figure of a row; a divergence that is rounding is 0."""
    found = row.figures.get(name, Figure(None))
    return divergence(found) if name in DIVERGENCES else found


def value_of(row: Row, name: str) -> float | None:
    """The value alone; None where there is none."""
    value = figure_of(row, name).value
    return value if is_known(value) else None


def ends_of(figure: Figure) -> Ends | None:
    """The interval's ends."""
    return None if figure.interval is None else (figure.interval.low, figure.interval.high)


def value_range(figures: Iterable[Figure], name: str) -> Ends:
    """From where to where figures of a name go: shares from 0, all else over what there is."""
    ends = [each for figure in figures if is_known(figure.value) for each in (figure.value, *(ends_of(figure) or ()))]
    return share_spread(ends) if is_share(name) else spread(ends)


def digits_of(figure: Figure, name: str) -> Callable[[float | None], str]:
    """Writes numbers of this figure with as many digits as it needs."""
    digits = 3 if is_share(name) or name == "reward" else 2
    small = is_known(figure.value) and 0 < abs(figure.value) < 10.0**-digits
    return (lambda value: axis(float(f"{value:.2g}")) if is_known(value) else NONE) if small else (
        lambda value: fixed(value, digits)
    )  # fmt: skip


def words_of(figure: Figure, name: str) -> str:
    """A figure with its interval in words."""
    write, ends = digits_of(figure, name), ends_of(figure)
    return write(figure.value) + ("" if ends is None else f" [{write(ends[0])}, {write(ends[1])}]")


def interval_words(ends: tuple[float, float] | None, write: Callable[[float | None], str] = fixed) -> Node:
    """An interval for below its figure; "no interval" for None."""
    return element("span", "no interval", kind="ends") if ends is None else ends_words(ends, write)


# --- policies ---------------------------------------------------------------------------------------------------------


def policy_words(row: Row) -> str:
    """A policy in words."""
    about = row.about
    words = [about.algorithm, about.data, about.family]
    words += [] if about.round is None else [f"round {about.round}"]
    words += [] if row.eta is None else [f"eta {axis(row.eta)}"]
    return " · ".join(words)


def where(comparison: Comparison) -> str:
    """Of what a comparison is."""
    on = comparison.evaluated_on
    data = on if comparison.dataset == on else f"{comparison.dataset} on {on}"
    return f"{comparison.family}, {data}"


def rows_of(run: RunReport, comparison: Comparison) -> list[Row]:
    """The rows of a comparison's family on its problems that have its metric."""
    return [
        row
        for row in run.gathered.rows
        if (row.about.family, row.about.evaluated_on) == (comparison.family, comparison.evaluated_on)
        and value_of(row, comparison.metric) is not None
    ]


def last_rows(run: RunReport, comparison: Comparison) -> list[Row]:
    """The last round of each method that a comparison is of, the largest metric first."""
    last: dict[str, Row] = {}
    for row in rows_of(run, comparison):
        about = row.about
        before = last.get(about.algorithm)
        if row.own and (about.dataset == comparison.dataset or about.algorithm == REFERENCE):
            last[about.algorithm] = row if before is None or about.order > before.about.order else before
    return sorted(last.values(), key=lambda row: -(value_of(row, comparison.metric) or 0.0))


def curves_of(run: RunReport, comparison: Comparison) -> dict[str, list[Row]]:
    """Of each method its last round at all etas by KL, behind the reference: those whose KL was measured."""
    measured = [row for row in rows_of(run, comparison) if value_of(row, "kl") is not None]
    base = [row for row in measured if row.about.algorithm == REFERENCE][:1]
    trained = [r for r in measured if r.about.algorithm != REFERENCE and r.about.dataset == comparison.dataset]
    curves = {}
    for name, rows in grouped(trained, lambda row: row.about.algorithm).items():
        last = max(row.about.order for row in rows)
        kept = (row for row in rows if row.about.order == last)
        curves[name] = sorted((*base, *kept), key=lambda row: value_of(row, "kl") or 0.0)
    return curves


def trained_by(training: str) -> str:
    """The algorithm of a training: its folder is the algorithm's."""
    return training.partition("/")[0]


def algorithm_stroke(run: RunReport, name: str) -> Stroke:
    """An algorithm has one colour and stroke everywhere."""
    if name == REFERENCE:
        return Stroke("var(--soft)", (1, 3))
    hours = run.timeline.hours if run.timeline else {}
    names = {row.about.algorithm for row in run.gathered.rows} | {*hours} | {trained_by(e.name) for e in run.trainings}
    return stroke(sorted(names - {REFERENCE}).index(name))


def named(run: RunReport, algorithm: str) -> Node:
    """An algorithm's name behind its stroke."""
    drawn = algorithm_stroke(run, algorithm)
    return key(drawn.colour, drawn.dash, algorithm)


# --- differences ------------------------------------------------------------------------------------------------------


def is_clear(difference: Compared) -> bool:
    """Whether a difference is beyond chance."""
    return is_known(difference.p_holm) and difference.p_holm < _CLEAR


def upward(difference: Compared) -> tuple[str, str, Figure]:
    """The larger, the smaller, and by how much."""
    figure = difference.difference
    if not is_known(figure.value) or figure.value >= 0:
        return difference.one, difference.other, figure
    ends = figure.interval and Interval(-figure.interval.high, -figure.interval.low)
    return difference.other, difference.one, Figure(-figure.value, ends, figure.note)


def probability(p: float | None) -> str:
    """A p value as people read it."""
    return NONE if not is_known(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


# --- what differences say, in sentences -------------------------------------------------------------------------------

_MOST_NAMED = 4  # methods in a sentence, each with its distance


def verdict_of(run: RunReport, comparison: Comparison) -> Node:
    """Which method is highest, by how much, at what KL, and how surely; None where there are not two to compare."""
    metric, rows = comparison.metric, last_rows(run, comparison)
    if len(rows) < 2 or not comparison.differences:
        return None
    best = rows[0]
    name, value, kl = best.about.algorithm, figure_of(best, metric), figure_of(best, "kl")
    first = [row.about.algorithm for row in rows if value_of(row, metric) == value.value]
    words = words_of(value, metric)
    if len(first) == len(rows):
        top = f"all are at {metric} {words}"
    elif len(first) > 1:
        top = f"{listed([*map(_the, first)])} are highest, at {metric} {words}"
    else:
        far = f" at KL {words_of(kl, 'kl')} nats" if name != REFERENCE and is_known(kl.value) else ""
        top = f"{_the(name)} is highest: {metric} {words}{far}"
    rounds = [f"{row.about.algorithm} after round {row.about.round}" for row in rows if row.about.round is not None]
    as_far = len({row.about.round for row in rows} - {None}) < 2
    sentences = [
        *_surely(comparison, name, len(first) > 1),
        *_at_equal(comparison, name),
        *([] if as_far else [f"Not all are as far: {listed(rounds)}."]),
    ]
    return element("p", element("b", f"{where(comparison)}: {top}."), " " + " ".join(sentences))


def _the(name: str) -> str:
    return f"the {name}" if name == REFERENCE else name


def _surely(comparison: Comparison, best: str, shared: bool) -> Iterator[str]:
    """How the highest stands to each other, and which further differences are clear."""
    clear = [each for each in comparison.differences if is_clear(each)]
    if not clear:
        yield "No difference is beyond chance."
        return
    over = sorted((each for each in clear if upward(each)[0] == best), key=lambda each: upward(each)[2].value or 0.0)
    unsure = [upward(each)[:2] for each in comparison.differences if not is_clear(each)]
    others = len(clear) - len(over)
    if over:
        most = max(each.p_holm or 0.0 for each in over)
        at_most = "at most " if most >= 0.001 and len(over) > 1 else ""
        yield (
            f"{_the(best) if shared else 'It'} is above {_distances(over)}, beyond chance (p corrected "
            f"{at_most}{probability(most)}, by {over[0].unit})."
        )
    if near := [other if one == best else one for one, other in unsure if best in (one, other)]:
        yield f"Between {_the(best) if shared else 'it'} and {listed([*map(_the, near)])} nothing is beyond chance."
    if others:
        yield f"Of the others, {counted(others, 'pair')} differ{'s' if others == 1 else ''} beyond chance."


def _distances(over: Sequence[Compared]) -> str:
    """From the nearest to the farthest; of many only these two."""
    words = [f"{_the(upward(each)[1])} by {fixed(upward(each)[2].value)}" for each in over]
    return f"{len(over)} others, {words[0]} to {words[-1]}" if len(over) > _MOST_NAMED else listed(words)


def _at_equal(comparison: Comparison, best: str) -> Iterator[str]:
    if not comparison.at_equal_kl:
        return
    pairs = sorted(clear_pairs(comparison), key=lambda pair: pair[0] != best)
    words = [f"{one} is above {other}" for one, other in pairs]
    yield f"At equal KL, {listed(words)}." if words else "At equal KL, no difference is beyond chance."


def clear_pairs(comparison: Comparison) -> dict[tuple[str, str], list[Compared]]:
    """The differences at equal KL that are beyond chance, by their two methods, the larger first."""
    clear: list[Compared] = [each for each in comparison.differences_at_kl if is_clear(each)]
    return grouped(clear, lambda each: upward(each)[:2])


def clear_words(pair: tuple[str, str], found: Sequence[Compared]) -> str:
    """One method above another: at which KL, by how much, how surely."""
    kls = listed([axis(getattr(each, "kl", 0.0)) for each in found])
    gains = [upward(each)[2].value or 0.0 for each in found]
    least, most = fixed(min(gains)), fixed(max(gains))
    p = max(each.p_holm or 0.0 for each in found)
    by = least if least == most else f"{least} to {most}"
    at_most = "at most " if p >= 0.001 and len(found) > 1 else ""
    surely = f"p corrected {at_most}{probability(p)}, by {found[0].unit}"
    return f"{pair[0]} is above {pair[1]} at {kls} nats, by {by} ({surely})."


def differences_card(run: RunReport, comparison: Comparison) -> Node:
    """The table of all differences between two methods."""
    rows = sorted(comparison.differences, key=lambda each: -(upward(each)[2].value or 0.0))
    figures = [upward(each)[2] for each in rows]
    known = [found for found in figures if is_known(found.value)]
    ends = [0.0, *(each for found in known for each in (found.value or 0.0, *(ends_of(found) or ())))]
    scale = (min(ends), max(ends) or 1.0)
    measured = any(value_of(row, "kl") is not None for row in run.gathered.rows if row.about.algorithm != REFERENCE)
    distances = (
        "Their distances from the reference may differ: the view “KL” compares at equal ones."
        if measured
        else "Their distances from the reference were not measured, and may differ."
    )
    columns = [
        Column("difference", kind="name"),
        Column(comparison.metric, kind="num"),
        Column("", kind="rare picture", sorts=False),
        Column("p", "two-sided", "num rare"),
        Column("p corrected", "for the number of differences (Holm)", "num"),
        Column("unit", "what the test takes as independent", "rare"),
    ]
    lines = [
        [
            (words := f"{upward(each)[0]} − {upward(each)[1]}"),
            cell(found.value, fixed(found.value), interval_words(ends_of(found)), title=found.note),
            cell(None, interval(found.value, ends_of(found), scale, at=0.0, faint=not is_clear(each), label=words)),
            cell(each.p, probability(each.p)),
            cell(each.p_holm, element("b" if is_clear(each) else "span", probability(each.p_holm))),
            f"{each.problems} problems" + (", by seeds" if each.unit == "seeds" else ""),
        ]
        for each, found in zip(rows, figures, strict=True)
    ]
    return card(
        f"Differences: {where(comparison)}",
        note(
            "Every two methods after their last round at their own eta, the larger first, on the problems that both "
            f"were asked. {distances}"
        ),
        table(f"differences in {where(comparison)}", columns, lines, sort=4, page=15),
    )
