"""What the page of a run holds, as plain JSON values: models, layouts, lineage, outliers, failures. Pure.

A layout is the list of a model's matrices with their places and shapes; the fine-tunes of one base share one, so
that it stands in the page once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuherd.errors import printable
from gpuherd.esd.folder import IMPORTED
from gpuherd.esd.report.charts import LAST_ALPHA
from gpuherd.esd.report.lineage import Kinship, Near, Profile, common_names, kinships
from gpuherd.esd.report.reading import RunResults, short_reason
from gpuherd.esd.results import ModelTable
from gpuherd.esd.schema import FITS, MEANINGS
from gpuherd.esd.views import FIT_OK, SKIPPED, WHOLE, finite_or_none, place_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_MOST_OUTLIERS = 1000
_CORE = ("alpha", "D")
# Not what a figure depends on: results of two versions are shown side by side.
_VERSION = "gpuherd_version"
_BINS_A_UNIT = 4  # of histograms of alpha

LIMIT = 3.5
# With fewer values median and MAD say little.
LEAST = 8
_SCALE = 0.6745  # the upper quartile of the normal distribution: z is in standard deviations where x is normal


def robust_z(values: Floats) -> Floats:
    """The robust z-score of each value, z = 0.6745 (x - median) / MAD (Iglewicz and Hoaglin, How to Detect and Handle
    Outliers, 1993); median and MAD barely move with the outliers themselves.

    Returns:
        NaN for NaN, and for all where there are too few values or half of them are equal.
    """
    present = values[np.isfinite(values)]
    if len(present) < LEAST:
        return np.full(values.shape, np.nan)
    middle = np.median(present)
    spread = np.median(np.abs(present - middle))
    if spread == 0:
        return np.full(values.shape, np.nan)
    return np.asarray(_SCALE * (values - middle) / spread)


def alpha_z(alpha: Floats) -> Floats:
    """The robust z-score of each alpha among the others, on ln(alpha - 1).

    alpha itself is skewed to the right: 1 / (alpha - 1) is the mean of ln(λ / xmin) in the tail, so that on this scale
    a factor up and one down are as far.
    """
    return robust_z(np.log(np.where(alpha > 1, alpha - 1, np.nan)))


def outlying(alpha: Floats) -> list[tuple[int, float]]:
    """The places of the alphas with |z| > LIMIT and z, in robust standard deviations, signed; the farthest first."""
    z = alpha_z(alpha)
    found = [(index, float(z[index])) for index in np.flatnonzero(np.abs(z) > LIMIT).tolist()]
    return sorted(found, key=lambda outlier: -abs(outlier[1]))


def medians(alphas: Sequence[Floats]) -> Floats:
    """The median alpha of each model, NaN for a model without any."""
    return np.array([np.median(each[np.isfinite(each)]) if np.isfinite(each).any() else np.nan for each in alphas])


class Contents:
    """What the page holds of ``results``.

    Attributes:
        left_out: models (by index) whose figures are not in the page, for its size.
        without_alphas: models whose alpha and D by matrix are not in it either.
        stored: models whose spectra are in the run folder, in the page or not.
    """

    def __init__(self, results: RunResults):
        self._results = results
        self._layouts: dict[tuple[Any, ...], int] = {}
        self.left_out: frozenset[int] = frozenset()
        self.without_alphas: frozenset[int] = frozenset()
        self.stored: frozenset[int] = frozenset()

    @cached_property
    def _figures(self) -> dict[str, int]:
        """Every column of numbers but the core's, numbered in the order in which they first occur."""
        names = dict.fromkeys(name for model in self._results.models for name in model.figures if name not in _CORE)
        return {name: number for number, name in enumerate(names)}

    def figures_of(self, model: ModelTable) -> list[str]:
        """The columns of a model that hold any number, in the order of its blob."""
        return [name for name in self._figures if name in model.present]

    @cached_property
    def convention(self) -> dict[str, str]:
        """What all models share of how they were analysed."""
        first = self._results.models[0].convention if self._results.models else {}
        return {
            name: value
            for name, value in first.items()
            if all(model.convention.get(name) == value for model in self._results.models)
        }

    @property
    def method(self) -> str:
        """The convention in a few words."""
        shown = [self.convention[name] for name in ("fix_fingers", "ks") if self.convention.get(name)]
        return ", ".join(shown) or "by several conventions"

    @property
    def warnings(self) -> list[str]:
        """What a reader must know first: models that can't be compared, and those that others have analysed."""
        notes = list(self._results.gpus)
        if unfinished := self._results.unfinished:
            states = ", ".join(f"{count:,} {state}" for state, count in unfinished.items())
            notes.append(f"This run was not finished when this page was made: {states}.")
        imported = sum(model.convention.get(_VERSION) == IMPORTED for model in self._results.models)
        if imported:
            notes.append(
                f"{imported} of {len(self._results.models)} models are published results that were imported: their "
                "fitted xmin and their spectra are not known."
            )
        names = {name for model in self._results.models for name in model.convention} - {_VERSION}
        mixed = sorted(names - self.convention.keys())
        if mixed:
            notes.append(
                f"These models were analysed by different conventions ({', '.join(mixed)}): their alphas can't be "
                "compared."
            )
        return notes

    def facts(self) -> list[tuple[str, str, str]]:
        """What the head of the page says: (name, value, the view that tells more or nothing)."""
        models, failures = self._results.models, self._results.failures
        facts = [
            ("models" if len(models) != 1 else "model", f"{len(models):,}", ""),
            ("matrices with a fit", f"{sum(model.fitted for model in models):,}", ""),
            ("weights", _many(sum(map(_analysed_params, models))), ""),
        ]
        if failures:
            facts.append(("failed or refused", f"{len(failures):,}", "#/failures"))
        if isinstance(started := self._results.record.get("started"), str):
            zone = " UTC" if started.endswith("+00:00") else ""
            facts.append(("started", printable(started[:16].replace("T", " ")) + zone, ""))
        return facts

    @cached_property
    def failures(self) -> list[list[str]]:
        """Models without a result: (model, kind, reason)."""
        return [
            [printable(each.model), printable(each.kind), short_reason(each.reason)] for each in self._results.failures
        ]

    @np.errstate(over="ignore")  # alphas beyond 1e307 have no mean: none is shown
    def index(self) -> dict[str, Any]:
        """All but the arrays of the models."""
        reasons: dict[str, int] = {}
        return {
            "models": [
                {**whole, **self._left_out(number, model, reasons)}
                for number, (model, whole) in enumerate(zip(self._results.models, self._models, strict=True))
            ],
            **self._shared,
            "reasons": [short_reason(reason) for reason in reasons],
            "on_purpose": [reason.startswith(SKIPPED) for reason in reasons],
        }

    # The index is made twice: once to know how large it is, and once with what is left out for that.

    @cached_property
    def _models(self) -> list[dict[str, Any]]:
        """What the page says of each model, whatever of it is left out."""
        return [self._model(model, kin) for model, kin in zip(self._results.models, self._kinships, strict=True)]

    @cached_property
    def _shared(self) -> dict[str, Any]:
        """What the index says of no single model, whatever is left out. ``_models`` comes first: it numbers layouts."""
        alphas = [model.alpha for model in self._results.models]
        return {
            "layouts": self._layout_rows(),
            "figures": [printable(name) for name in self._figures],
            "meanings": {name: MEANINGS[name] for name in (*_CORE, *self._figures) if name in MEANINGS},
            "fits": FITS,
            "pooled": _histogram(alphas),
            "outliers": self._outliers(medians(alphas)),
            "failures": self.failures,
        }

    @cached_property
    def _kinships(self) -> list[Kinship]:
        # Models of one layout share the tuple of names, so that they are found equal at once.
        shared: dict[tuple[str, ...], tuple[str, ...]] = {}
        profiles = []
        for model in self._results.models:
            if model.names not in shared:
                shared[model.names] = common_names(model.names)
            is_base = model.relation == "base" or (model.relation == "" and model.source_model is None)
            profiles.append(Profile(model.model_id, model.source_model, is_base, shared[model.names], model.alpha))
        return kinships(profiles)

    def _model(self, model: ModelTable, kin: Kinship) -> dict[str, Any]:
        alpha, distance = model.alpha[np.isfinite(model.alpha)], model.figures["D"]
        distance = distance[np.isfinite(distance)]
        without = len(model.names) - model.fitted - model.skipped
        figures = self.figures_of(model)
        return {
            "id": printable(model.model_id),
            "source": None if model.source_model is None else printable(model.source_model),
            "relation": printable(model.relation),
            "layout": self._layout(model),
            "fitted": model.fitted,
            "skipped": model.skipped,
            "without": without,
            "params": _analysed_params(model),
            "covered": None if model.covered is None else _short(model.covered),
            "mean": _short(alpha.mean()) if len(alpha) else None,
            "median": _short(np.median(alpha)) if len(alpha) else None,
            "min": _short(alpha.min()) if len(alpha) else None,
            "max": _short(alpha.max()) if len(alpha) else None,
            "d": _short(np.median(distance)) if len(distance) else None,
            "parent": kin.parent,
            "stated": _near(kin.stated),
            "nearest": _near(kin.nearest),
            "verdict": kin.verdict,
            "figures": [self._figures[name] for name in figures],
        }

    def _left_out(self, number: int, model: ModelTable, reasons: dict[str, int]) -> dict[str, Any]:
        """What is left out of a model, and its matrices without a fit."""
        return {
            "left_out": number in self.left_out,
            "stored": number in self.stored,
            "bad": [
                [at, reasons.setdefault(status, len(reasons))]
                for at, status in enumerate(model.status)
                if status != FIT_OK
            ],
            "notes": [] if number in self.left_out else self._notes(model, reasons),
            **({"alphas": False} if number in self.without_alphas else {}),
        }

    def _notes(self, model: ModelTable, reasons: dict[str, int]) -> list[list[Any]]:
        """Why a matrix has no truncated power law, Marchenko-Pastur fit, ...: (its index, the column, the reason)."""
        return [
            [at, name, reasons.setdefault(status, len(reasons))]
            for name, statuses in model.notes.items()
            for at, status in enumerate(statuses)
            if status not in ("", FIT_OK) and model.status[at] == FIT_OK
        ]

    def _layout(self, model: ModelTable) -> int:
        key = (model.names, model.rows, model.columns, model.params)
        return self._layouts.setdefault(key, len(self._layouts))

    def _layout_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "names": [printable(name) for name in names],
                "keys": list(common_names(names)),
                "rows": list(rows),
                "columns": list(columns),
                "params": list(params),
                **_places([printable(name) for name in names]),
            }
            for names, rows, columns, params in self._layouts
        ]

    def _outliers(self, medians_: Floats) -> dict[str, Any]:
        models = self._results.models
        found = [(number, *outlier) for number, model in enumerate(models) for outlier in outlying(model.alpha)]
        found.sort(key=lambda each: -abs(each[2]))
        layers = [[number, at, _short(models[number].alpha[at]), round(z, 2)] for number, at, z in found]
        apart = [[at, round(z, 2)] for at, z in outlying(medians_)]
        return {"layers": layers[:_MOST_OUTLIERS], "more": max(0, len(layers) - _MOST_OUTLIERS), "models": apart}


def _places(names: Sequence[str]) -> dict[str, list[Any]]:
    """Layer number and module of each matrix; the stack in front where a model has several (encoder and decoder)."""
    places = [place_of(name) for name in names]
    stacks = dict.fromkeys(place.layer.rpartition(".")[0] for place in places if place.number is not None)
    short = dict(zip(stacks, _differing(list(stacks)), strict=True))
    modules = []
    for name, place in zip(names, places, strict=True):
        stack = place.layer.rpartition(".")[0]
        if place.number is None:
            modules.append(name)
        elif len(stacks) > 1:
            modules.append(f"{short[stack]}.{place.module}")
        else:
            modules.append(stack if place.module == WHOLE and stack else place.module)
    return {"layer": [place.number for place in places], "module": modules}


def _differing(stacks: Sequence[str]) -> list[str]:
    """The stacks without the last words that all of them share, if that leaves something of each.

    >>> _differing(["encoder.block", "decoder.block"])
    ['encoder', 'decoder']
    """
    words = [stack.split(".") for stack in stacks]
    while len(words) > 1 and min(map(len, words)) > 1 and len({each[-1] for each in words}) == 1:
        words = [each[:-1] for each in words]
    return [".".join(each) for each in words]


def _histogram(alphas: Sequence[Floats]) -> list[int]:
    """Counts of alpha in bins of a quarter from 1 to 12; what is above, in one more."""
    bins = (LAST_ALPHA - 1) * _BINS_A_UNIT + 1
    counts = np.zeros(bins, np.int64)
    for alpha in alphas:
        place = np.floor((alpha[np.isfinite(alpha)] - 1) * _BINS_A_UNIT).clip(0, bins - 1)
        counts += np.bincount(place.astype(np.int64), minlength=bins)
    return [int(count) for count in counts]


def _analysed_params(model: ModelTable) -> int:
    if not model.skipped:
        return sum(model.params)
    return sum(
        params for params, status in zip(model.params, model.status, strict=True) if not status.startswith(SKIPPED)
    )


def _near(near: Near | None) -> list[Any] | None:
    return None if near is None else [near.model, _short(near.distance), near.layers]


def _short(value: Any) -> float | None:
    """A number in two digits more than a page shows: rounding it there once more must not change what is shown."""
    return finite_or_none(float(f"{float(value):.7g}"))


def _many(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
