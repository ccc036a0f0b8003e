"""The views of a run of answers, declared: measures and tokens. Pure.

``labels`` and ``browsing`` declare those of the labels and of the answers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpuherd.qa.evaluation.result import AurocDifference, ByJudge, CurvePoint, Histogram, MeasureResult, RunEvaluation
from gpuherd.qa.intervals import Figure, Interval
from gpuherd.qa.report.answers import BROWSED, answers_view
from gpuherd.qa.report.labels import labels_view
from gpuherd.qa.report.reading import ReportedRun
from gpuherd.report.charts import PERCENT, Axis, Line, Steps, Stroke, histogram_chart, line_chart, stroke
from gpuherd.report.nodes import (
    NONE,
    Column,
    Ends,
    Node,
    card,
    cell,
    check,
    choose,
    definitions,
    element,
    ends_words,
    figure,
    fixed,
    interval,
    is_known,
    legend,
    note,
    percent,
    pick,
    table,
    when,
)
from gpuherd.report.page import View

_TOO_FEW = "Too few answers of one class: nothing can be concluded from these lines."
_RIGHT, _WRONG = Stroke("var(--right)"), Stroke("var(--wrong)", (6, 3))
_SHARE = (0.0, 1.0)


def views_of(run: ReportedRun, held: int) -> list[View]:
    """Measures, tokens, labels, answers; ``held``: how many answers the page has texts of."""
    return [
        View("measures", "Measures", _by_judge(run, _measures)),
        View("tokens", "Tokens", _by_judge(run, _tokens)),
        View("labels", "Labels", labels_view(run, held)),
        View("answers", "Answers", answers_view(run, held)),
    ]


def first_state(run: ReportedRun) -> dict[str, object]:
    """What is chosen at first: the judge of the evaluation, and of each judge the best measures."""
    places = _places(run)
    judges = run.evaluation.judges if run.evaluation else ()
    found: dict[str, object] = {
        "judge": next((places[each.judging] for each in judges if each.judging in places), 0),
        "weightings": False,
        **BROWSED,
    }
    for each in judges:
        drawn = _first_drawn(run.evaluation, each) if run.evaluation else []
        found[f"drawn-{each.judging}"] = drawn
        found[f"measure-{each.judging}"] = next(iter(drawn), next((m.name for m in each.measures), ""))
    return found


def _places(run: ReportedRun) -> dict[str, int]:
    return {each.meta.name: place for place, each in enumerate(run.judgings)}


def _by_judge(run: ReportedRun, view: Callable[[ReportedRun, RunEvaluation, ByJudge, Node], list[Node]]) -> list[Node]:
    """A view of the evaluation under the judge that is looked at."""
    if run.evaluation is None:
        none = "gpuherd evaluate makes the figures; until then this page shows the answers."
        return [card("Not evaluated", element("p", none))]
    places = _places(run)
    found = {places[each.judging]: each for each in run.evaluation.judges if each.judging in places}
    names = [each.meta.name for each in run.judgings]
    nodes = []
    for place in range(len(names)):
        offered = sorted({*found, place})
        choice = choose("judge", "judged by", [(at, names[at]) for at in offered]) if len(offered) > 1 else None
        if place in found:
            nodes.append(when("judge", place, *view(run, run.evaluation, found[place], choice)))
        else:
            bar = element("div", choice, kind="bar")
            none = "This judging is not part of the evaluation."
            nodes.append(when("judge", place, card("Not evaluated", bar, element("p", none))))
    return nodes or [card("Not evaluated", element("p", "This judging is not part of the evaluation."))]


# --- measures ---------------------------------------------------------------------------------------------------------


def _measures(run: ReportedRun, evaluation: RunEvaluation, found: ByJudge, choice: Node) -> list[Node]:
    weightings = sum(each.weighting is not None for each in found.measures)
    tables = [_measure_table(run, evaluation, found, every) for every in (False, True)]
    box = check("weightings", f"with {weightings} token weightings") if weightings else None
    drawn, chosen = f"drawn-{found.judging}", f"measure-{found.judging}"
    details = [when(chosen, each.name, _detail(run, each)) for each in found.measures]
    return [
        card(
            "Measures of uncertainty",
            element("div", choice, box, kind="bar"),
            *_warned(run, found),
            *_labelled(evaluation, found),
            *(when("weightings", every, each) for every, each in zip((False, True), tables, strict=True)),
            note(
                f"Intervals of {round(100 * evaluation.settings.confidence, 1):g} %, from "
                f"{evaluation.settings.bootstrap:,} resamples of the questions unless said otherwise. Grey, with a "
                "hollow dot: too few answers of one class to conclude anything."
            ),
            _meanings(evaluation),
        ),
        *_curves(found, drawn),
        *details,
    ]


def _columns(evaluation: RunEvaluation, scale: Ends) -> list[Column]:
    against, settings = evaluation.settings.against, evaluation.settings
    delta = (
        f"AUROC minus that of {against}, on the answers that both score; interval and p by DeLong's test, both "
        "corrected by Holm for the measures shown: the interval leaves out 0 where p is below "
        f"{round(1 - settings.confidence, 3):g}"
    )
    ece = f"expected calibration error after cross-validated {settings.calibration} calibration"
    return [
        Column("", "drawn below", "pick", sorts=False),
        Column("measure", kind="name"),
        Column("AUROC", "P(a wrong answer scores higher than a right one), ties by half", "num"),
        Column(_range_text(scale), "AUROC with its interval; dotted: chance", "picture rare", sorts=False),
        Column("AUPRC", "average precision at finding wrong answers; chance gives the share of wrong ones", "num rare"),
        Column("PRR", "prediction rejection ratio: 0 is chance, 1 the best order", "num rare"),
        Column("AURAC", "mean accuracy over all rejections", "num rare"),
        Column(f"Δ to {against}", delta, "num rare"),
        Column("ECE", ece, "num rare"),
        Column("answers", "with a label and a score", "num"),
    ]


def _meanings(evaluation: RunEvaluation) -> Node:
    """The headings in words, for readers without a pointer to rest on them."""
    columns = [each for each in _columns(evaluation, _SHARE) if each.why and each.sorts]
    return definitions([(each.word, each.why) for each in columns], "What the figures mean")


def _measure_table(run: ReportedRun, evaluation: RunEvaluation, found: ByJudge, weightings: bool) -> Node:
    lows = [each for m in found.measures for each in (m.auroc.interval.low if m.auroc.interval else m.auroc.value,)]
    scale = (min(0.4, *(each for each in lows if is_known(each)), 1.0), 1.0)
    differences = {each.name: each for each in found.differences}
    drawn, chosen = f"drawn-{found.judging}", f"measure-{found.judging}"
    rows = [
        [
            cell(None, check(drawn, value=each.name, label=f"draw {each.name}")),
            [each.name, pick(chosen, each.name, each.name, title=_source(run, each.name))],
            _figure_cell(each.auroc, each),
            cell(None, _picture(each, scale, 0.5)),
            *(_figure_cell(figure_, each) for figure_ in (each.auprc, each.prr, each.aurac)),
            _difference(evaluation, differences.get(each.name), each, weightings),
            _figure_cell(each.ece, each),
            _scored(each),
        ]
        for each in found.measures
        if weightings or each.weighting is None
    ]
    hint = "filter by name" if len(rows) > 12 else None
    return table("measures", _columns(evaluation, scale), rows, sort=2, descending=True, page=200, hint=hint)


def _range_text(scale: Ends) -> str:
    """What a picture without an axis reaches over."""
    return f"{scale[0]:.2f} to {scale[1]:.2f}".replace("0 to", " to").replace("1.00", "1")


def _picture(measure: MeasureResult, scale: Ends, at: float) -> Node:
    ends = _ends(measure.auroc.interval)
    return interval(measure.auroc.value, ends, scale, at=at, faint=not measure.conclusive, label="AUROC")


def _ends(found: Interval | None) -> Ends | None:
    return None if found is None else (found.low, found.high)


def _figure_cell(found: Figure, measure: MeasureResult, *behind: Node, ends: Interval | None = None) -> Node:
    """The value, its interval below it, and why either is missing."""
    if not is_known(found.value):
        return cell(None, element("span", NONE, kind="soft"), title=found.note or "not defined")
    reach = _ends(ends or found.interval)
    words = ends_words(reach) if reach else found.note and element("span", found.note, kind="ends")
    shown = element("span", fixed(found.value), *behind, words, kind=None if measure.conclusive else "soft")
    return cell(found.value, shown, title=found.note)


def _difference(
    evaluation: RunEvaluation, found: AurocDifference | None, measure: MeasureResult, weightings: bool
) -> Node:
    """The difference with p and interval, corrected alike: for all measures, or for those that are no weightings."""
    if found is None:
        against = measure.name == evaluation.settings.against
        return cell(None, element("span", NONE, kind="soft" if against else None))
    corrected = found.among_all if weightings else found.among_measures
    if corrected is None:
        return _figure_cell(Figure(found.auroc.value, None, found.auroc.note), measure)
    p = corrected.p
    words = "p < 0.001" if p < 0.001 else "p 1" if p > 0.999 else f"p {fixed(p)}"
    return _figure_cell(found.auroc, measure, element("span", words, kind="p"), ends=corrected.interval)


def _scored(measure: MeasureResult) -> Node:
    missing = sum(measure.undefined.values())
    why = "; ".join(f"{count}: {reason}" for reason, count in measure.undefined.items())
    below = element("span", f"{missing} undefined", kind="ends") if missing else None
    return cell(measure.scored, str(measure.scored), below, title=why)


def _source(run: ReportedRun, name: str) -> str | None:
    """What a measure is, in words, and where its formula is from."""
    found = next((each for each in run.scores if each.name == name), None)
    return (". ".join(each for each in (found.summary, found.source) if each) or None) if found else None


def _warned(run: ReportedRun, found: ByJudge) -> list[Node]:
    """What makes the labels doubtful, where the head speaks of several judgings."""
    return [element("p", each.text, kind="warn") for each in found.warnings] if len(run.judgings) > 1 else []


def _labelled(evaluation: RunEvaluation, found: ByJudge) -> Iterator[Node]:
    both = found.right + found.wrong
    base = f"{percent(found.wrong / both)} wrong: the AUPRC of chance. " if both else ""
    wrong_too = found.counts.not_attempted if evaluation.settings.not_attempted == "incorrect" else 0
    reasons = {
        "not attempted": found.counts.not_attempted - wrong_too,
        "unparsed": found.counts.unparsed,
        "NaN": found.counts.nan,
    }
    reasons["not judged"] = found.left_out - sum(reasons.values())
    why = ", ".join(f"{count} {word}" for word, count in reasons.items() if count > 0)
    left = f"{found.left_out} left out ({why}). " if found.left_out else ""
    taken = f" ({wrong_too} of them not attempted)" if wrong_too else ""
    which = "Greedy answers" if found.which == "greedy" else "First samples"
    yield element("div", note(f"{which}: {found.right} right, {found.wrong} wrong{taken}. {left}{base}"))
    if not found.right or not found.wrong:
        kind = "right" if found.right else "wrong"
        yield element("p", f"All labels are {kind}: there is nothing to tell apart, and no AUROC.", kind="warn")


def _first_drawn(evaluation: RunEvaluation, found: ByJudge) -> list[str]:
    """The best three, and what all are compared with."""
    against = evaluation.settings.against
    known = sorted(
        (each for each in found.measures if each.weighting is None and is_known(each.auroc.value)),
        key=lambda each: -(each.auroc.value or 0.0),
    )
    # Of measures that order the answers alike, as NLL a token and perplexity do, one curve is enough.
    curves = {each.roc for each in known if each.name == against}
    best = []
    for each in known:
        if each.roc not in curves:
            curves.add(each.roc)
            best.append(each.name)
    return [*best[:3], *(each.name for each in known if each.name == against)]


def _curves(found: ByJudge, drawn: str) -> list[Node]:
    having = [each for each in found.measures if each.roc]
    if not having:
        return [card(None, note("There are no curves: no measure has both right and wrong answers.", "soft"))]
    names = [each.name for each in having]
    lines = {
        kind: [Line(each.name, _points(getattr(each, kind)), stroke(at)) for at, each in enumerate(having)]
        for kind in ("roc", "rejection")
    }
    few = None if all(each.conclusive for each in having) else _TOO_FEW
    least = min((point[1] for line in lines["rejection"] for point in line.points), default=1.0)
    floor = max(0.0, int((least - 0.02) * 10) / 10)

    def share(title: str, low: float = 0.0) -> Axis:
        return Axis(title, (low, 1.0), labels=PERCENT, tell=percent)

    roc = line_chart(
        lines["roc"], share("right answers flagged"), share("wrong answers flagged"), "ROC curves",
        diagonal=True, note=few, select=drawn,
    )  # fmt: skip
    rejection = line_chart(
        lines["rejection"], share("answers kept"), share("accuracy of these", floor), "rejection curves",
        level=found.right / max(1, found.right + found.wrong), note=few, select=drawn,
    )  # fmt: skip
    pair = element(
        "div",
        card("ROC: wrong answers found", roc),
        card("Accuracy when the least certain are rejected", rejection),
        kind="pair",
    )
    tick = card(None, note("Tick measures in the table to draw their curves.", "soft"))
    return [when(drawn, [], tick), when(drawn, names, pair)]


def _points(points: Sequence[CurvePoint]) -> list[tuple[float, float]]:
    return [(round(each.x, 5), round(each.y, 5)) for each in points]


def _detail(run: ReportedRun, measure: MeasureResult) -> Node:
    figures = [
        ("AUROC", measure.auroc),
        ("AUPRC", measure.auprc),
        ("PRR", measure.prr),
        ("PRR to one half", measure.prr_half),
        ("AURAC", measure.aurac),
        ("ECE", measure.ece),
        *((f"accuracy at {round(100 * each.coverage, 1):g} % kept", each.accuracy) for each in measure.at),
    ]
    if measure.auroc_closed_form:
        figures.append(("AUROC from counts alone", Figure(measure.auroc.value, measure.auroc_closed_form)))
    listed = element("dl", *(_figure_line(word, each) for word, each in figures), kind="figures scores")
    source = _source(run, measure.name)
    drawn = _histogram(measure.name, measure.histogram) if measure.histogram else note("No score is defined.", "soft")
    return card(measure.name, note(source) if source else None, element("div", drawn, listed, kind="pair"))


def _figure_line(word: str, found: Figure) -> Node:
    ends = _ends(found.interval)
    told = fixed(found.value) + ("" if ends is None else f" [{fixed(ends[0])}, {fixed(ends[1])}]")
    why = element("span", found.note, kind="ends") if found.note else None
    return element("div", element("dt", word), element("dd", told, why))


def _histogram(name: str, found: Histogram) -> Node:
    """Scores by class, each as a share of its own class: right ones filled, wrong ones as a line."""
    counts = [list(found.right), list(found.wrong)]
    parts = [[each / (sum(of) or 1) for each in of] for of in counts]
    edges = found.edges
    drawn = [edges[0] - 0.5, edges[0] + 0.5] if edges[0] == edges[-1] else _drawn_edges(edges)
    most = max(0.02, *(each for of in parts for each in of)) * 1.08
    tips = [
        [
            f"{name} {figure(edges[at])} to {figure(edges[at + 1])}",
            f"{counts[0][at]} right ({percent(parts[0][at])})",
            f"{counts[1][at]} wrong ({percent(parts[1][at])})",
        ]
        for at in range(len(counts[0]))
    ]
    keys = [(f"right ({sum(counts[0])})", _RIGHT, True), (f"wrong ({sum(counts[1])})", _WRONG, False)]
    chart = histogram_chart(
        [Steps(word, of, look, filled) for (word, look, filled), of in zip(keys, parts, strict=True)],
        drawn,
        tips,
        Axis(name, (drawn[0], drawn[-1])),
        Axis("share of the class", (0.0, most), labels=PERCENT),
        f"{name}: scores of right and of wrong answers",
    )
    further = []
    if drawn[0] > edges[0]:
        further.append(f"The first bin reaches down to {figure(edges[0])}.")
    if drawn[-1] < edges[-1]:
        further.append(f"The last bin reaches up to {figure(edges[-1])}.")
    words = legend([(word, look.colour, look.dash) for word, look, _ in keys])
    return element("div", chart, note(" ".join(further)) if further else None, words)


def _drawn_edges(edges: Sequence[float]) -> list[float]:
    """Where the outermost bins, which reach to the extremes, end in a picture: as wide as the others where they are
    much wider, or one huge score would leave no room for all else."""
    if len(edges) < 4:
        return list(edges)
    wide = (edges[-2] - edges[1]) / (len(edges) - 3)

    def end(inner: float, outer: float) -> float:
        far = abs(outer - inner) > 1.5 * wide
        return inner + (wide if outer > inner else -wide) if far else outer

    return [end(edges[1], edges[0]), *edges[1:-1], end(edges[-2], edges[-1])]


# --- tokens -----------------------------------------------------------------------------------------------------------


def _tokens(run: ReportedRun, evaluation: RunEvaluation, found: ByJudge, choice: Node) -> list[Node]:
    cards = [
        *([card("NLL by position", _position_chart(found))] if found.positions else []),
        *([card("AUROC of the first tokens alone", _prefix_chart(found))] if found.prefixes else []),
    ]
    weightings = [each for each in found.measures if each.weighting is not None]
    none = card(None, note("The evaluation has no figures by position.", "soft"))
    title = f"{len(weightings)} weightings of tokens"
    return [
        element("div", choice, kind="bar") if choice else None,
        *_warned(run, found),
        element("div", *cards, kind="pair") if cards else none,
        card(title, *_weightings(evaluation, found, weightings)) if weightings else None,
    ]


def _position_chart(found: ByJudge) -> Node:
    answers = {each.position: (each.right_answers, each.wrong_answers) for each in found.positions}
    lines = []
    for at, (word, look) in enumerate((("right", _RIGHT), ("wrong", _WRONG))):
        figures = [(float(each.position), each.right if at == 0 else each.wrong) for each in found.positions]

        def extra(x: float, at: int = at) -> str:
            return f"({answers[round(x)][at]} answers)" if round(x) in answers else ""

        lines.append(_figures_line(word, figures, look, extra))
    # A wide interval of few answers must not flatten the lines.
    top = max(0.1, *(y for line in lines for _, y in line.points)) * 1.25
    last = max(1.0, float(found.positions[-1].position))
    return line_chart(
        lines,
        Axis("token, from 0", (0.0, last), whole=True),
        Axis("mean NLL (nats)", (0.0, top), tell=figure),
        "mean NLL by position",
        dots=True,
        note="Of answers that are as long as that; shaded: the interval of the mean.",
    )


def _figures_line(
    word: str, figures: Sequence[tuple[float, Figure]], look: Stroke, extra: Callable[[float], str]
) -> Line:
    """The figures that are known, with the band of their intervals."""
    points = [(x, each.value) for x, each in figures if is_known(each.value)]
    band = [(x, *ends) for x, each in figures if is_known(each.value) and (ends := _ends(each.interval))]
    return Line(word, points, look, band, extra)


def _prefix_chart(found: ByJudge) -> Node:
    lengths = [each.length for each in found.prefixes]
    lines = []
    for number, (word, figures) in enumerate(
        (("sum of NLL", [e.nll for e in found.prefixes]), ("mean of NLL", [e.mean_nll for e in found.prefixes]))
    ):

        def extra(x: float, figures: Sequence[Figure] = figures) -> str:
            ends = _ends(figures[round(x)].interval)
            return "" if ends is None else f"[{fixed(ends[0])}, {fixed(ends[1])}]"

        at_places = [(float(at), each) for at, each in enumerate(figures)]
        lines.append(_figures_line(word, at_places, stroke(number), extra))
    low = min(0.4, *(y for line in lines for y in (*(y for _, y in line.points), *(low for _, low, _ in line.band))))
    shorter = [f"{e.shorter} of {e.answers} answers are shorter than {e.length}" for e in found.prefixes if e.shorter]
    few = "" if all(each.conclusive for each in found.measures) else f"{_TOO_FEW} "
    return line_chart(
        lines,
        Axis(
            "first tokens",
            (0.0, float(max(1, len(lengths) - 1))),
            values=list(range(len(lengths))),
            labels=f"{lengths}[datum.value]",
            tell=lambda at: str(lengths[round(at)]),
        ),
        Axis("AUROC", (max(0.0, low - 0.02), 1.0), tell=fixed),
        "AUROC by prefix",
        dots=True,
        level=0.5,
        note=f"{few}{'; '.join(shorter) or 'All answers are as long as that'}.",
    )


def _weightings(evaluation: RunEvaluation, found: ByJudge, weightings: Sequence[MeasureResult]) -> list[Node]:
    name = evaluation.settings.against
    against = next((each.auroc.value for each in found.measures if each.name == name), None)
    figures = [m.auroc for m in weightings if is_known(m.auroc.value)]
    if not figures:
        return [note(weightings[0].auroc.note or "None of them has an AUROC.", "soft")]
    ends = [each for found_ in figures for each in (_ends(found_.interval) or (found_.value or 0.0,))]
    scale = (max(0.0, min(0.45, *ends) - 0.01), min(1.0, max(0.6, *ends) + 0.01))
    differences = {each.name: each for each in found.differences}
    columns = [
        Column("weighting", kind="name"),
        Column("AUROC", kind="num"),
        Column(_range_text(scale), kind="picture wide", sorts=False),
        Column(f"Δ to {name}", kind="num rare"),
    ]
    rows = [
        [
            each.weighting,
            _figure_cell(each.auroc, each),
            cell(None, _picture(each, scale, against if is_known(against) else 0.5)),
            _difference(evaluation, differences.get(each.name), each, weightings=True),
        ]
        for each in weightings
    ]
    dotted = f"{name}, {fixed(against)}" if is_known(against) else "chance"
    explained = (
        f"Dotted: {dotted}. Of {len(weightings)} the best is best by luck too: the difference's p and interval are "
        "corrected for that and for all other measures, the AUROC's interval is not."
    )
    return [
        element("div", table("weightings", columns, rows, sort=1, descending=True), kind="compact"),
        note(explained),
    ]
