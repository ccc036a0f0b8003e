"""The views of a run's figures, declared: summary, rounds, KL, learning. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuherd.lm.backend import beyond_rounding
from gpuherd.posttrain.eval.results import REFERENCE
from gpuherd.posttrain.eval.tables import Comparison, Row, grouped
from gpuherd.posttrain.report.figures import (
    DIVERGENCES,
    algorithm_stroke,
    clear_pairs,
    clear_words,
    curves_of,
    differences_card,
    digits_of,
    ends_of,
    figure_names,
    figure_of,
    interval_words,
    is_share,
    main_names,
    meaning,
    named,
    natural,
    rows_of,
    title_of,
    trained_by,
    value_of,
    value_range,
    verdict_of,
    where,
    words_of,
)
from gpuherd.posttrain.report.jobs import cost_of, jobs_view, lost_of
from gpuherd.posttrain.report.reading import RunReport, Training
from gpuherd.qa.intervals import Figure
from gpuherd.report.charts import Axis, Line, Mark, Stroke, line_chart, scatter_chart, stroke
from gpuherd.report.nodes import (
    NONE,
    Column,
    Node,
    axis,
    card,
    cell,
    check,
    choose,
    counted,
    definitions,
    element,
    ends_words,
    figure,
    fixed,
    interval,
    is_known,
    key,
    note,
    share_spread,
    spread,
    table,
    when,
)
from gpuherd.report.page import View

_MOST_VERDICTS = 12
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
    "loss", "reward", "correct", "kl", "entropy", "sampler_kl", "value_loss", "policy_loss", "accuracy", "length",
    "grad_norm", "validation_loss", "validation_accuracy", "validation_auroc",
)  # fmt: skip


def views_of(run: RunReport) -> list[View]:
    """Those that have something to show."""
    rows = run.gathered.rows
    rounds = {row.about.round for row in rows} - {None}
    apart = any(row.about.algorithm != REFERENCE and value_of(row, "kl") is not None for row in rows)
    views = [
        View("summary", "Summary", _summary(run)) if rows else None,
        View("rounds", "Rounds", _rounds(run)) if len(rounds) > 1 else None,
        View("kl", "KL", _divergence(run)) if run.gathered.comparisons and apart else None,
        View("learning", "Learning", _learning(run)) if run.trainings else None,
        View("jobs", "Jobs", jobs_view(run, run.timeline)) if run.timeline is not None else None,
    ]
    nothing = View("summary", "Summary", [card(None, note("No policy is evaluated yet."))])
    return [each for each in views if each] or [nothing]


def first_state(run: RunReport) -> dict[str, object]:
    """What is chosen at first."""
    names = figure_names(run.gathered.rows)
    first = next(
        (at for at, each in enumerate(run.samples) if each.row.own and each.row.about.algorithm != REFERENCE), 0
    )
    return {
        "every": False,
        "figures": False,
        "figure": "pass@1" if "pass@1" in names else next(iter(names), ""),
        "drawn": _first_drawn(run.trainings),
        "sample": first,
        "beside": "",
        "kind": "all",
        "problem": 0,
    }


# --- summary ----------------------------------------------------------------------------------------------------------


def _summary(run: RunReport) -> list[Node]:
    rows = run.gathered.rows
    own = [row for row in rows if row.own]
    others = len(rows) - len(own)
    tables = [
        when("every", every, when("figures", all_figures, _policies(run, list(rows) if every else own, all_figures)))
        for every in (False, True)
        for all_figures in (False, True)
    ]
    share = f"{100 * run.gathered.confidence:.3g} %"
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
    differences = [differences_card(run, each) for each in run.gathered.comparisons if each.differences]
    return [*_in_short(run), card(None, bar, *tables, note(explained), _meanings(rows)), *differences]


def _meanings(rows: Sequence[Row]) -> Node:
    pairs = [(title_of(name), meaning(name)) for name in figure_names(rows)]
    pairs.append(("a tie of a vote", "; ".join(dict.fromkeys(_TIES[row.tie] for row in rows))))
    estimators = dict.fromkeys(_ESTIMATORS.get(row.estimator or "", "not measured") for row in rows)
    return definitions([*pairs, ("how KL was had", "; ".join(estimators))], "What the figures mean")


def _policies(run: RunReport, rows: Sequence[Row], all_figures: bool) -> Node:
    names = figure_names(rows) if all_figures else main_names(rows)
    drawn = [figure_of(row, name) for row in rows for name in row.figures if is_share(name) and name != "finished"]
    shares = value_range(drawn, "pass@1")  # one scale for all that is drawn
    algorithms = [cell(row.about.algorithm, named(run, row.about.algorithm)) for row in rows]
    etas = [cell(row.eta, NONE if row.eta is None else axis(row.eta)) for row in rows]
    counts = [cell(row.problems * row.samples * len(row.seeds), _count_words(row)) for row in rows]
    speeds = [cell(row.tokens_per_second, fixed(row.tokens_per_second, 0)) for row in rows]
    hours = "of its evaluation alone; the view Jobs has those of all"
    columns: list[tuple[Column, Sequence[Node]]] = [
        (Column("algorithm", kind="name"), algorithms),
        (Column("data set", kind="name rare"), [row.about.data for row in rows]),
        (Column("model", kind="rare"), [row.about.family for row in rows]),
        (Column("round", kind="num", format="text"), [row.about.round for row in rows]),
        (Column("eta", "of the papers: small guides strongly", "num"), etas),
        *(
            (
                Column(title_of(name), meaning(name), "num rare" if _is_rare(name) else "num"),
                [_figure_cell(row, name, (0.0, 1.0) if name == "finished" else shares) for row in rows],
            )
            for name in names
        ),
        (Column("n", "problems × samples of each, and seeds", "num rare"), counts),
        (Column("tokens/s", "while it was evaluated", "num rare"), speeds),
        (Column("GPU-h", hours, "num rare", "figure"), [row.gpu_hours for row in rows]),
    ]
    kept = [
        (column, cells)
        for column, cells in columns
        if column.word not in ("round", "eta", "tokens/s", "GPU-h")
        or any((each[0] if isinstance(each, list) else each) is not None for each in cells)
    ]
    lines = [list(line) for line in zip(*(cells for _, cells in kept), strict=True)]
    return table("policies", [column for column, _ in kept], lines, page=50, hint="filter by words")


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
    return cell(found.value, write(found.value), interval_words(ends, write), drawn, title="; ".join(why))


# --- what a run says, in sentences: which method is better, by how much, at what KL and cost, how surely, what failed


def _in_short(run: RunReport) -> list[Node]:
    every = [verdict_of(run, comparison) for comparison in run.gathered.comparisons]
    verdicts = [each for each in every if each is not None]
    left = len(verdicts) - _MOST_VERDICTS
    lines = [
        *verdicts[:_MOST_VERDICTS],
        note(f"{counted(left, 'further comparison')}: the differences are below.", "soft") if left > 0 else None,
        *(cost_of(run.timeline) if run.timeline else ()),
        *(lost_of(run.timeline) if run.timeline else ()),
    ]
    found = [each for each in lines if each is not None]
    return [element("section", element("h2", "In short"), *found, kind="card short")] if found else []


# --- rounds -----------------------------------------------------------------------------------------------------------


def _rounds(run: RunReport) -> list[Node]:
    rows = [row for row in run.gathered.rows if row.own and row.about.round is not None]
    names = figure_names(rows)
    groups = grouped(rows, lambda row: f"{row.about.family}, {row.about.data}")
    bar = element("div", choose("figure", "figure", [(name, title_of(name)) for name in names]), kind="bar")
    return [bar] + [
        when(
            "figure",
            name,
            note(meaning(name), "soft"),
            element("div", *(_round_card(run, title, some, name) for title, some in groups.items()), kind="grid"),
        )
        for name in names
    ]


def _round_card(run: RunReport, title: str, rows: Sequence[Row], name: str) -> Node:
    lines = []
    for algorithm, some in grouped(rows, lambda row: row.about.algorithm).items():
        known = sorted((row for row in some if value_of(row, name) is not None), key=lambda row: row.about.order)
        points = [(float(row.about.order), value_of(row, name) or 0.0) for row in known]
        band = [(float(row.about.order), *ends) for row in known if (ends := ends_of(figure_of(row, name)))]
        lines += [Line(algorithm, points, algorithm_stroke(run, algorithm), band)] if points else []
    if not lines:
        return card(title, note("not measured"))
    about = rows[0].about
    of_reference = [row for row in run.gathered.rows if row.about.algorithm == REFERENCE]
    same = [r for r in of_reference if (r.about.family, r.about.evaluated_on) == (about.family, about.evaluated_on)]
    level = value_of(same[0], name) if same else None
    heights = [y for line in lines for _, *ys in (*line.points, *line.band) for y in ys]
    last, far = max(row.about.order for row in rows), share_spread if is_share(name) else spread
    chart = line_chart(
        sorted(lines, key=lambda line: -len(line.points)),
        Axis("round", (-0.5, 0.5) if last == 0 else (0.0, float(last)), whole=True),
        Axis(title_of(name), far([*heights, *([] if level is None else [level])]), tell=figure),
        f"{title_of(name)} by round: {title}",
        level=level,
        dots=True,
        note=None if level is None else f"dotted: the reference, {fixed(level)}",
    )
    return card(title, chart)


# --- KL ---------------------------------------------------------------------------------------------------------------


def _divergence(run: RunReport) -> list[Node]:
    cards = [each for comparison in run.gathered.comparisons for each in _divergence_card(run, comparison)]
    none = "No two methods were evaluated on the same problems with their distance from the reference measured."
    return cards or [card(None, note(none))]


def _divergence_card(run: RunReport, comparison: Comparison) -> Iterator[Node]:
    metric, curves = comparison.metric, curves_of(run, comparison)
    if not curves:
        return
    fitting = [row for row in rows_of(run, comparison) if value_of(row, "kl") is not None]
    marks = [_mark(run, row, metric) for row in fitting if row.about.algorithm == REFERENCE][:1]
    lines = []
    for algorithm, curve in curves.items():
        points = [(value_of(row, "kl") or 0.0, value_of(row, metric) or 0.0) for row in curve]
        lines.append(Line(algorithm, points, algorithm_stroke(run, algorithm)))
        marks += [_mark(run, row, metric) for row in curve if row.about.algorithm != REFERENCE]
    far = [figure_of(row, "kl") for row in fitting]
    x = spread([0.0, *(each for found in far for each in (found.value or 0.0, *(ends_of(found) or ())))])
    drawn = scatter_chart(
        lines,
        marks,
        Axis("KL(policy || reference), nats", x),
        Axis(metric, value_range([figure_of(row, metric) for row in fitting], metric)),
        f"{metric} against KL: {where(comparison)}",
        "Filled: at the policy's own eta. A curve begins at the reference, which is grey. Crosses are intervals.",
    )
    pair = element("div", drawn, _equal_kl(run, comparison), kind="pair")
    yield card(f"{metric} against KL: {where(comparison)}", pair)


def _mark(run: RunReport, row: Row, metric: str) -> Mark:
    kl, height = figure_of(row, "kl"), figure_of(row, metric)
    reference = row.about.algorithm == REFERENCE
    name = row.about.algorithm
    name += "" if row.eta is None or reference else f", eta {axis(row.eta)}"
    name += "" if row.about.round is None or reference else f", round {row.about.round}"
    tip = (name, f"{metric} {words_of(height, metric)}", f"KL {words_of(kl, 'kl')} nats")
    tint = algorithm_stroke(run, row.about.algorithm).colour
    return Mark(
        kl.value or 0.0, height.value or 0.0, tint, tip, ends_of(kl), ends_of(height), row.own and not reference
    )


def _equal_kl(run: RunReport, comparison: Comparison) -> Node:
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
        [cell(method, named(run, method)), *(_at_kl(found.get((method, kl), Figure(None))) for kl in kls)]
        for method in dict.fromkeys(each.method for each in comparison.at_equal_kl)
    ]
    columns = [Column("at KL =", kind="name", sorts=False), *(Column(axis(kl), kind="num", sorts=False) for kl in kls)]
    clear = [element("p", element("b", clear_words(*pair))) for pair in clear_pairs(comparison).items()]
    chance = note("No difference at equal KL is beyond chance.", "soft") if comparison.differences_at_kl else None
    return element(
        "div",
        element("h3", f"{comparison.metric} at equal KL"),
        table("at equal KL", columns, lines, name=f"at equal KL in {where(comparison)}"),
        note(
            "Read off by straight lines between a method's own policies; nothing beyond its ends. Two methods are "
            "compared at the values that both value_range."
        ),
        *still,
        *(clear or [chance]),
    )


def _at_kl(found: Figure) -> Node:
    ends = ends_of(found)
    return cell(found.value, fixed(found.value), None if ends is None else ends_words(ends), title=found.note)


# --- learning ---------------------------------------------------------------------------------------------------------


def _learning(run: RunReport) -> list[Node]:
    trainings = run.trainings
    strokes = [_training_stroke(run, at) for at in range(len(trainings))]
    boxes = []
    for each, drawn in zip(trainings, strokes, strict=True):
        words = key(drawn.colour, drawn.dash, f"{each.name} ({counted(each.steps, 'step')})")
        boxes.append(check("drawn", words, value=each.name, most=_MOST_DRAWN))
    title = "Training" if len(trainings) == 1 else f"Trainings, at most {_MOST_DRAWN} at a time"
    group = element("div", *boxes, kind="boxes", role="group", aria_label="trainings that are drawn")
    names = sorted({name for each in trainings for name in each.series}, key=lambda name: (_rank(name), natural(name)))
    usual = [name for name in names if _rank(name) < len(_USUAL_CURVES)]
    charts = [
        _curve_card(run, name, strokes, [True] if usual and name not in usual else [False, True]) for name in names
    ]
    choose_one = when("drawn", [], note("Choose a training above.", "soft"))
    return [card(title, group, check("figures", "all figures")), choose_one, element("div", *charts, kind="grid")]


def _rank(name: str) -> int:
    return next(
        (at for at, each in enumerate(_USUAL_CURVES) if name == each or name.endswith(f"/{each}")), len(_USUAL_CURVES)
    )


def _curve_card(run: RunReport, name: str, strokes: Sequence[Stroke], when_figures: Sequence[bool]) -> Node:
    having = [(each, drawn) for each, drawn in zip(run.trainings, strokes, strict=True) if each.series.get(name)]
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


def _training_stroke(run: RunReport, at: int) -> Stroke:
    """A training has its algorithm's colour, in a shade and with a stroke of its own; where all are of one, a colour of
    its own."""
    of = [trained_by(each.name) for each in run.trainings]
    if len(set(of)) < 2:
        return stroke(at)
    place = of[:at].count(of[at])
    tint = algorithm_stroke(run, of[at]).colour
    shades = (tint, f"color-mix(in srgb, {tint} 55%, var(--ink))", f"color-mix(in srgb, {tint} 50%, var(--card))")
    return Stroke(shades[place % 3], stroke(place).dash)
