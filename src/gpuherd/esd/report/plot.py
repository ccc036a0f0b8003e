"""Plots for papers: spectra of a model's layers with their fitted laws, and its alphas by layer and module.

The same results give the same picture. Knows nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

from gpuherd.errors import UsageError, printable
from gpuherd.esd.views import alpha_matrix, place_of
from gpuherd.options import nearest
from gpuherd.report.charts import BLUE, GREY, RED, blank_figure, plain_text

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from gpuherd.esd.spectrum_files import StoredSpectrum
    from gpuherd.esd.views import AlphaMatrix

    Floats = NDArray[np.float64]

Kind = Literal["ccdf", "hist", "both", "alpha"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_LAYERS = 36
_WIDTH, _HEIGHT = 4.2, 3.0  # of a panel, in inches
# Neutral at 4, the middle of 2 to 6 where the literature puts well-trained layers; as on the page of a run.
_STOPS = (1.0, 2.0, 4.0, 6.0, 12.0)
_COLOURS = ("#08306b", "#5e9ecf", "#f5f5f2", "#e8923a", "#6e2c04")


def spectra_figure(layers: Sequence[StoredSpectrum], kind: Kind, title: str) -> Figure:
    """The spectra of some layers in log-log, a panel each (two with ``both``): share of eigenvalues from each on, or
    their density over log10 λ, with the fitted power law from xmin on.

    Raises:
        UsageError: no layer, or more than MOST_LAYERS.
        MissingExtra: matplotlib is not installed.
    """
    if not 1 <= len(layers) <= MOST_LAYERS:
        raise UsageError(f"{len(layers)} layers are to be drawn; 1 to {MOST_LAYERS} fit: narrow the pattern")
    panels: list[tuple[StoredSpectrum, str]] = [
        (layer, each) for layer in layers for each in (("ccdf", "hist") if kind == "both" else (kind,))
    ]
    wide = 2 if kind == "both" else min(len(panels), math.ceil(math.sqrt(len(panels))))
    high = math.ceil(len(panels) / wide)
    figure = blank_figure(_WIDTH * wide, _HEIGHT * high + 0.4)
    axes = figure.subplots(high, wide, squeeze=False).ravel()
    for place, (layer, each) in zip(axes, panels, strict=False):
        _draw_ccdf(place, layer) if each == "ccdf" else _draw_histogram(place, layer)
        place.set_title(plain_text(layer.longname), fontsize=8)
    for place in axes[len(panels) :]:
        place.set_axis_off()
    figure.suptitle(title, fontsize=10)
    _explain_lines(figure, any(_law(layer) is not None for layer in layers))
    return figure


def alpha_figure(alphas: Sequence[tuple[str, float | None]], title: str) -> Figure:
    """alpha by layer (across) and module (down), in colours that are neutral at 4.

    Cells of a matrix without a fit are hatched, those without a matrix empty.

    Args:
        alphas: by names of matrices, in the order of the model; None without a valid fit.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    import numpy as np

    matrix = alpha_matrix((printable(name), alpha) for name, alpha in alphas)
    figure = blank_figure(max(_WIDTH, 2.4 + 0.28 * len(matrix.layers)), max(_HEIGHT, 1.2 + 0.24 * len(matrix.modules)))
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    axes = figure.subplots()
    values = np.array([[np.nan if each is None else each for each in row] for row in matrix.values]).T
    # Each stretch between two stops has a quarter of the colours.
    place = np.interp(values, _STOPS, np.linspace(0, 1, len(_STOPS)))
    place[np.isnan(values)] = np.nan
    colours = LinearSegmentedColormap.from_list("alpha", _COLOURS)
    picture = axes.imshow(np.ma.masked_invalid(place), cmap=colours, norm=Normalize(0, 1), aspect="auto")
    columns = [_column(matrix, at) for at in range(len(matrix.layers))]
    axes.set_xticks(range(len(columns)), columns, fontsize=7, rotation=90 if max(map(len, columns)) > 3 else 0)
    axes.set_yticks(range(len(matrix.modules)), [plain_text(name, 36) for name in matrix.modules], fontsize=7)
    axes.set_xlabel("layer")
    axes.set_ylabel("module")
    unfitted = [place_of(printable(name)) for name, alpha in alphas if alpha is None]
    _hatch(axes, [(matrix.layers.index(at.layer), matrix.modules.index(at.module)) for at in unfitted])
    bar = figure.colorbar(picture, ax=axes, ticks=np.linspace(0, 1, len(_STOPS)))
    bar.ax.set_yticklabels(["1", "2", "4", "6", "12+"], fontsize=8)
    bar.set_label("alpha (hatched: no valid fit)" if unfitted else "alpha")
    axes.set_title(title, fontsize=10)
    return figure


def _draw_ccdf(axes: Axes, layer: StoredSpectrum) -> None:
    x, y = 10.0 ** layer.sketch.log10_lambda.astype(float), 10.0 ** layer.sketch.log10_ccdf.astype(float)
    axes.loglog(x, y, color=BLUE, linewidth=1.5)
    axes.set_xlabel("eigenvalue λ", fontsize=8)
    axes.set_ylabel("share of eigenvalues ≥ λ", fontsize=8)
    if (law := _law(layer)) is not None:
        at, start, alpha = law
        axes.loglog(at, start * (at / at[0]) ** (1 - alpha), color=RED, linestyle="--", linewidth=1.5)
    _finish(axes, layer)


def _draw_histogram(axes: Axes, layer: StoredSpectrum) -> None:
    import numpy as np

    logs = layer.sketch.log10_lambda
    counts = layer.sketch.histogram.reshape(-1, bins_together(layer.sketch.count)).sum(axis=1)
    if len(logs) > 1:
        edges = np.linspace(float(logs[0]), float(logs[-1]), len(counts) + 1)
        heights = counts / counts.sum() / np.diff(edges)
        axes.bar(10.0 ** edges[:-1], heights, np.diff(10.0**edges), align="edge", color=BLUE, alpha=0.6)
        axes.set(xscale="log", yscale="log")
        axes.set_ylim(bottom=heights[heights > 0].min() / 2)  # the lowest bar is to be seen
    axes.set_xlabel("eigenvalue λ", fontsize=8)
    axes.set_ylabel("density over log10 λ", fontsize=8)
    if (law := _law(layer)) is not None:
        at, start, alpha = law
        density = start * (alpha - 1) * math.log(10) * (at / at[0]) ** (1 - alpha)
        axes.loglog(at, density, color=RED, linestyle="--", linewidth=1.5)
    _finish(axes, layer)


def bins_together(count: int) -> int:
    """How many of a sketch's 64 bins make one bar, so that each holds some of ``count`` eigenvalues; as on the page."""
    return 4 if count < 120 else 2 if count < 1000 else 1


def _law(layer: StoredSpectrum) -> tuple[Floats, float, float] | None:
    """Eigenvalues from xmin to the largest, the share of all from xmin on, and alpha; None without a fit."""
    import numpy as np

    logs, shares = layer.sketch.log10_lambda.astype(float), layer.sketch.log10_ccdf.astype(float)
    if layer.alpha is None or layer.xmin is None or len(logs) < 2 or layer.xmin <= 0:
        return None
    begin = math.log10(layer.xmin)
    start = 10.0 ** float(np.interp(begin, logs, shares))
    return 10.0 ** np.linspace(begin, max(begin, logs[-1]), 50), start, layer.alpha


def _finish(axes: Axes, layer: StoredSpectrum) -> None:
    axes.tick_params(which="both", labelsize=7)
    _label_logarithms(axes)
    axes.grid(alpha=0.25)
    if layer.alpha is None or layer.xmin is None:
        words = "no valid fit"
    else:
        axes.axvline(layer.xmin, color=GREY, linestyle=":", linewidth=1)
        words = f"alpha {layer.alpha:.3f}\nxmin {layer.xmin:.4g}" + ("" if layer.D is None else f"\nD {layer.D:.4f}")
    # Where neither the falling share nor the rising bulk of a histogram is.
    bottom = axes.get_ylabel().startswith("share")
    y, side = (0.05, "bottom") if bottom else (0.95, "top")
    box = {"facecolor": "white", "alpha": 0.7, "lw": 0}
    axes.text(0.03, y, words, transform=axes.transAxes, fontsize=7, verticalalignment=side, bbox=box)


def _label_logarithms(axes: Axes) -> None:
    """Labels at powers of ten; over less than two decades at 2 and 5 times these too, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() != "log":
            continue
        if high < 100 * low:
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _explain_lines(figure: Figure, with_law: bool) -> None:
    """What the lines are, below all panels."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=BLUE, linewidth=2, label="eigenvalues")]
    if with_law:
        lines.append(Line2D([], [], color=RED, linestyle="--", linewidth=1.5, label="fitted power law"))
        lines.append(Line2D([], [], color=GREY, linestyle=":", linewidth=1, label="xmin"))
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), fontsize=8, frameon=False)


def _hatch(axes: Axes, cells: Sequence[tuple[int, int]]) -> None:
    """Hatches some cells, each given by its column and row."""
    from matplotlib.patches import Rectangle

    for column, row in cells:
        axes.add_patch(
            Rectangle((column - 0.5, row - 0.5), 1, 1, hatch="////", edgecolor="#999999", facecolor="none", linewidth=0)
        )


def _column(matrix: AlphaMatrix, at: int) -> str:
    """A layer's number; its name where it has none, or where several stacks have one of that number."""
    number = matrix.numbers[at]
    if number is None or matrix.numbers.count(number) > 1:
        return plain_text(matrix.layers[at], 18)
    return str(number)


def title_of(model_id: str, convention: Mapping[str, str]) -> str:
    """The title of a picture: whose weights these are, and by which convention alpha is.

    >>> title_of("gpt2", {"fix_fingers": "DKS", "ks": "one-sided"})
    'gpt2 (DKS, one-sided)'
    """
    words = [convention[name] for name in ("fix_fingers", "ks") if convention.get(name)]
    return plain_text(model_id, 90) + (f" ({plain_text(', '.join(words))})" if words else "")


def matching(
    layers: Sequence[StoredSpectrum], pattern: str, without: Mapping[str, str] = MappingProxyType({})
) -> list[StoredSpectrum]:
    """The layers whose names match a shell pattern, or, where none does, contain it.

    Args:
        without: the matrices that have no spectrum, and why.

    Raises:
        UsageError: none does; says why where a matrix without a spectrum does, else names the nearest.
    """
    names = [layer.longname for layer in layers]
    wanted = _matching(names, pattern)
    if not wanted:
        if others := _matching([*without], pattern):
            raise UsageError(f"{others[0]} has no spectrum: {without[others[0]]}")
        near = nearest(pattern, names, most=3, cutoff=0.3) or names[:3]
        raise UsageError(f"no layer matches {pattern!r}; for example: {', '.join(near)}")
    kept = set(wanted)
    return [layer for layer in layers if layer.longname in kept]


def _matching(names: Sequence[str], pattern: str) -> list[str]:
    from fnmatch import fnmatchcase

    return [name for name in names if fnmatchcase(name, pattern)] or [name for name in names if pattern in name]
