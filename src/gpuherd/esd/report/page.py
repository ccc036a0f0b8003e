"""The page of a run: one HTML file with all that it shows inside it, which asks nothing of any network.

Packs the arrays of its models within a size; the template escapes, the script draws. What a stranger named (models,
tensors, reasons) enters the page deflated and in base64, or through Jinja's autoescape, and the script puts it on the
screen as text only. A Content-Security-Policy with the hashes of our own script and style forbids everything else,
requests included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpuherd.errors import BadModel
from gpuherd.esd.folder import ESDDirectory, OnProgress
from gpuherd.esd.report.contents import Contents
from gpuherd.esd.report.reading import RunResults
from gpuherd.esd.report.views import VERDICTS, first_state, views_of
from gpuherd.esd.results import ModelTable, has_spectra, stored_spectra
from gpuherd.report.charts import COLOURS
from gpuherd.report.page import (
    MOST_BYTES,
    PageContents,
    as_text,
    by_weight,
    frame_bytes,
    packed_floats,
    packed_views,
    render_page,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gpuherd.esd.spectrum_files import Sketch


def packed_spectra(sketches: Sequence[Sketch | None], points: int) -> str:
    """The sketches of a model's layers, each thinned to ``points``; None for a layer that has none.

    Layout: for each layer 6 float32 (how many points, the ends of x and of y, the fullest bin), then its histogram, a
    byte a bin: ln(1 + count) as a fraction of that of the fullest bin, within 2 % of the count. Then all x, then all y:
    differences of 16-bit fractions between the ends.
    """
    import numpy as np

    from gpuherd.esd.spectrum_files import HISTOGRAM_BINS

    head = np.zeros((len(sketches), 6), np.float32)
    bins = np.zeros((len(sketches), HISTOGRAM_BINS), np.uint8)
    steps: list[list[NDArray[np.uint16]]] = [[], []]
    for number, sketch in enumerate(sketches):
        if sketch is None or len(sketch.log10_lambda) < 2:
            continue
        keep = thinned(len(sketch.log10_lambda), points)
        head[number, 0] = len(keep)
        for axis, all_values in enumerate((sketch.log10_lambda, sketch.log10_ccdf)):
            values = np.asarray(all_values, np.float64)[keep]
            low, high = float(values.min()), float(values.max())
            head[number, 1 + 2 * axis : 3 + 2 * axis] = low, high
            fraction = np.rint((values - low) / (high - low or 1.0) * 65535).astype(np.uint16)
            steps[axis].append(np.diff(fraction, prepend=np.uint16(0)))
        fullest = int(sketch.histogram.max())
        head[number, 5] = fullest
        bins[number] = np.rint(255 * np.log1p(sketch.histogram) / np.log1p(max(1, fullest)))
    body = [np.concatenate(each) if each else np.zeros(0, np.uint16) for each in steps]
    parts = [by_weight(head.astype("<f4")), bins.tobytes(), *(by_weight(each.astype("<u2")) for each in body)]
    return as_text(b"".join(parts))


def thinned(count: int, points: int) -> list[int]:
    """Indices of at most ``points`` of ``count``, evenly, with both ends."""
    if count <= points:
        return list(range(count))
    return sorted({round(step * (count - 1) / (points - 1)) for step in range(points)})


logger = logging.getLogger(__name__)

_SCRIPTS = ("records.js", "heatmap.js", "charts.js")
_FOLDER = Path(__file__).parent
_MOST_FAILURES = 200  # that are listed for readers without a script
# Characters that a point of a spectrum takes, and its histogram and ends (measured: 2.4 to 4.0, 70 to 110).
_POINT_BYTES, _HISTOGRAM_BYTES = 4.0, 110
_LEAST_POINTS, _MOST_POINTS = 20, 100


@dataclass(frozen=True, slots=True)
class Page:
    """The finished page.

    Attributes:
        html: its bytes, UTF-8.
        models: how many it shows.
        with_alphas, with_figures, with_spectra: of how many it has alpha and D of each matrix, all figures, and
            spectra; the others were left out for size.
    """

    html: bytes
    models: int
    with_alphas: int
    with_figures: int
    with_spectra: int


def make_page(results: RunResults, *, most_bytes: int = MOST_BYTES, on_progress: OnProgress | None = None) -> Page:
    """The page of a run.

    What is known of each model as a whole is always in it; then, of as many models as fit, in order, alpha and D of
    every matrix; then all other figures and the spectra, in as many points as there is room for.

    Args:
        most_bytes: what the page may grow to with figures and spectra; with alpha and D it grows to MOST_BYTES.
        on_progress: called with how many models are packed, and how many there are.

    Raises:
        MissingExtra: Jinja2 is not installed.
    """
    contents = Contents(results)
    models = range(len(results.models))
    empty = _page(results, contents, contents.warnings, {})
    taken = sum(map(len, packed_views(empty).values())) + frame_bytes(empty) + 64 * len(models)
    # Bounded whatever the caller's limit is: without alphas there is no page of a model.
    room = _CharacterBudget(max(0, MOST_BYTES - taken), set())
    cores = [room.take("alphas", partial(_packed_core, model)) for model in results.models]
    left = most_bytes - taken - sum(map(len, cores))
    details = _details(results, contents, cores, left, on_progress)
    contents.without_alphas = frozenset(number for number in models if not cores[number])
    contents.left_out = frozenset(models) - details.figures
    contents.stored = frozenset(details.stored)
    packed = {f"model-{number}": blob for number, blob in enumerate(details.blobs)}
    html = render_page(_page(results, contents, _notes(results, contents, details), packed))
    with_alphas = len(models) - len(contents.without_alphas)
    return Page(html, len(models), with_alphas, len(details.figures), len(details.spectra))


def _page(results: RunResults, contents: Contents, notes: Sequence[str], blobs: Mapping[str, str]) -> PageContents:
    """What the page shows: the views are declared, the index has the records of their tables."""
    index = contents.index()
    return PageContents(
        title=f"ESD of {results.directory.root.name}",
        views=views_of(index),
        facts=contents.facts(),
        notes=notes,
        settings_title=f"How it was analysed: {contents.method}",
        settings=sorted(contents.convention.items()),
        without_script="Its figures are also in stats/*.csv of the run folder.",
        failures=contents.failures[:_MOST_FAILURES],
        state=first_state(index),
        extra=index | {"colours": COLOURS, "verdicts": VERDICTS},
        blobs=blobs,
        scripts=[_FOLDER / name for name in _SCRIPTS],
        styles=[_FOLDER / "spectra.css"],
    )


@dataclass(slots=True)
class _CharacterBudget:
    """The characters that are left for what may be left out; what does not fit ends its kind for all later models."""

    left: int
    ended: set[str]

    def take(self, kind: str, make: Callable[[], str]) -> str:
        """The text where there is room for it, else nothing."""
        if kind in self.ended:
            return ""
        text = make()
        if len(text) > self.left:
            self.ended.add(kind)
            return ""
        self.left -= len(text)
        return text


class _Details(NamedTuple):
    """The blobs, and the models, by index, with figures in the page, with spectra in it, and with spectra on disk."""

    blobs: list[str]
    figures: set[int]
    spectra: set[int]
    stored: set[int]


def _details(
    results: RunResults, contents: Contents, cores: Sequence[str], left: int, on_progress: OnProgress | None
) -> _Details:
    """Each model's blob: its core, and as long as there is room its figures and its spectra."""
    with_file = {
        number
        for number, model in enumerate(results.models)
        if model.has_spectrum or has_spectra(results.directory, model.stem)
    }
    points = _points(results, contents, left, with_file)
    room = _CharacterBudget(max(0, left), set())
    found = _Details([], set(), set(), with_file)
    for number, (model, core) in enumerate(zip(results.models, cores, strict=True)):
        figures_text = room.take("figures", partial(_packed_figures, model, contents)) if core else ""
        spectra_text = ""
        if figures_text:
            found.figures.add(number)
            if number in with_file and "spectra" not in room.ended:
                sketches = _sketches(results.directory, model)
                if sketches is None:
                    with_file.discard(number)
                else:
                    spectra_text = room.take("spectra", partial(packed_spectra, sketches, points))
        if spectra_text:
            found.spectra.add(number)
        found.blobs.append(" ".join((core, figures_text, spectra_text)).rstrip())
        if on_progress is not None:
            on_progress(number + 1, len(cores))
    return found


def _packed_core(model: ModelTable) -> str:
    """alpha and D."""
    return f"{packed_floats(model.figures['alpha'])} {packed_floats(model.figures['D'])}"


def _packed_figures(model: ModelTable, contents: Contents) -> str:
    import numpy as np

    return packed_floats(np.concatenate([np.empty(0), *(model.figures[name] for name in contents.figures_of(model))]))


def _points(results: RunResults, contents: Contents, left: int, with_file: Collection[int]) -> int:
    """How many points of each spectrum fit into the page with the figures, judged by those of the first model."""
    if not with_file:
        return _MOST_POINTS
    first = results.models[0]
    a_layer = len(_packed_figures(first, contents)) / max(1, len(first.names))
    figures = a_layer * sum(len(model.names) for model in results.models)
    return points_a_layer(left - figures, sum(len(results.models[number].names) for number in with_file))


def points_a_layer(room: float, layers: int) -> int:
    """How many points of each of so many spectra fit into so many characters: 20 to 100.

    >>> points_a_layer(9_000_000, 300), points_a_layer(9_000_000, 30_000), points_a_layer(9_000_000, 500_000)
    (100, 47, 20)
    """
    fitting = (room / max(1, layers) - _HISTOGRAM_BYTES) / _POINT_BYTES
    return max(_LEAST_POINTS, min(_MOST_POINTS, int(fitting)))


def _sketches(directory: ESDDirectory, model: ModelTable) -> list[Sketch | None] | None:
    """The sketch of each matrix, None for one without; None in all where they can't be read."""
    try:
        found = {layer.longname: layer.sketch for layer in stored_spectra(directory, model.stem).layers}
    except (BadModel, OSError) as problem:
        logger.warning("%s", problem)
        return None
    return [found.get(name) for name in model.names]


def _notes(results: RunResults, contents: Contents, details: _Details) -> list[str]:
    """What a reader must know before comparing, and what was left out."""
    notes = list(contents.warnings)
    models = len(results.models)
    without = len(contents.without_alphas)
    if len(details.figures) < models - without:
        notes.append(
            f"To limit the size of this page, {models - without - len(details.figures)} of {models} models show alpha "
            "and D only; their other figures are in stats/."
        )
    if without:
        notes.append(
            f"To limit the size of this page, the matrices of {without} of {models} models are not in it: of these it "
            "has the figures of the whole model, its lineage and its outliers. All figures are in stats/; gpuherd esd "
            "plot --kind alpha draws any model."
        )
    missing = len(details.stored) - len(details.spectra)
    if missing:
        notes.append(f"Spectra of {missing} models were left out for the same reason; gpuherd esd plot draws any.")
    return notes
