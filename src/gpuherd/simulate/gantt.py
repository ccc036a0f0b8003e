"""Simulated runs as one SVG picture: a panel for each, a row for each GPU, a bar for each attempt. Pure.

Where there are too many GPUs or attempts for bars, a row stands for several GPUs and is filled by the share of them
that was in use. All panels have the same scale of time, so that they can be compared by eye.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from gpuherd.jobs.failures import clean
from gpuherd.simulate.history import Ending, History, Ran
from gpuherd.simulate.timeline import Row, rows, shares, short_time
from gpuherd.simulate.workload import Work

WIDTH = 1000
_LEFT = 110
_RIGHT = 20
_ROW = 16
_HEAD = 44
_FOOT = 30
_LEGEND = 30
_MOST_ROWS = 64
_MOST_BARS = 8000
_COLUMNS = 290
# Neighbouring attempts on a GPU can be told apart, also by who sees few colours (after Okabe and Ito).
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#5a9bd4", "#33709e", "#7fc8a9")
_FAILED = "#d55e00"
_GAVE_WAY = "#e69f00"
_STRANGER = "url(#stranger)"


@dataclass(frozen=True, slots=True)
class Panel:
    """A run to draw: what it is called, its figures in a line, and what happened."""

    title: str
    line: str
    history: History


def gantt(panels: Sequence[Panel], works: Sequence[Work], *, title: str) -> str:
    """The picture as the text of an SVG file."""
    longest_s = max((panel.history.makespan_s for panel in panels), default=0.0) or 1.0
    parts: list[str] = []
    top = 40
    for panel in panels:
        lines = rows(panel.history, _MOST_ROWS)
        parts += _panel(panel, works, lines, top, longest_s)
        top += _HEAD + len(lines) * _ROW + _FOOT
    height = top + _LEGEND
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
            '<defs><pattern id="stranger" width="6" height="6" patternUnits="userSpaceOnUse">'
            '<rect width="6" height="6" fill="#dddddd" fill-opacity="0.5"/><path d="M0 6 L6 0" stroke="#888888"/>'
            "</pattern></defs>",
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            _text(_LEFT, 24, title, size=16, weight="bold"),
            *parts,
            *_legend(top + 12),
            "</svg>",
            "",
        ]
    )


def _panel(panel: Panel, works: Sequence[Work], lines: Sequence[Row], top: int, longest_s: float) -> list[str]:
    width = WIDTH - _LEFT - _RIGHT
    begin = top + _HEAD
    height = len(lines) * _ROW
    parts = []
    if panel.title:
        parts.append(_text(_LEFT, top + 18, panel.title, size=13, weight="bold"))
    parts.append(_text(_LEFT, top + 34, panel.line, fill="#555555"))
    parts.append(f'<rect x="{_LEFT}" y="{begin}" width="{width}" height="{height}" fill="#f4f4f4"/>')
    for number, row in enumerate(lines):
        parts.append(_text(_LEFT - 6, begin + number * _ROW + 12, row.label, anchor="end"))
    bars = len(panel.history.attempts) + len(panel.history.visits)
    if panel.history.gpus <= len(lines) and bars <= _MOST_BARS:
        parts += _bars(panel.history, works, begin, longest_s, width)
    else:
        parts += _shades(panel.history, lines, begin, longest_s, width)
    return [*parts, *_axis(begin + height, longest_s, width)]


def _bars(history: History, works: Sequence[Work], begin: int, longest_s: float, width: int) -> list[str]:
    scale = width / longest_s
    parts = []
    depth = _depths(history)
    for number, ran in enumerate(history.attempts):
        job = works[ran.job].job
        name = clean(job.title or job.name)
        how = f"{ran.ending.value}{f', {ran.failure.value}' if ran.failure is not None else ''}"
        tip = f"{name}: {short_time(ran.start)} to {short_time(ran.end)}, {how}"
        level, of = depth.get(number, (0, 1))
        thick = (_ROW - 2) / of
        for gpu in ran.gpus:
            top = begin + gpu * _ROW + 1 + level * thick
            parts.append(_bar(ran.start, ran.end, scale, top, thick, _colour(ran), tip))
    # On top, because strangers may come to a GPU where a job of ours runs.
    for visit in history.visits:
        end = min(visit.end, history.makespan_s)
        if end > visit.start:
            parts.append(_bar(visit.start, end, scale, begin + visit.gpu * _ROW + 1, _ROW - 2, _STRANGER, "a stranger"))
    return parts


def _depths(history: History) -> dict[int, tuple[int, int]]:
    """For attempts that shared a GPU: which lane of its row each gets, and how many lanes the row has."""
    lanes: dict[int, list[float]] = {}
    lane_of: dict[int, tuple[int, int]] = {}
    shared = [(ran.start, number) for number, ran in enumerate(history.attempts) if ran.shared]
    for start, number in sorted(shared):
        ran = history.attempts[number]
        ends = lanes.setdefault(ran.gpus[0], [])
        lane = next((each for each, end in enumerate(ends) if end <= start), len(ends))
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = ran.end
        lane_of[number] = (ran.gpus[0], lane)
    return {number: (lane, len(lanes[gpu])) for number, (gpu, lane) in lane_of.items()}


def _shades(history: History, lines: Sequence[Row], begin: int, longest_s: float, width: int) -> list[str]:
    """Rows filled by shares: ours from below, strangers on top."""
    drawn = width * history.makespan_s / longest_s
    columns = max(1, round(_COLUMNS * history.makespan_s / longest_s))
    ours, others = shares(history, lines, columns)
    cell = drawn / columns
    parts = []
    for number in range(len(lines)):
        bottom = begin + (number + 1) * _ROW - 1
        for column in range(columns):
            our = ours[number][column] * (_ROW - 2)
            other = min(others[number][column] * (_ROW - 2), _ROW - 2 - our)
            x = _LEFT + column * cell
            if our > 0.05:
                parts.append(_rect(x, bottom - our, cell, our, _COLOURS[0]))
            if other > 0.05:
                parts.append(_rect(x, bottom - our - other, cell, other, "#bbbbbb"))
    return parts


def _colour(ran: Ran) -> str:
    if ran.ending is Ending.FAILED:
        return _FAILED
    return _GAVE_WAY if ran.ending is Ending.GAVE_WAY else _COLOURS[ran.job % len(_COLOURS)]


def _axis(top: int, longest_s: float, width: int) -> list[str]:
    parts = []
    for step in range(5):
        x = _LEFT + width * step / 4
        anchor = "start" if step == 0 else "end" if step == 4 else "middle"
        parts.append(f'<path d="M{x:.1f} {top} v4" stroke="#555555"/>')
        label = "0" if step == 0 else short_time(longest_s * step / 4)
        parts.append(_text(x, top + 15, label, anchor=anchor, fill="#555555"))
    return parts


def _legend(top: int) -> list[str]:
    parts, x = [], _LEFT
    for fill, word in (
        (_COLOURS[0], "jobs"),
        (_FAILED, "failed attempts"),
        (_GAVE_WAY, "put back for a stranger"),
        (_STRANGER, "strangers"),
    ):
        parts += [_rect(x, top - 9, 12, 10, fill), _text(x + 17, top, word)]
        x += 45 + 7 * len(word)
    return parts


def _bar(start: float, end: float, scale: float, top: float, thick: float, fill: str, tip: str) -> str:
    x, wide = _LEFT + start * scale, max(0.3, (end - start) * scale)
    # A light edge, where there is room for it, tells two bars of one colour apart.
    edge = ' stroke="white" stroke-width="0.5"' if wide > 3 else ""
    return (
        f'<rect x="{x:.2f}" y="{top:.2f}" width="{wide:.2f}" height="{thick:.2f}" fill="{fill}"{edge}>'
        f"<title>{escape(tip)}</title></rect>"
    )


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"/>'


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 11,
    weight: str = "normal",
    anchor: str = "start",
    fill: str = "black",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{fill}">{escape(clean(words))}</text>'
    )
