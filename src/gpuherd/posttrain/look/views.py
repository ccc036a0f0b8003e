"""The views of a run of post-training, declared: summary, rounds, KL, learning, jobs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpuherd.lm.backend import beyond_rounding
from gpuherd.posttrain.evaluation.comparing import Comparison
from gpuherd.posttrain.evaluation.gathering import Row
from gpuherd.posttrain.evaluation.result import REFERENCE
from gpuherd.posttrain.look.figures import (
    DIVERGENCES,
    Compared,
    algorithm_stroke,
    data_words,
    digits_of,
    ends_of,
    figure_names,
    figure_of,
    grouped,
    is_clear,
    is_share,
    last_rows,
    main_names,
    meaning,
    named,
    natural,
    probability,
    reach,
    round_of,
    title_of,
    trained_by,
    upward,
    value_of,
    where,
    words_of,
)
from gpuherd.posttrain.look.shown import Bar, Shown, Timeline, Training
from gpuherd.qa.intervals import Figure
from gpuherd.report.charts import Axis, Line, Mark, Span, Stroke, line_chart, scatter_chart, stroke, timeline_chart
from gpuherd.report.nodes import (
    Column,
    Node,
    card,
    cell,
    check,
    choose,
    definitions,
    element,
    interval,
    link,
    note,
    table,
    when,
)
from gpuherd.report.numbers import NONE, axis, counted, figure, fixed, is_known, listed, share_spread, spread
from gpuherd.report.page import View

_MOST_VERDICTS = 12
_MOST_NAMED = 4  # methods in a sentence, each with its distance
_MOST_DRAWN = 8
_TIES = {
    "share": "earns the share of the tied answers that is right",
    "first": "goes to the answer that was drawn first",
    "unique": "earns nothing: the majority must be unique",
}
_ESTIMATORS = {
    "exact": "exactly: summed over the vocabulary at each visited position",
    "k1": "estimated from the sampled tokens' log-probs, k1",
    "k3": "estimated from the sampled tokens' log-probs, k3",
}
_USUAL_CURVES = (
    "loss", "reward", "correct", "kl", "entropy", "value_loss", "policy_loss", "accuracy", "length", "grad_norm",
    "validation_loss", "validation_accuracy", "validation_auroc",
)  # fmt: skip
_PHASES = {"collect": "#56b4e9", "train": "#e69f00", "evaluate": "#009e73", "": "#8c6bb1"}


def views_of(shown: Shown) -> list[View]:
    """Those that have something to show; completions, which the page's script shows, last."""
    rows = shown.gathered.rows
    rounds = {row.about.round for row in rows} - {None}
    apart = any(row.about.algorithm != REFERENCE and value_of(row, "kl") is not None for row in rows)
    views = [
        View("summary", "Summary", _summary(shown)) if rows else None,
        View("rounds", "Rounds", _rounds(shown)) if len(rounds) > 1 else None,
        View("kl", "KL", _divergence(shown)) if shown.gathered.comparisons and apart else None,
        View("learning", "Learning", _learning(shown)) if shown.trainings else None,
        View("jobs", "Jobs", _jobs(shown, shown.timeline)) if shown.timeline is not None else None,
        View("samples", "Samples") if shown.samples else None,
    ]
    return [each for each in views if each] or [
        View("summary", "Summary", [card(None, note("No policy is evaluated yet."))])
    ]


def first_state(shown: Shown) -> dict[str, object]:
    """What is chosen at first."""
    names = figure_names(shown.gathered.rows)
    first = next(
        (at for at, each in enumerate(shown.samples) if each.row.own and each.row.about.algorithm != REFERENCE), 0
    )
    return {
        "every": False,
        "figures": False,
        "figure": "pass@1" if "pass@1" in names else next(iter(names), ""),
        "drawn": _first_drawn(shown.trainings),
        "sample": first,
        "beside": "",
        "kind": "all",
        "problem": 0,
    }


# --- summary ----------------------------------------------------------------------------------------------------------


def _summary(shown: Shown) -> list[Node]:
    rows = shown.gathered.rows
    own = [row for row in rows if row.own]
    others = len(rows) - len(own)
    tables = [
        when("every", every, when("figures", all_figures, _policies(shown, list(rows) if every else own, all_figures)))
        for every in (False, True)
        for all_figures in (False, True)
    ]
    share = f"{100 * shown.gathered.confidence:.3g} %"
    bar = element(
        "div",
        element("h2", "Policies"),
        check("every", f"with {others} at other etas") if others else None,
        check("figures", "all figures"),
        kind="bar",
    )
    explained = (
        f"Below a figure its {share} interval, by resampling the problems, and the seeds where there are several. Of a "
        "guided policy the row is at its own eta, which was set before anything was evaluated."
    )
    differences = [_differences(shown, each) for each in shown.gathered.comparisons if each.differences]
    return [*_in_short(shown), card(None, bar, *tables, note(explained), _meanings(rows)), *differences]


def _meanings(rows: Sequence[Row]) -> Node:
    pairs = [(title_of(name), meaning(name)) for name in figure_names(rows)]
    pairs.append(("a tie of a vote", "; ".join(dict.fromkeys(_TIES[row.tie] for row in rows))))
    estimators = dict.fromkeys(_ESTIMATORS.get(row.estimator or "", "not measured") for row in rows)
    return definitions([*pairs, ("how KL was had", "; ".join(estimators))], "What the figures mean")


def _policies(shown: Shown, rows: Sequence[Row], all_figures: bool) -> Node:
    names = figure_names(rows) if all_figures else main_names(rows)
    shares = reach(
        [figure_of(row, name) for row in rows for name in row.figures if is_share(name) and name != "finished"],
        "pass@1",
    )  # one scale for all that is drawn
    columns = [
        (
            Column("algorithm", kind="name"),
            [cell(row.about.algorithm, named(shown, row.about.algorithm)) for row in rows],
        ),
        (Column("data set", kind="name rare"), [data_words(row) for row in rows]),
        (Column("model", kind="rare"), [row.about.family for row in rows]),
        (Column("round", kind="num", format="text"), [row.about.round for row in rows]),
        (
            Column("eta", "of the papers: small guides strongly", "num"),
            [cell(row.eta, NONE if row.eta is None else axis(row.eta)) for row in rows],
        ),
        *(
            (
                Column(title_of(name), meaning(name), "num rare" if _is_rare(name) else "num"),
                [_figure_cell(row, name, (0.0, 1.0) if name == "finished" else shares) for row in rows],
            )
            for name in names
        ),
        (
            Column("n", "problems × samples of each, and seeds", "num rare"),
            [cell(row.problems * row.samples * len(row.seeds), _count_words(row)) for row in rows],
        ),
        (
            Column("tokens/s", "while it was evaluated", "num rare"),
            [cell(row.tokens_per_second, fixed(row.tokens_per_second, 0)) for row in rows],
        ),
        (
            Column("GPU-h", "of its evaluation alone; the view Jobs has those of all", "num rare", "figure"),
            [row.gpu_hours for row in rows],
        ),
    ]
    kept = [
        (column, cells)
        for column, cells in columns
        if column.word not in ("round", "eta", "tokens/s", "GPU-h") or any(_value(each) is not None for each in cells)
    ]
    lines = [list(line) for line in zip(*(cells for _, cells in kept), strict=True)]
    return table("policies", [column for column, _ in kept], lines, page=50, hint="filter by words")


def _value(each: Node) -> Node:
    return each[0] if isinstance(each, list) else each


def _is_rare(name: str) -> bool:
    return name in ("first", "kl a token", "tokens", "finished") or (
        name.startswith(("maj@", "pass@")) and name != "pass@1"
    )


def _count_words(row: Row) -> str:
    return f"{row.problems} × {row.samples}" + (f" × {len(row.seeds)} seeds" if len(row.seeds) > 1 else "")


def _figure_cell(row: Row, name: str, scale: tuple[float, float]) -> Node:
    found = figure_of(row, name)
    if not is_known(found.value):
        return cell(None, NONE, title=found.note)
    write, ends = digits_of(found, name), ends_of(found)
    seeds = [beyond_rounding(each) if name in DIVERGENCES else each for each in row.by_seed.get(name, ())]
    why = [each for each in (found.note, f"by seed: {', '.join(map(write, seeds))}" if seeds else None) if each]
    drawn = element("span", interval(found.value, ends, scale, label=name), kind="rare") if is_share(name) else None
    return cell(found.value, write(found.value), _ends_words(ends, write), drawn, title="; ".join(why))


def _ends_words(ends: tuple[float, float] | None, write: Callable[[float | None], str] = fixed) -> Node:
    return element("span", "no interval" if ends is None else f"{write(ends[0])} to {write(ends[1])}", kind="ends")


def _differences(shown: Shown, comparison: Comparison) -> Node:
    rows = sorted(comparison.differences, key=lambda each: -(upward(each)[2].value or 0.0))
    figures = [upward(each)[2] for each in rows]
    ends = [
        0.0,
        *(each for found in figures if is_known(found.value) for each in (found.value, *(ends_of(found) or ()))),
    ]
    scale = (min(ends), max(ends) or 1.0)
    measured = any(value_of(row, "kl") is not None for row in shown.gathered.rows if row.about.algorithm != REFERENCE)
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
            cell(found.value, fixed(found.value), _ends_words(ends_of(found)), title=found.note),
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


# --- what a run says, in sentences: which method is better, by how much, at what KL and cost, how surely, what failed


def _in_short(shown: Shown) -> list[Node]:
    verdicts = [each for comparison in shown.gathered.comparisons if (each := _verdict(shown, comparison)) is not None]
    left = len(verdicts) - _MOST_VERDICTS
    lines = [
        *verdicts[:_MOST_VERDICTS],
        note(f"{counted(left, 'further comparison')}: the differences are below.", "soft") if left > 0 else None,
        *(_cost(shown.timeline) if shown.timeline else ()),
        *(_lost(shown.timeline) if shown.timeline else ()),
    ]
    found = [each for each in lines if each is not None]
    return [element("section", element("h2", "In short"), *found, kind="card short")] if found else []


def _verdict(shown: Shown, comparison: Comparison) -> Node:
    metric, rows = comparison.metric, last_rows(shown, comparison)
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
    pairs = sorted(_clear_pairs(comparison), key=lambda pair: pair[0] != best)
    words = [f"{one} is above {other}" for one, other in pairs]
    yield f"At equal KL, {listed(words)}." if words else "At equal KL, no difference is beyond chance."


def _clear_pairs(comparison: Comparison) -> dict[tuple[str, str], list[Compared]]:
    clear: list[Compared] = [each for each in comparison.differences_at_kl if is_clear(each)]
    return grouped(clear, lambda each: upward(each)[:2])


def _cost(timeline: Timeline) -> Iterator[Node]:
    hours = sorted(((name, sum(each.values())) for name, each in timeline.hours.items()), key=lambda pair: -pair[1])
    if hours:
        more = f", and {len(hours) - 8} more" if len(hours) > 8 else ""
        words = listed([f"{name} {_hours(all_of_it)}" for name, all_of_it in hours[:8]])
        yield element("p", f"{_hours_unit(timeline)}: {words}{more}; by phase: see ", link("#/jobs", "Jobs"), ".")


def _lost(timeline: Timeline) -> Iterator[Node]:
    lost = [each for each in timeline.failures if each.final]
    if not lost:
        return
    failed = [each for each in lost if each.kind != "cancelled"]
    words = [f"{each.job} ({each.kind}{f': {each.reason}' if each.reason else ''})" for each in failed[:3]]
    words += [f"{len(failed) - 3} more failed"] if len(failed) > 3 else []
    cancelled = len(lost) - len(failed)
    words += [f"{cancelled} {'was' if cancelled == 1 else 'were'} cancelled"] if cancelled else []
    start = f"{counted(len(lost), 'job')} {'has' if len(lost) == 1 else 'have'} no result: {'; '.join(words)}; see "
    yield element("p", start, link("#/jobs", "Jobs"), ".", kind="bad")


# --- rounds -----------------------------------------------------------------------------------------------------------


def _rounds(shown: Shown) -> list[Node]:
    rows = [row for row in shown.gathered.rows if row.own and row.about.round is not None]
    names = figure_names(rows)
    groups = grouped(rows, lambda row: f"{row.about.family}, {data_words(row)}")
    bar = element("div", choose("figure", "figure", [(name, title_of(name)) for name in names]), kind="bar")
    return [bar] + [
        when(
            "figure",
            name,
            note(meaning(name), "soft"),
            element("div", *(_round_card(shown, title, some, name) for title, some in groups.items()), kind="grid"),
        )
        for name in names
    ]


def _round_card(shown: Shown, title: str, rows: Sequence[Row], name: str) -> Node:
    lines = []
    for algorithm, some in grouped(rows, lambda row: row.about.algorithm).items():
        known = sorted((row for row in some if value_of(row, name) is not None), key=round_of)
        points = [(float(round_of(row)), value_of(row, name) or 0.0) for row in known]
        band = [(float(round_of(row)), *ends) for row in known if (ends := ends_of(figure_of(row, name)))]
        lines += [Line(algorithm, points, algorithm_stroke(shown, algorithm), band)] if points else []
    if not lines:
        return card(title, note("not measured"))
    about = rows[0].about
    level = next(
        (
            value_of(row, name)
            for row in shown.gathered.rows
            if row.about.algorithm == REFERENCE
            and (row.about.family, row.about.evaluated_on) == (about.family, about.evaluated_on)
        ),
        None,
    )
    heights = [
        y for line in lines for y in (*(y for _, y in line.points), *(y for _, *ends in line.band for y in ends))
    ]
    last, far = max(map(round_of, rows)), share_spread if is_share(name) else spread
    chart = line_chart(
        sorted(lines, key=lambda line: -len(line.points)),
        Axis("round", (-0.5, 0.5) if last == 0 else (0.0, float(last)), whole=True),
        Axis(title_of(name), far([*heights, *([] if level is None else [level])]), tell=figure),
        f"{title_of(name)} by round: {title}",
        level=level,
        dots=True,
        note=None if level is None else f"dotted: the reference, {fixed(level)}",
    )  # fmt: skip
    return card(title, chart)


# --- KL ---------------------------------------------------------------------------------------------------------------


def _divergence(shown: Shown) -> list[Node]:
    cards = [each for comparison in shown.gathered.comparisons for each in _divergence_card(shown, comparison)]
    none = "No two methods were evaluated on the same problems with their distance from the reference measured."
    return cards or [card(None, note(none))]


def _divergence_card(shown: Shown, comparison: Comparison) -> Iterator[Node]:
    metric = comparison.metric
    fitting = [
        row
        for row in shown.gathered.rows
        if (row.about.family, row.about.evaluated_on) == (comparison.family, comparison.evaluated_on)
        and value_of(row, "kl") is not None
        and value_of(row, metric) is not None
    ]
    base = [row for row in fitting if row.about.algorithm == REFERENCE][:1]
    trained = [r for r in fitting if r.about.algorithm != REFERENCE and r.about.dataset == comparison.dataset]
    if not trained:
        return
    lines, marks = [], [_mark(shown, row, metric) for row in base]
    for algorithm, rows in grouped(trained, lambda row: row.about.algorithm).items():
        last = max(map(round_of, rows))
        curve = sorted(
            (*base, *(row for row in rows if round_of(row) == last)), key=lambda row: value_of(row, "kl") or 0.0
        )
        points = [(value_of(row, "kl") or 0.0, value_of(row, metric) or 0.0) for row in curve]
        lines.append(Line(algorithm, points, algorithm_stroke(shown, algorithm)))
        marks += [_mark(shown, row, metric) for row in curve if row.about.algorithm != REFERENCE]
    far = [figure_of(row, "kl") for row in fitting]
    x = spread([0.0, *(each for found in far for each in (found.value or 0.0, *(ends_of(found) or ())))])
    drawn = scatter_chart(
        lines,
        marks,
        Axis("KL(policy || reference), nats", x),
        Axis(metric, reach([figure_of(row, metric) for row in fitting], metric)),
        f"{metric} against KL: {where(comparison)}",
        "Filled: at the policy's own eta. A curve begins at the reference, which is grey. Crosses are intervals.",
    )
    pair = element("div", drawn, _equal_kl(shown, comparison), kind="pair")
    yield card(f"{metric} against KL: {where(comparison)}", pair)


def _mark(shown: Shown, row: Row, metric: str) -> Mark:
    kl, height = figure_of(row, "kl"), figure_of(row, metric)
    reference = row.about.algorithm == REFERENCE
    name = row.about.algorithm
    name += "" if row.eta is None or reference else f", eta {axis(row.eta)}"
    name += "" if row.about.round is None or reference else f", round {row.about.round}"
    tip = (name, f"{metric} {words_of(height, metric)}", f"KL {words_of(kl, 'kl')} nats")
    tint = algorithm_stroke(shown, row.about.algorithm).colour
    return Mark(
        kl.value or 0.0, height.value or 0.0, tint, tip, ends_of(kl), ends_of(height), row.own and not reference
    )


def _equal_kl(shown: Shown, comparison: Comparison) -> Node:
    still = [
        note(
            f"{method} has hardly moved from the reference (KL at most {axis(beyond_rounding(kl))} nats), and is "
            "compared with no other here."
        )
        for method, kl in comparison.unmoved.items()
    ]
    if not comparison.at_equal_kl:
        none = comparison.note or "The curves have no KL in common at which two methods could be compared."
        return element("div", note(none, "soft"), *still)
    kls = sorted({each.kl for each in comparison.at_equal_kl})
    found = {(each.method, each.kl): each.metric for each in comparison.at_equal_kl}
    lines = [
        [cell(method, named(shown, method)), *(_at_kl(found.get((method, kl), Figure(None))) for kl in kls)]
        for method in dict.fromkeys(each.method for each in comparison.at_equal_kl)
    ]
    columns = [Column("at KL =", kind="name", sorts=False), *(Column(axis(kl), kind="num", sorts=False) for kl in kls)]
    clear = [element("p", element("b", _clear_words(*pair))) for pair in _clear_pairs(comparison).items()]
    chance = note("No difference at equal KL is beyond chance.", "soft") if comparison.differences_at_kl else None
    return element(
        "div",
        element("h3", f"{comparison.metric} at equal KL"),
        table("at equal KL", columns, lines, name=f"at equal KL in {where(comparison)}"),
        note(
            "Read off by straight lines between a method's own policies; nothing beyond its ends. Two methods are "
            "compared at the values that both reach."
        ),
        *still,
        *(clear or [chance]),
    )


def _at_kl(found: Figure) -> Node:
    ends = ends_of(found)
    return cell(found.value, fixed(found.value), None if ends is None else _ends_words(ends), title=found.note)


def _clear_words(pair: tuple[str, str], found: Sequence[Compared]) -> str:
    """One method above another: at which KL, by how much, how surely."""
    kls = listed([axis(getattr(each, "kl", 0.0)) for each in found])
    gains = [upward(each)[2].value or 0.0 for each in found]
    least, most = fixed(min(gains)), fixed(max(gains))
    p = max(each.p_holm or 0.0 for each in found)
    by = least if least == most else f"{least} to {most}"
    at_most = "at most " if p >= 0.001 and len(found) > 1 else ""
    surely = f"p corrected {at_most}{probability(p)}, by {found[0].unit}"
    return f"{pair[0]} is above {pair[1]} at {kls} nats, by {by} ({surely})."


# --- learning ---------------------------------------------------------------------------------------------------------


def _learning(shown: Shown) -> list[Node]:
    trainings = shown.trainings
    strokes = [_training_stroke(shown, at) for at in range(len(trainings))]
    boxes = [
        check(
            "drawn",
            ["key", {"colour": drawn.colour, "dash": drawn.dash}, f"{each.name} ({counted(each.steps, 'step')})"],
            value=each.name,
            most=_MOST_DRAWN,
        )
        for each, drawn in zip(trainings, strokes, strict=True)
    ]
    title = "Training" if len(trainings) == 1 else f"Trainings, at most {_MOST_DRAWN} at a time"
    group = element("div", *boxes, kind="boxes", role="group", aria_label="trainings that are drawn")
    names = sorted({name for each in trainings for name in each.series}, key=lambda name: (_rank(name), natural(name)))
    usual = [name for name in names if _rank(name) < len(_USUAL_CURVES)]
    charts = [
        _curve_card(shown, name, strokes, [True] if usual and name not in usual else [False, True]) for name in names
    ]
    choose_one = when("drawn", [], note("Choose a training above.", "soft"))
    return [card(title, group, check("figures", "all figures")), choose_one, element("div", *charts, kind="grid")]


def _rank(name: str) -> int:
    return next(
        (at for at, each in enumerate(_USUAL_CURVES) if name == each or name.endswith(f"/{each}")), len(_USUAL_CURVES)
    )


def _curve_card(shown: Shown, name: str, strokes: Sequence[Stroke], when_figures: Sequence[bool]) -> Node:
    having = [(each, drawn) for each, drawn in zip(shown.trainings, strokes, strict=True) if each.series.get(name)]
    lines = [Line(each.name, each.series[name], drawn) for each, drawn in having]
    places = [x for line in lines for x, _ in line.points]
    x = (min(places), max(places)) if min(places) < max(places) else (places[0] - 0.5, places[0] + 0.5)
    chart = line_chart(
        lines,
        Axis("step", x, whole=True),
        Axis("", spread([y for line in lines for _, y in line.points]), tell=figure),
        f"{name} by step",
        height=170,
        select="drawn",
    )
    shown_in = when("drawn", [each.name for each, _ in having], card(name, chart, level="h3"))
    return when("figures", list(when_figures), shown_in)


def _first_drawn(trainings: Sequence[Training]) -> list[str]:
    """The last of each algorithm; where all are of one, the first few."""
    last = list({trained_by(each.name): each.name for each in trainings}.values())
    return last[:_MOST_DRAWN] if len(last) > 1 else [each.name for each in trainings[:4]]


def _training_stroke(shown: Shown, at: int) -> Stroke:
    """A training has its algorithm's colour, in a shade and with a stroke of its own; where all are of one, a colour of
    its own."""
    of = [trained_by(each.name) for each in shown.trainings]
    if len(set(of)) < 2:
        return stroke(at)
    place = of[:at].count(of[at])
    tint = algorithm_stroke(shown, of[at]).colour
    shades = (tint, f"color-mix(in srgb, {tint} 55%, var(--ink))", f"color-mix(in srgb, {tint} 50%, var(--card))")
    return Stroke(shades[place % 3], stroke(place).dash)


# --- jobs -------------------------------------------------------------------------------------------------------------


def _jobs(shown: Shown, timeline: Timeline) -> list[Node]:
    drawn = _timeline(timeline) if timeline.bars else note("No job has started yet.")
    columns = [Column("job", kind="name"), Column("kind"), Column("then"), Column("reason", kind="name", sorts=False)]
    lines = [
        [
            each.job,
            cell(each.kind, element("span", each.kind, kind="bad" if each.final else None)),
            "no result" if each.final else "tried again",
            each.reason or NONE,
        ]
        for each in timeline.failures
    ]
    failures = table("failures", columns, lines, hint="filter by words") if lines else note("None.")
    return [
        card("Jobs in time", drawn, _job_words(timeline)),
        *_hours_card(shown, timeline),
        card("Failures", failures),
    ]


def _timeline(timeline: Timeline) -> Node:
    ends = [each.start if each.end is None else each.end for each in timeline.bars]
    running = any(each.end is None for each in timeline.bars)
    length = max(ends, default=0.0)
    whole = (1.06 * length if running else length) or 1.0  # what runs has no end yet
    scale, unit = (1.0, "s") if whole < 120 else (60.0, "min") if whole < 7200 else (3600.0, "h")
    spans: list[Span] = []
    busy: dict[str, list[float]] = {}  # of each lane: when each of its rows is free again
    for bar in timeline.bars:
        for lane in bar.lanes:
            free = busy.setdefault(lane, [])
            sub = next((at for at, end in enumerate(free) if end <= bar.start + 1e-9), len(free))
            free[sub : sub + 1] = [float("inf") if bar.end is None else bar.end]
            spans.append(_span(bar, lane, sub, whole, scale))
    drawn = timeline_chart(
        spans,
        Axis(unit, (0.0, whole / scale), tell=figure),
        f"{len(timeline.bars)} attempts of jobs on {len(busy)} devices over {_clock(length)}: arrow keys walk "
        "through them",
    )
    states = {each.state for each in timeline.bars}
    phases = dict.fromkeys(each.phase for each in timeline.bars)
    keys = [
        *(["key", {"colour": _PHASES.get(phase, _PHASES[""])}, phase or "other"] for phase in phases),
        element("span", "outlined: failed", kind="key bad") if "failed" in states else None,
        element("span", "pale: stopped, and done again", kind="key") if "requeued" in states else None,
        element("span", "dashed: not ended when this page was made", kind="key") if running else None,
    ]
    return element("div", drawn, element("div", *keys, kind="legend"))


def _span(bar: Bar, lane: str, sub: int, whole: float, scale: float) -> Span:
    tint = _PHASES.get(bar.phase, _PHASES[""])
    took = (
        f"since {_clock(bar.start)}"
        if bar.end is None
        else f"{_clock(bar.start)} to {_clock(bar.end)} ({_clock(bar.end - bar.start)})"
    )
    return Span(
        lane=lane,
        sub=sub,
        start=bar.start / scale,
        end=(whole if bar.end is None else bar.end) / scale,
        colour=tint,
        tip=(bar.job, f"{bar.phase or 'job'} on {', '.join(bar.lanes)}: {bar.state}", took),
        opacity=0.45 if bar.state == "requeued" else 0.25 if bar.end is None else 1.0,
        outline="var(--bad)" if bar.state == "failed" else tint if bar.end is None else None,
        broken=bar.end is None,
    )


def _clock(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.{0 if seconds == 0 or seconds >= 10 else 1}f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.2f} h"


def _hours_card(shown: Shown, timeline: Timeline) -> Iterator[Node]:
    """What each algorithm took, by phase: of GPUs, or of jobs where there were none."""
    if not timeline.hours:
        return
    phases = [
        phase
        for phase in ("collect", "train", "evaluate", "other")
        if any(phase in each for each in timeline.hours.values())
    ]
    columns = [
        Column("algorithm", kind="name"),
        *(Column(each, kind="num") for each in phases),
        Column("all", kind="num"),
    ]
    lines = [
        [
            cell(algorithm, named(shown, algorithm)),
            *(cell(hours.get(phase), _hours(hours.get(phase))) for phase in phases),
            cell(sum(hours.values()), element("b", _hours(sum(hours.values())))),
        ]
        for algorithm, hours in timeline.hours.items()
    ]
    yield card(
        f"What each took, in {_hours_unit(timeline)}",
        table("what each took", columns, lines, sort=len(columns) - 1, descending=True),
        note("All attempts count, those too that failed or were stopped."),
    )


def _hours_unit(timeline: Timeline) -> str:
    return "GPU-hours" if timeline.gpu_hours else "hours of jobs on CPUs"


def _hours(value: float | None) -> str:
    if not is_known(value):
        return NONE
    return axis(float(f"{value:.5g}")) if value < 0.001 else f"{value:#.2g}" if value < 0.01 else figure(value)


def _job_words(timeline: Timeline) -> Node:
    states = ("done", "running", "waiting", "failed", "cancelled")
    jobs = ", ".join(f"{timeline.counts[each]} {each}" for each in states if timeline.counts.get(each))
    hours = ", ".join(f"{phase} {figure(each)}" for phase, each in (timeline.gpu_hours or {}).items())
    return note(f"Jobs: {jobs or 'none'}.{f' GPU-hours: {hours}.' if timeline.gpu_hours else ''}")
