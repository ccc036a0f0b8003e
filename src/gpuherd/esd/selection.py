"""Which matrices of a model are analysed: ``--layers`` and ``--exclude``. Pure: matrices in, matrices out.

Shell patterns (``*``, ``?``, ``[abc]``), case-sensitive, on the whole of a matrix's name or of its tensor's. A pattern
that matches nothing is an error and not an empty result: it was meant for another model, or is misspelt.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import translate
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from gpuherd.errors import BadModel
from gpuherd.esd.views import FIT_OK, SKIPPED, table_text

if TYPE_CHECKING:
    from gpuherd.esd.schema import LayerRow
    from gpuherd.models.tensors.matrices import WeightMatrix
    from gpuherd.models.tensors.source import TensorInfo

NOT_SELECTED = "not selected by --layers"
MOST_SHOWN = 3
# Names compared by spelling, which is slow; a model has some dozens of kinds of names.
MOST_COMPARED = 1000
LEAST_LIKENESS = 0.6


def selected(
    matrices: Sequence[WeightMatrix], tensors: Iterable[str], layers: Sequence[str], exclude: Sequence[str]
) -> list[WeightMatrix]:
    """The matrices, those that are left out with the reason in ``skip``.

    Args:
        matrices: of one model.
        tensors: names of all its tensors. A pattern may match one that is no matrix (``*.bias``) without an error.
        layers: patterns, of which a matrix must match one; none of them: all do.
        exclude: patterns, of which it may match none. They count more than ``layers``.

    Raises:
        BadModel: a pattern that matches no name of this model; its text names the nearest.
    """
    if not layers and not exclude:
        return list(matrices)
    names = list(dict.fromkeys([*(matrix.longname for matrix in matrices), *tensors]))
    compiled = {pattern: re.compile(translate(pattern)) for pattern in (*layers, *exclude)}
    for pattern, expression in compiled.items():
        if not any(expression.match(name) for name in names):
            option = "--layers" if pattern in layers else "--exclude"
            raise BadModel(f"{option} {pattern!r} matches no tensor of this model{_nearest(pattern, names)}")

    def first_match(matrix: WeightMatrix, patterns: Sequence[str]) -> str | None:
        both = (matrix.longname, matrix.tensor)
        return next((pattern for pattern in patterns if any(compiled[pattern].match(name) for name in both)), None)

    def judged(matrix: WeightMatrix) -> WeightMatrix:
        if matrix.skip is not None:
            return matrix
        excluded = first_match(matrix, exclude)
        if excluded is not None:
            return replace(matrix, skip=f"left out by --exclude {excluded!r}")
        return replace(matrix, skip=NOT_SELECTED) if layers and first_match(matrix, layers) is None else matrix

    return [judged(matrix) for matrix in matrices]


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """The end of the error: the names that were most likely meant.

    Names that have the pattern's words in them; else those that are spelt most like it, one for each kind of layer.
    """
    words = [word.strip(".").lower() for word in re.split(r"[*?]+|\[[^]]*\]", pattern)]
    words = [word for word in words if word]
    near = [name for name in names if words and all(word in name.lower() for word in words)]
    if not near:
        kinds: dict[str, str] = {}
        for name in names:
            kinds.setdefault(re.sub(r"\d+", "0", name).lower(), name)
        wanted = re.sub(r"\d+", "0", re.sub(r"[*?]", "", pattern)).lower()
        scored = sorted(((_likeness(wanted, kind), kind) for kind in list(kinds)[:MOST_COMPARED]), reverse=True)
        near = [kinds[kind] for score, kind in scored if score >= LEAST_LIKENESS]
    if not near:
        return f"; its first is {names[0]}" if names else ""
    hint = "" if any(sign in pattern for sign in "*?[") else f" (a pattern matches the whole name: '*{pattern}*'?)"
    return f"; nearest: {', '.join(near[:MOST_SHOWN])}{hint}"


def _likeness(wanted: str, name: str) -> float:
    """How alike they are spelt, 0 to 1: as a whole, or the end of the name, which is what patterns mostly give."""
    ends = (name, name[-len(wanted) :] if wanted else name)
    return max(difflib.SequenceMatcher(None, wanted, end, autojunk=False).ratio() for end in ends)


# --- Coverage ---------------------------------------------------------------------------------------------------------
#
# The coverage table of a model: every tensor of its checkpoint, analysed or why not. ``coverage/<model>.csv``.
#
# Knows tensors, matrices and rows. Does not compute anything from weights. Light: no numpy before a table is made.

logger = logging.getLogger(__name__)

# The status of a matrix of zeros (spectra.pooled).
ALL_ZERO = "all weights are zero"

Status = Literal["analysed", "skipped", "failed"]


@dataclass(frozen=True, slots=True)
class TensorCoverage:
    """A tensor of the checkpoint, in the order of the columns.

    Attributes:
        tensor: its name.
        shape: as stored, like ``768x2304``; ``1`` for a single number.
        dtype: as stored.
        params: numbers in it.
        matrices: weight matrices in it: the parts of a fused tensor, the experts of a mixture; 0 for one of one axis.
        params_analysed: weights in those of them that have a valid fit.
        status: ``analysed`` when any of its matrices has a valid fit, ``failed`` when none has though some should,
            else ``skipped``.
        reason: why it, or some of its matrices, are not analysed; None when all are.
    """

    tensor: str
    shape: str
    dtype: str
    params: int
    matrices: int
    params_analysed: int
    status: Status
    reason: str | None


@dataclass(frozen=True, slots=True)
class CoverageTotals:
    """What a table adds up to. ``params`` counts each weight once: no integers, buffers or tied copies."""

    tensors: int
    analysed: int
    failed: int
    params: int
    params_analysed: int

    @property
    def share(self) -> float:
        """The share of the model's weights in matrices with a valid fit: 0 to 1."""
        return self.params_analysed / self.params if self.params else 0.0

    def sentence(self) -> str:
        """The totals as a line of a log."""
        skipped = self.tensors - self.analysed - self.failed
        failed = f", {self.failed} failed" if self.failed else ""
        return (
            f"{self.analysed} of {self.tensors} tensors analysed ({skipped} skipped{failed}), "
            f"{self.share:.1%} of {self.params:,} weights"
        )


def without_unchanged(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """The rows of a difference, where a matrix of zeros is no failure: fine-tuning left that layer as it was."""
    from gpuherd.models.lora.update import SAME_AS_BASE

    same = f"{SKIPPED}{SAME_AS_BASE}"
    return [replace(row, fit_status=same) if row.fit_status == ALL_ZERO else row for row in rows]


def coverage(
    tensors: Mapping[str, TensorInfo], matrices: Sequence[WeightMatrix], rows: Sequence[LayerRow]
) -> list[TensorCoverage]:
    """A line for each tensor, in the order of the checkpoint. ``rows`` are those of ``matrices``, one each."""
    inside: dict[str, list[tuple[WeightMatrix, LayerRow]]] = {name: [] for name in tensors}
    for matrix, row in zip(matrices, rows, strict=True):
        inside[matrix.tensor].append((matrix, row))
    return [_line(info, inside[name]) for name, info in tensors.items()]


def _line(info: TensorInfo, inside: Sequence[tuple[WeightMatrix, LayerRow]]) -> TensorCoverage:
    status, reason = _judge(info, inside)
    return TensorCoverage(
        tensor=info.name,
        shape="x".join(map(str, info.shape)) or "1",
        dtype=info.dtype,
        params=math.prod(info.shape),
        matrices=len(inside),
        params_analysed=sum(matrix.params for matrix, row in inside if row.fit_status == FIT_OK),
        status=status,
        reason=reason,
    )


def _judge(info: TensorInfo, inside: Sequence[tuple[WeightMatrix, LayerRow]]) -> tuple[Status, str | None]:
    from gpuherd.models.tensors.kinds import SCALES, TIED, buffer_of

    if info.scales_of is not None:
        return "skipped", f"{SCALES}{info.scales_of}, counted there"
    if not inside:
        tied = None if info.shares is None else f"{TIED}{info.shares}"
        return "skipped", tied or buffer_of(info) or ("one axis: no matrix" if info.shape else "a single number")
    without = [row for _, row in inside if row.fit_status != FIT_OK]
    if not without:
        return "analysed", None
    failed = [row for row in without if not row.fit_status.startswith(SKIPPED)]
    if not failed and len(without) == len(inside):
        return "skipped", without[0].fit_status.removeprefix(SKIPPED)
    told = (failed or without)[0]
    reason = told.fit_status
    if len(inside) > 1:
        reason = f"{len(without)} of {len(inside)} matrices without a fit; {told.longname}: {reason}"
    return "analysed" if len(without) < len(inside) else "failed", reason


def totals(lines: Iterable[TensorCoverage]) -> CoverageTotals:
    """What the lines add up to."""
    known = list(lines)
    return CoverageTotals(
        tensors=len(known),
        analysed=sum(line.status == "analysed" for line in known),
        failed=sum(line.status == "failed" for line in known),
        params=sum(line.params for line in known if _counts(line.dtype, line.reason or "")),
        params_analysed=sum(line.params_analysed for line in known),
    )


def _counts(dtype: str, reason: str) -> bool:
    """Whether the numbers of a tensor are weights that count."""
    from gpuherd.models.subject import NOT_WEIGHTS
    from gpuherd.models.tensors.kinds import NOT_COUNTED

    return dtype not in NOT_WEIGHTS and not reason.startswith(NOT_COUNTED)


def coverage_text(lines: Sequence[TensorCoverage]) -> str:
    """The table as CSV text."""
    return table_text([asdict(line) for line in lines])


# The columns that say which weights count, and how many of them are analysed.
_COUNTED = ("params", "params_analysed", "dtype", "status", "reason")


def stored_share(path: Path) -> float | None:
    """The share of the weights in matrices with a valid fit, by a coverage file; None where that is not there, or, with
    a warning in the log, can't be read."""
    import pyarrow as pa
    import pyarrow.csv

    try:
        with path.open("rb") as file:
            table = pyarrow.csv.read_csv(
                file,
                read_options=pyarrow.csv.ReadOptions(use_threads=False),
                parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
                convert_options=pyarrow.csv.ConvertOptions(
                    include_columns=list(_COUNTED),
                    column_types={name: pa.int64() if "params" in name else pa.string() for name in _COUNTED},
                    strings_can_be_null=False,
                    null_values=[],
                ),
            )
        rows = list(zip(*(table[name].to_pylist() for name in _COUNTED), strict=True))
        if unknown := {status for _, _, _, status, _ in rows}.difference(get_args(Status)):
            raise ValueError(f"unknown status {min(unknown)!r} in a coverage table")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as problem:
        logger.warning("%s can't be read: %s", path, problem)
        return None
    counted = [row for row in rows if _counts(row[2], row[4])]
    params = sum(row[0] for row in counted)
    return sum(row[1] for row in counted) / params if params else 0.0
