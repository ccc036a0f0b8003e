"""The result files: ``stats/<model>.csv``, one row a matrix, and ``esd_results_summary.csv``, one row a model.

Knows columns and how a value is written: floats so that they read back bit for bit, no value as an empty cell, so that
a second run of the same analysis gives the same bytes. Does not know jobs or the queue.

A spreadsheet runs a cell that starts with ``=``, ``+``, ``-`` or ``@`` as a formula. Text from a model list or a
checkpoint that does so, and is not a number, is written with an apostrophe in front; ``plain`` takes it off again.
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuherd.errors import printable
from gpuherd.esd.config import CONVENTION
from gpuherd.esd.row import NOT_METRICS, LayerRow

FIT_OK = "ok"
SKIPPED = "not analysed: "
# Alphas below and above these are read as signs of too much and too little training (Martin & Mahoney).
OVERTRAINED, UNDERTRAINED = 2.0, 6.0
# The last four are wide forms of the first, which some spreadsheets take for them.
FORMULA_STARTS = tuple("=+-@\t'\uff1d\uff0b\uff0d\uff20")
# C0 and C1 controls but tab and line feed; and surrogates, which no UTF-8 file can hold.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

LINEAGE_COLUMNS = ("model_id", "source_model", "base_model_relation")
CONVENTION_COLUMNS = (*CONVENTION, "gpuherd_version")


@dataclass(frozen=True, slots=True)
class Origin:
    """What every row of a stats file repeats: whose weights these are, and how they were analysed.

    ``convention`` is ``AnalysisOptions.convention_columns``.
    """

    model_id: str
    source_model: str | None
    relation: str
    convention: Mapping[str, Any]
    gpuherd_version: str

    @property
    def lineage(self) -> dict[str, Any]:
        """The first columns."""
        return dict(zip(LINEAGE_COLUMNS, (self.model_id, self.source_model, self.relation), strict=True))

    @property
    def last_columns(self) -> dict[str, Any]:
        """CONVENTION_COLUMNS."""
        return {**self.convention, "gpuherd_version": self.gpuherd_version}


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model's row in the summary.

    Attributes:
        lineage: the model's own columns (LINEAGE_COLUMNS), then the extra columns of the list.
        layers: matrices with a fit; only these count in ``metrics``.
        without_fit: matrices that were analysed but have no valid fit.
        skipped: matrices that are not analysed, as embeddings are by default.
        params: weights in all analysed matrices.
        params_share: of the model's weights (biases and norms too, tied ones once) those in matrices with a fit, 0 to
            1; None where there is no coverage table.
        overtrained: layers whose alpha is below 2.
        undertrained: layers whose alpha is above 6.
        metrics: ``alpha_median``, then of each metric ``<metric>_mean``, ``_std`` (of a sample; None for a single
            layer), ``_min``, ``_max``.
        convention: CONVENTION_COLUMNS.
    """

    lineage: Mapping[str, str]
    layers: int
    without_fit: int
    skipped: int
    params: int
    params_share: float | None
    overtrained: int
    undertrained: int
    metrics: Mapping[str, float | None]
    convention: Mapping[str, str]
    extra: Mapping[str, str] = field(default_factory=dict)

    def columns(self) -> dict[str, Any]:
        """All cells, in order. An extra column with the name of one of ours is called ``list_<name>``."""
        counts = {"layers": self.layers, "layers_without_fit": self.without_fit, "layers_skipped": self.skipped}
        trained = {"layers_alpha_below_2": self.overtrained, "layers_alpha_above_6": self.undertrained}
        weights = {"params": self.params, "params_share": self.params_share}
        own = counts | trained | weights | dict(self.metrics) | dict(self.convention)
        taken = own.keys() | self.lineage.keys()
        extra = {f"list_{name}" if name in taken else name: text for name, text in self.extra.items()}
        return dict(self.lineage) | extra | own


def stats_rows(origin: Origin, rows: Iterable[LayerRow]) -> list[dict[str, Any]]:
    """The cells of a model's stats file by column, a row a matrix; without the columns of options that are off."""
    return [origin.lineage | row.cells(origin.convention) | origin.last_columns for row in rows]


def table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV text. The columns are those of all rows, in the order in which they first occur."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([cell_text(name) for name in names])
    writer.writerows([cell_text(row.get(name)) for name in names] for row in rows)
    return out.getvalue()


def cell_text(value: Any) -> str:
    """A value as a cell: floats by repr (exact), None as nothing, text so that no spreadsheet runs it.

    A carriage return becomes a line feed: Python's csv would write it without quotes and read it as the end of the row.
    Other control characters are written as escapes: a tensor's name must not drive the terminal that shows the file.
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(value)
    text = _CONTROL.sub(lambda found: printable(found[0]), str(value).replace("\r\n", "\n").replace("\r", "\n"))
    return f"'{text}" if text.startswith(FORMULA_STARTS) and not _is_number(text) else text


def plain(text: str) -> str:
    """The text of a cell as it was before ``cell_text`` protected it."""
    return text[1:] if text.startswith("'") else text


def stored_text(text: str) -> str:
    """Text as it comes back from a stats file: what stands in our other files too, so that names of all agree."""
    return plain(cell_text(text))


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of one of our CSV files, protection taken off."""
    return list(_rows_of(path))


def first_row(path: Path) -> dict[str, str]:
    """The first of them, for what all rows repeat; empty where there is none."""
    with closing(_rows_of(path)) as rows:
        return next(rows, {})


def _rows_of(path: Path) -> Generator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, strict=True)
        names = [plain(name) for name in next(reader, [])]
        for cells in reader:
            yield dict(zip(names, map(plain, cells), strict=True))


def has_fit(rows: Iterable[LayerRow]) -> bool:
    """Whether any matrix has a valid fit. A model without one has failed: its file would only look like a result."""
    return any(row.fit_status == FIT_OK for row in rows)


def no_fit_reason(rows: Sequence[LayerRow]) -> str:
    """One sentence that says why no matrix of a model has a fit: the commonest reason, with the first that has it."""
    analysed = [row for row in rows if not row.fit_status.startswith(SKIPPED)]
    if not rows:
        return "the model has no weight matrix that can be analysed"
    reason = statistics.mode(row.fit_status for row in analysed or rows)
    first = next(row for row in rows if row.fit_status == reason)
    if not analysed:
        return f"the model has no weight matrix that can be analysed; {first.longname} is {reason}"
    return f"none of its {len(analysed)} matrices has a valid fit; {first.longname}: {reason}"


def summarise(
    rows: Sequence[Mapping[str, str]], extra: Mapping[str, str], params_share: float | None = None
) -> ModelSummary:
    """A model's summary from the rows of its stats file, as ``read_table`` gives them."""
    first = rows[0]
    fitted = [row for row in rows if row["fit_status"] == FIT_OK]
    analysed = [row for row in rows if not row["fit_status"].startswith(SKIPPED)]
    outside = NOT_METRICS.union(LINEAGE_COLUMNS, CONVENTION_COLUMNS)
    alphas = [float(row["alpha"]) for row in fitted]
    metrics: dict[str, float | None] = {"alpha_median": statistics.median(alphas) if alphas else None}
    for name in first:
        if name not in outside:
            metrics |= _statistics(name, [_number(row[name]) for row in fitted if row[name] != ""])
    return ModelSummary(
        lineage={name: first[name] for name in LINEAGE_COLUMNS},
        layers=len(fitted),
        without_fit=len(analysed) - len(fitted),
        skipped=len(rows) - len(analysed),
        params=sum(int(row["params"]) for row in analysed),
        params_share=params_share,
        overtrained=sum(alpha < OVERTRAINED for alpha in alphas),
        undertrained=sum(alpha > UNDERTRAINED for alpha in alphas),
        metrics=metrics,
        convention={name: first[name] for name in CONVENTION_COLUMNS},
        extra=extra,
    )


def _statistics(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Mean, sample standard deviation, least and largest of one metric; None where there is no such value."""
    if not values:
        return {f"{name}_{kind}": None for kind in ("mean", "std", "min", "max")}
    mean = math.fsum(value / len(values) for value in values)
    std = _sample_deviation([value - mean for value in values])
    return {f"{name}_mean": mean, f"{name}_std": std, f"{name}_min": min(values), f"{name}_max": max(values)}


def _sample_deviation(differences: Sequence[float]) -> float | None:
    """Root of the sum of squares over n - 1; the largest is taken out first, so that no square overflows."""
    if len(differences) < 2:
        return None
    scale = max(map(abs, differences))
    if scale == 0 or not math.isfinite(scale):
        return scale
    return scale * math.sqrt(math.fsum((d / scale) ** 2 for d in differences) / (len(differences) - 1))


def _number(text: str) -> float:
    """The number in a cell; a count stays a whole number."""
    return int(text) if text.removeprefix("-").isdigit() else float(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
