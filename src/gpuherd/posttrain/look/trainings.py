"""Learning curves below a folder: read, told by their folders, and thinned for a screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.look.shown import Points, Training
from gpuherd.posttrain.training.curves import FILE, read_curves

MOST_POINTS = 300  # of a curve on a screen
MOST_TRAININGS = 400
MOST_IN_ALL = 300_000  # points: 3 MB of the page


def find_trainings(root: Path, most_points: int = MOST_IN_ALL) -> tuple[list[Training], list[str]]:
    """The trainings that have logged something, by their names, with about so many points in all at most; and a
    sentence for each that can't be read or has no room."""
    found, told = [], []
    paths = sorted(root.rglob(FILE))
    if len(paths) > MOST_TRAININGS:
        told.append(f"{len(paths)} trainings: the page has the curves of the first {MOST_TRAININGS}")
    for path in paths[:MOST_TRAININGS]:
        try:
            lines = read_curves(path.parent)
        except (UsageError, OSError) as problem:
            told.append(str(problem))
            continue
        if lines:
            found.append(Training(_name(path.parent, root), len(lines), series_of(lines)))
    return _within(found, most_points), told


def _within(trainings: Sequence[Training], most: int) -> list[Training]:
    """The same with at most about so many points in all: of many trainings each curve is coarser."""
    lengths = [len(points) for each in trainings for points in each.series.values()]
    if sum(lengths) <= most:
        return list(trainings)
    fewer = max(2, max(lengths) * most // sum(lengths))
    return [
        replace(each, series={name: thinned(some, fewer) for name, some in each.series.items()}) for each in trainings
    ]


def series_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Each figure's points; what is no finite number is left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for name, value in line.items():
            step, number = _number(line["step"]), _number(value)
            if name != "step" and step is not None and number is not None:
                found.setdefault(name, []).append((step, number))
    return {name: thinned(points) for name, points in found.items()}


def _number(value: object) -> float | None:
    """A finite number; None for anything else, whole numbers that no float can hold among them."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if isfinite(value) else None
    except OverflowError:
        return None


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most so many points: the means of neighbours, equally many in each but the last.

    >>> thinned([(1, 2.0), (2, 4.0), (3, 9.0)], most=2)
    [(1.5, 3.0), (3.0, 9.0)]
    """
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // most)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _name(folder: Path, root: Path) -> str:
    """The folder below the root, without the room that all are in."""
    parts = folder.relative_to(root).parts
    return "/".join(parts[1:] if parts[:1] == ("models",) else parts) or root.name
