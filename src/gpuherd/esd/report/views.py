"""The views of a page of spectra, declared: models, lineage, outliers, failures, and the view of one model. Pure.

Their tables show records that the page makes of its index (``records.js``): frames of models, layers and matrices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from gpuherd.esd.report.charts import depth_chart, histogram_chart, spectrum_charts
from gpuherd.report.nodes import (
    NONE,
    Column,
    Family,
    Node,
    card,
    choose,
    dot,
    element,
    fold,
    given,
    key,
    known,
    link,
    live,
    missing,
    note,
    pick,
    range_mark,
    repeat,
    scale_picture,
    step,
    table,
    tree,
)
from gpuherd.report.nodes import figure as figure_words
from gpuherd.report.page import View

# What ``lineage.Kinship.verdict`` means; what a reader should see first stands first.
VERDICTS = {
    "other": "the stated base is probably wrong",
    "unclear": "no base is close, so it can't be told",
    "close": "close: probably its base, or a copy",
    "stated, far": "as stated, but not close",
    "as stated": "as stated",
    "far": "not close: probably unrelated",
}
_FOLDED = 12  # members of a family that are shown unfolded
_MOST_FAMILIES = 100
_DRAWN_AT_FIRST = 4  # of so few models all are drawn
Index = Mapping[str, Any]
_part = partial(card, level="h3")


def views_of(index: Index) -> list[View]:
    """The views of a run; ``index``: what ``Contents.index`` says of it."""
    models, outliers = index["models"], index["outliers"]
    related = [m for m in models if m["parent"] is not None or m["source"] or m["verdict"] == "close"]
    without = len(index["failures"]) + sum(model["without"] for model in models)
    apart = len(outliers["layers"]) + outliers["more"] + len(outliers["models"])
    return [
        View("models", "Models", _models(index), count=len(models)),
        View("lineage", "Lineage", _lineage(models), count=len(related)),
        View("outliers", "Outliers", _outliers(index), count=apart),
        View("failures", "Failures", _failures(index), count=without),
        View("model", "", _model(index), under="models"),
    ]


def first_state(index: Index) -> dict[str, Any]:
    """What is chosen at first: the models whose histograms are drawn."""
    count = len(index["models"])
    return {"drawn": [*range(count)] if count <= _DRAWN_AT_FIRST else [], "layer": 0, "against": "", "model": 0}


def _model_link(field: str = "") -> Node:
    """A link to the model that the record is, or that its field is."""
    of = f"{field}." if field else ""
    return link(f"#/model/{{{of}number}}", f"{{{of}id}}")


def _or_dash(field: str, *children: Node) -> Node:
    """The children where the record has the field, else a dash."""
    return element("span", given(field, *children), missing(field, NONE))


# Median, and the range from the least to the largest, on one scale for all rows of a table.
_RANGE = scale_picture(
    "from {min:figure} to {max:figure}",
    element("line", kind="band", x1="25%", x2="64.6%", y1=8, y2=8),
    *range_mark("{min:place}", "{max:place}"),
    dot("{median:place}", "{median:ramp}"),
)


# --- all models -------------------------------------------------------------------------------------------------------


def _models(index: Index) -> list[Node]:
    models, meanings = index["models"], index["meanings"]
    several = len(models) > 1
    tick = ["check", {"key": "drawn", "value": "{number}", "label": "show {id} in the histogram"}]
    fitted = element("span", "{fitted}", given("without", " of {analysed}"))
    unfitted = element("span", given("without", element("span", "{without}", kind="bad")), missing("without", "0"))
    covered = "share of the checkpoint's weights that are in matrices with a valid fit"
    reached = "from the least to the largest alpha, 1 to 16 on a logarithmic scale; dot: median; shaded: 2 to 6"
    failed = "matrices that were analysed but have no valid fit; the reasons are under Failures"
    columns = [
        Column("", kind="pick", sorts=False, shows=tick) if several else None,
        Column("model", kind="name", field="id", shows=_model_link()),
        Column("relation", kind="rare", field="relation", shows=_or_dash("relation", "{relation}")),
        Column("matrices", "matrices with a fit, of those that were analysed", "num", field="fitted", shows=fitted),
        Column("weights", "weights in all analysed matrices", "num rare", "many", field="params"),
        Column("covered", covered, "num rare", "percent", field="covered")
        if any(model["covered"] is not None for model in models)
        else None,
        Column("mean alpha", "mean over all matrices with a valid fit", "num rare", "figure", field="mean"),
        Column("median", "median alpha over all matrices with a valid fit", "num", "figure", field="median"),
        Column("least", "least alpha of a matrix", "num rare", "figure", field="min"),
        Column("largest", "largest alpha of a matrix", "num rare", "figure", field="max"),
        Column("range", reached, "range rare", sorts=False, shows=given("median", _RANGE)),
        Column("median D", meanings.get("D"), "num rare", "figure", field="d"),
        Column("without fit", failed, "num rare", field="without", shows=unfitted),
    ]
    found = table(
        "models",
        [column for column in columns if column is not None],
        frame="models",
        hint="filter by id, relation or source",
        words=("id", "relation", "source"),
    )
    label = "alpha of all matrices, and of the chosen models"
    histogram = live("drawn", *_histogram(label, 190), part="histogram")
    return [_part("How alpha is distributed", histogram), card(None, found)]


# --- lineage ----------------------------------------------------------------------------------------------------------


def _lineage(models: Sequence[Index]) -> list[Node]:
    families = _families(models)
    # One scale for all strips: four times the change that fine-tunes of this run typically have.
    changes = [model["stated"][1] for model in models if model["stated"] is not None]
    most = max(0.02, min(2.0, 4 * median(changes))) if changes else 0.02
    change = link(
        "#/model/{number}/vs/{parent.number}",
        "median |Δalpha| {change:figure4}",
        title="alpha minus that of its base, by layer",
    )
    branch = element(
        "div",
        _model_link(),
        given("relation", element("span", "{relation}", kind="pill")),
        given("stated", live((), _strip(most), part="strip", late=True), change),
        given("doubted", element("span", "nearer to ", _model_link("base"), " ({near:figure4})", kind="warn")),
        given("apart", element("span", "too few layers in common", kind="soft")),
        kind="branch",
    )
    explained = (
        "Base, what was made of it, and by how much alpha changed: each bar is a matrix, up where alpha grew, of full "
        f"height from a change of {figure_words(most)} on. A fine-tune's median |Δalpha| is typically below 0.01, that "
        "of an unrelated model near 0.75."
    )
    none = note("No model of this run is said to come from another.", "soft")
    shown = tree("models", branch, families, _MOST_FAMILIES) if families else none
    stated = _part("Stated lineage", note(explained), shown)
    return [*_nearest(models), stated]


def _strip(most: float) -> Node:
    """A tiny picture of a model's change from its base; changes of alpha by ``most`` have the full height."""
    middle = element("line", x1=0, x2="{count}", y1=0, y2=0, stroke="var(--line)", vector_effect="non-scaling-stroke")
    about: dict[str, Any] = {"x": "{x}", "y": "{y}", "width": 0.8, "height": "{height}"}
    bar = element(
        "rect", **about, fill="{colour}", stroke="{colour}", stroke_width=0.4, vector_effect="non-scaling-stroke"
    )
    box = {"viewBox": f"0 {-most} {{count}} {2 * most}", "preserveAspectRatio": "none", "aria_hidden": "true"}
    return element("div", element("svg", middle, repeat("bars", bar), kind="strip", **box), title="{far}")


def _families(models: Sequence[Index]) -> list[Family]:
    """Models below what they are said to come from; families with members that contradict it come first."""
    children: dict[int | str, list[int]] = {}
    roots: list[int] = []
    for number, model in enumerate(models):
        if model["parent"] is None and not model["source"]:
            roots.append(number)
        else:
            children.setdefault(model["source"] if model["parent"] is None else model["parent"], []).append(number)
    shown: set[int] = set()

    def doubted(members: Sequence[int]) -> int:
        return sum(models[number]["verdict"] == "other" for number in members)

    def folded(members: Sequence[int]) -> tuple[list[Family], Node]:
        """A large family is shut at first; those whose alphas contradict what is stated come first."""
        some = sorted(members, key=lambda number: models[number]["verdict"] != "other")
        inside = [branch(number) for number in some if number not in shown]
        if len(members) <= _FOLDED:
            return inside, None
        doubts = doubted(members)
        words = element("span", f", {doubts} nearer to another base", kind="warn") if doubts else None
        return inside, element("span", f"{len(members)} models", words)

    def branch(number: int) -> Family:
        shown.add(number)
        return [number, *folded(children[number])] if number in children else [number]

    bases = [number for number in roots if number in children]
    found = [branch(number) for number in sorted(bases, key=lambda number: -doubted(children[number]))]
    for absent, members in children.items():
        if isinstance(absent, str):
            base = element(
                "div", element("span", absent), element("span", "not in this run", kind="pill"), kind="branch"
            )
            found.append([base, *folded(members)])
    # What is left goes in a circle in the list.
    found += [branch(at) for at, model in enumerate(models) if model["parent"] is not None and at not in shown]
    return found


def _nearest(models: Sequence[Index]) -> list[Node]:
    counts = Counter(model["verdict"] for model in models if model["verdict"])
    if not counts:
        return []
    parts = [
        element("span", element("b", f"{counts[name]:,}"), f": {words}", kind="warn" if name == "other" else None)
        for name, words in VERDICTS.items()
        if counts[name]
    ]
    tally = element("p", *_joined(parts), ".")
    apart = "median over the common matrices of |alpha − alpha of the {} base|"
    narrow = element("div", "{words}", kind="narrow soft {tone}")
    change = link("#/model/{number}/vs/{base.number}", "{near:figure4}", title="by layer")
    source = [
        given("parent", _model_link("parent")),
        given("absent", "{absent} (not in this run)"),
        missing("parent", missing("absent", NONE)),
    ]
    stated = link("#/model/{number}/vs/{parent.number}", "{change:figure4}", title="by layer")
    columns = [
        Column("model", kind="name", field="id", shows=element("div", _model_link(), narrow)),
        Column("nearest base", kind="name", field="base.id", shows=_model_link("base")),
        Column("median |Δ|", apart.format("nearest"), "num", field="near", shows=change),
        Column("verdict", kind="rare", field="rank", shows=element("span", "{words}", kind="{tone}")),
        Column("stated base", kind="name rare", field="source", shows=element("span", *source)),
        Column("its median |Δ|", apart.format("stated"), "num rare", field="change", shows=_or_dash("stated", stated)),
        Column("matrices", "matrices with a fit that both have", "num rare", "text", field="common"),
    ]
    explained = (
        "Of the bases of this run with at least 90 % of the model's layers, the one with the least median |Δalpha|. "
        "Close: below 0.05. The stated base is doubted where it is not close and another is at most half as far. In "
        "published results a model's own base is the nearest in 95 % of cases."
    )
    words = ("id", "source", "base.id", "words")
    found = table("nearest base", columns, frame="compared", sort=3, page=20, hint="filter by words", words=words)
    return [_part("Nearest base", tally, note(explained), found)]


def _joined(nodes: Sequence[Node]) -> list[Node]:
    """Parts of a sentence with semicolons between them."""
    return [part for at, node in enumerate(nodes) for part in (("; ", node) if at else (node,))]


# --- outliers and failures --------------------------------------------------------------------------------------------


_MODEL = Column("model", kind="name", field="model.id", shows=_model_link("model"))
_MATRIX = Column("matrix", kind="name", field="name", shows=link("#/model/{model.number}/{at}", "{name}"))


def _outliers(index: Index) -> list[Node]:
    found, few = index["outliers"], len(index["models"]) < 8
    explained = note(
        "Robust z-score of ln(alpha − 1): distance from the median in MADs, scaled so that it is in standard "
        "deviations for a normal distribution; |z| > 3.5 is listed (Iglewicz and Hoaglin 1993). A layer is compared "
        "with the layers of its own model, a model's median alpha with those of the other models."
    )
    z = Column("z", kind="num", field="far", shows="{z:signed}")
    middle = Column("median alpha", kind="num", format="figure", field="model.median")
    alpha = Column("alpha", kind="num", format="figure", field="alpha")
    of_model = Column("model's median", kind="num rare", format="figure", field="model.median")
    models = table("models that stand apart", [_MODEL, middle, z], frame="odd")
    filtered: dict[str, Any] = {"hint": "filter by words", "words": ("model.id", "name")}
    layers = table("layers that stand apart", [_MODEL, _MATRIX, alpha, of_model, z], frame="layers", **filtered)
    none = "Fewer than 8 models: too few to say which stands apart." if few else "No model stands apart."
    more = note(f"{found['more']} more, less far out, are not listed.") if found["more"] else None
    return [
        _part("Models", explained, models if found["models"] else note(none, "soft")),
        _part("Layers", layers if found["layers"] else note("No layer stands apart from its model.", "soft"), more),
    ]


def _failures(index: Index) -> list[Node]:
    models, reasons, on_purpose = index["models"], index["reasons"], index["on_purpose"]
    all_reasons = Counter(reason for model in models for _, reason in model["bad"])
    left_out = [[reasons[reason], count] for reason, count in all_reasons.items() if on_purpose[reason]]
    name, reason = (Column(word, kind="name", format="text") for word in ("model", "reason"))
    why = Column("reason", kind="name", field="reason", format="text")
    fit = Column("fit", field="fit", format="text")
    filtered: dict[str, Any] = {"hint": "filter by words", "words": ("model.id", "name", "reason", "fit")}
    columns = [name, Column("kind", format="text"), reason]
    failed = table("failures", columns, index["failures"], hint="filter by words")
    unfitted = table("matrices without a fit", [_MODEL, _MATRIX, why], frame="unfitted", **filtered)
    unnamed = table("further fits that failed", [_MODEL, _MATRIX, fit, why], frame="unnamed", **filtered)
    counts = [reason, Column("matrices", kind="num", format="count")]
    left = table("left out on purpose", counts, left_out, sort=1, descending=True)
    some = any(not on_purpose[each] for each in all_reasons)
    explained = note("These matrices have an alpha; what is named has no value.")
    return [
        _part("Models without a result", failed if index["failures"] else note("Every model has a result.", "soft")),
        _part(
            "Matrices without a valid fit",
            unfitted if some else note("Every analysed matrix has a valid fit.", "soft"),
        ),
        _part("Further fits that failed", explained, unnamed) if any(model["notes"] for model in models) else None,
        _part("Left out on purpose", left) if left_out else None,
    ]


# --- one model --------------------------------------------------------------------------------------------------------


def _model(index: Index) -> list[Node]:
    left_out = (
        "Alpha and D of its matrices were left out to keep the page small; they are in stats/, and gpuherd esd plot "
        "--kind alpha draws them."
    )
    alphas = live((), *_histogram("histogram of alpha", 200), part="histogram")
    histogram = _part("How alpha is distributed", alphas)
    modules = repeat("depths.modules", key("{colour}", None, "{word}"))
    keys = element("div", key("var(--mark)", None, "median"), modules, kind="legend")
    depth = _part("Alpha over depth", depth_chart(), keys, note("{depths.note}"))
    every = _part("All matrices", _matrices(index["meanings"]))
    return [
        card("{id}", *_origin(), _facts(), *_base(), missing("alphas", note(left_out, "note warn"))),
        given(
            "alphas",
            _heat(),
            live("layer", _matrix(), part="matrix", place="matrix"),
            given("deep", element("div", histogram, depth, kind="pair")),
            missing("deep", histogram),
        ),
        every,
    ]


def _histogram(label: str, height: int) -> list[Node]:
    """Histograms of alpha with their legend."""
    keys = element("div", repeat("series", key("{colour}", None, "{series}")), kind="legend")
    return [histogram_chart(label, height), keys, given("note", note("{note}"))]


def _origin() -> list[Node]:
    """What the model is said to come from."""
    return [
        given("parent", element("div", "{kind} of ", _model_link("parent"), kind="soft")),
        given("absent", element("div", "{kind} of {absent} (not in this run)", kind="soft")),
        missing("parent", missing("absent", given("relation", element("div", "{relation}", kind="soft")))),
    ]


def _facts() -> Node:
    def fact(value: str, words: str) -> Node:
        return element("span", element("b", value), f" {words}")

    return element(
        "div",
        fact("{fitted:count}", "matrices with a fit"),
        given("without", fact("{without}", "without a fit")),
        given("skipped", fact("{skipped}", "not analysed")),
        fact("{params:many}", "weights"),
        known("covered", fact("{covered:percent}", "of the checkpoint covered")),
        fact("{mean:figure}", "mean alpha"),
        fact("{median:figure}", "median alpha"),
        fact("{d:figure}", "median D"),
        kind="facts",
    )


def _base() -> list[Node]:
    stated = given("other", ", stated one: {change:figure4}")
    sentence = [
        "Nearest base of this run: ",
        _model_link("base"),
        " (median |Δalpha| {near:figure4}",
        stated,
        "): {words}",
    ]
    return [given("base", element("p", *sentence, kind="note {tone}"))]


def _heat() -> Node:
    """alpha by layer and module, or its difference from another model."""
    heading = [
        given("against", element("h3", "alpha minus that of {against.id}", kind="grow")),
        missing("against", element("h3", "Alpha by layer and module", kind="grow")),
    ]
    compare = choose("against", "compare with", "{options}")
    alone = [
        "2 to 6 is where well-trained layers are expected; neutral at 4. Hatched: no valid fit.",
        given("outside", " Column –: matrices outside the numbered layers."),
    ]
    change = "Median |Δalpha| {middle:figure4}. Hatched: no such layer or no fit."
    explained = [
        given("against", element("span", change, kind="note")),
        missing("against", element("span", *alone, kind="note")),
    ]
    bar = element("div", *heading, given("related", compare), kind="bar")
    return card(None, bar, element("heat", *explained))


def _matrix() -> Node:
    """The chosen matrix: its spectrum and its figures."""
    steps = [step("layer", "Previous", "before", "first"), step("layer", "Next", "after", "last")]
    fitted = [
        "alpha {alpha:figure}",
        given("interval", "{interval}"),
        ", D {D:figure}",
        known("xmin", ", xmin {xmin:figure}"),
    ]
    keys = [
        ("eigenvalues", "var(--accent)", None),
        ("fitted power law, from xmin on", "var(--fit)", "fitted"),
        ("edge of the Marchenko–Pastur bulk", "var(--edge)", "edge"),
    ]
    strokes = [(key(colour, None, words), need) for words, colour, need in keys]
    shown = [stroke if need is None else given(need, stroke) for stroke, need in strokes]
    figure = element("div", element("dt", "{name}", title="{why}"), element("dd", "{text}"))
    meaning = [element("dt", "{name}"), element("dd", "{why}")]
    return element(
        "section",
        element("div", element("h2", "{name}", kind="grow"), element("span", *steps, kind="together"), kind="bar"),
        given("reason", element("p", "No valid fit: {reason}", kind="bad")),
        missing("reason", element("p", *fitted)),
        given(
            "spectrum",
            element("div", *(element("div", each) for each in spectrum_charts()), kind="pair"),
            element("div", *shown, kind="legend"),
        ),
        given("whyNone", note("{whyNone}")),
        element("dl", repeat("cells", figure), kind="figures"),
        repeat("failed", element("p", "{fit}: {reason}", kind="warn")),
        fold(
            "What these figures mean",
            note("Eigenvalues λ are squared singular values, not divided by the matrix's size."),
            element("dl", repeat("meanings", *meaning)),
            name="meanings",
            kind="how meanings",
        ),
        given("thin", note("Its other figures were left out to keep the page small; they are in stats/.")),
        kind="card",
    )


def _matrices(meanings: Mapping[str, str]) -> Node:
    further = ("xmin", "num_evals", "stable_rank")
    columns = [
        Column("matrix", kind="name", field="name", shows=pick("layer", "{number}", "{name}")),
        Column("M", kind="num rare", format="text", field="rows"),
        Column("N", kind="num rare", format="text", field="columns"),
        Column("alpha", meanings.get("alpha"), "num", "figure", field="alpha"),
        Column("D", meanings.get("D"), "num", "figure", field="D"),
        *(Column(name, meanings.get(name), "num rare", "figure", field=name, given=f"has.{name}") for name in further),
        Column("without a fit because", kind="rare", field="reason", shows=given("reason", "{reason}")),
    ]
    return table(
        "all matrices",
        columns,
        field="matrices",
        hint="filter by words",
        words=("name", "reason"),
        mark=("layer", "number"),
    )
