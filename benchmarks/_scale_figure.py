"""Draws docs/images/scale-at-most.svg from benchmarks/results/scale.json: ``python -m benchmarks._scale_figure``.

A line for each time between two looks: the share of the GPUs that is used, by how many jobs are in the cluster's hands.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

_HERE = Path(__file__).parent
_RESULTS = _HERE / "results" / "scale.json"
_PICTURE = _HERE.parent / "docs" / "images" / "scale-at-most.svg"
_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 300, 60, 20
_COLOURS = ("#4477aa", "#228833", "#cc6677")
_RULES = re.compile(r"at_most=(\d+) look=(\S+)")


def lines(figures: Sequence[Mapping[str, object]]) -> dict[str, list[tuple[int, float]]]:
    """By the time between two looks: jobs at most, and the share used."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for each in figures:
        match = _RULES.fullmatch(str(each["rules"]))
        if match is not None:
            found[match[2]].append((int(match[1]), float(str(each["used"]))))
    return {look: sorted(points) for look, points in found.items()}


def picture(found: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """The figure as SVG."""
    most = max(at_most for points in found.values() for at_most, _ in points)

    def x(at_most: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - 20) * at_most / most, 1)

    def y(used: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - 50) * (1 - used), 1)

    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12" role="img">',
        "<title>GPUs used while jobs wait, by --at-most, on 1,000 GPUs with jobs of 5 minutes</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for used in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawn.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y(used)}" y2="{y(used)}" stroke="#ddd"/>')
        drawn.append(f'<text x="{_LEFT - 8}" y="{y(used) + 4}" text-anchor="end">{used:.0%}</text>')
    for at_most in range(0, most + 1, 500):
        drawn.append(f'<text x="{x(at_most)}" y="{y(0) + 18}" text-anchor="middle">{at_most}</text>')
    below = "jobs in the cluster's hands (--at-most)"
    drawn.append(f'<text x="{x(most / 2)}" y="{_HEIGHT - 8}" text-anchor="middle">{below}</text>')
    for place, (look, points) in enumerate(found.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        path = " ".join(f"{x(at_most)},{y(used)}" for at_most, used in points)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn += [f'<circle cx="{x(a)}" cy="{y(used)}" r="3" fill="{colour}"/>' for a, used in points]
        drawn.append(
            f'<text x="{_WIDTH - 150}" y="{y(0.45) + 18 * place}" fill="{colour}">a look every {look} s</text>'
        )
    return "\n".join([*drawn, "</svg>"]) + "\n"


def main(results: Path = _RESULTS, target: Path = _PICTURE) -> None:
    """Reads the figures and writes the picture."""
    figures = json.loads(results.read_text(encoding="utf-8"))["figures"]["at_most"]
    target.write_text(picture(lines(figures)), encoding="utf-8")


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:]))
