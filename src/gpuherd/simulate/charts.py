"""Simulated runs as a table, as lines of characters, and as an SVG picture. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

from gpuherd.errors import clean
from gpuherd.simulate.results import Ending, FinishedAttempt, History, busy_spans
from gpuherd.simulate.workload import Work

if TYPE_CHECKING:
    from rich.table import Table

    from gpuherd.simulate.results import Result
    from gpuherd.simulate.workload import Scenario


# The timeline: a line of characters for each GPU, or for several where there are many. Each character is an interval:
# its height is the share of it in which our jobs ran; it is hatched where external users had the larger share, and a
# dot where the GPU was mostly idle.

COLUMNS = 80
MOST_ROWS = 16
_LEVELS = "▁▂▃▄▅▆▇█"
_EXTERNAL = "░"
_IDLE = "·"
_PLAIN_LEVELS = ".:-=+*%#"
_PLAIN_EXTERNAL = "x"
_PLAIN_IDLE = " "


@dataclass(frozen=True, slots=True)
class GpuRange:
    """Consecutive GPUs by number, and their label."""

    label: str
    first: int
    last: int

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.last - self.first + 1


def rows(history: History, most: int = MOST_ROWS) -> tuple[GpuRange, ...]:
    """The rows of a picture: a GPU each, else a machine each, else several machines or GPUs each."""
    machines = history.machines
    if history.gpus <= most:
        found, number = [], 0
        for machine, gpus in enumerate(machines):
            for gpu in range(gpus):
                label = f"GPU {gpu}" if len(machines) == 1 else f"{machine}/{gpu}"
                found.append(GpuRange(label, number, number))
                number += 1
        return tuple(found)
    if len(machines) == 1:
        return _grouped([1] * machines[0], most, "GPU")
    return _grouped(machines, most, "machine")


def _grouped(sizes: Sequence[int], most: int, word: str) -> tuple[GpuRange, ...]:
    each = -(-len(sizes) // most)
    found, number = [], 0
    for begin in range(0, len(sizes), each):
        part = sizes[begin : begin + each]
        last = begin + len(part) - 1
        label = f"{word} {begin}" if len(part) == 1 else f"{word}s {begin}-{last}"
        found.append(GpuRange(label, number, number + sum(part) - 1))
        number += sum(part)
    return tuple(found)


def shares(history: History, lines: Sequence[GpuRange], columns: int) -> tuple[list[list[float]], list[list[float]]]:
    """For each row and each of ``columns`` intervals of the makespan: the share of our jobs, and of external users."""
    ours = [[0.0] * columns for _ in lines]
    others = [[0.0] * columns for _ in lines]
    if history.makespan_s <= 0:
        return ours, others
    line_of = [number for number, row in enumerate(lines) for _ in range(row.gpus)]
    width_s = history.makespan_s / columns
    for gpu, spans in busy_spans(history).items():
        for start, end in spans:
            _fill(ours[line_of[gpu]], start, end, width_s)
    for visit in history.visits:
        _fill(others[line_of[visit.gpu]], visit.start, visit.end, width_s)
    for number, row in enumerate(lines):
        for cells in (ours[number], others[number]):
            cells[:] = [min(1.0, seconds / (width_s * row.gpus)) for seconds in cells]
    return ours, others


def _fill(cells: list[float], start: float, end: float, width_s: float) -> None:
    first, last = int(start / width_s), min(int(end / width_s), len(cells) - 1)
    for cell in range(first, last + 1):
        cells[cell] += max(0.0, min(end, (cell + 1) * width_s) - max(start, cell * width_s))


def user_shares(history: History, works: Sequence[Work], columns: int) -> dict[str, list[float]]:
    """For each user and each of ``columns`` intervals of the makespan: the share of all GPUs in the user's hands."""
    cells = {user.name: [0.0] * columns for user in history.users}
    if history.makespan_s <= 0:
        return cells
    width_s = history.makespan_s / columns
    for name, own in cells.items():
        mine = tuple(attempt for attempt in history.attempts if works[attempt.job].user == name)
        for spans in busy_spans(replace(history, attempts=mine)).values():
            for start, end in spans:
                _fill(own, start, end, width_s)
        own[:] = [min(1.0, seconds / (width_s * history.gpus)) for seconds in own]
    return cells


def timeline(history: History, works: Sequence[Work] = (), *, width: int = COLUMNS, unicode: bool = True) -> str:
    """The timeline with a scale, and a line for each of several users. ``unicode``: with block characters; else in
    ASCII."""
    lines = rows(history)
    if not lines or history.makespan_s <= 0:
        return "nothing ran"
    people = history.users if works else ()
    margin = max(len(label) for label in (*(row.label for row in lines), *(user.name for user in people))) + 1
    columns = max(10, width - margin - 1)
    ours, others = shares(history, lines, columns)
    drawn = [
        f"{row.label:>{margin - 1}} "
        + "".join(_sign(our, other, unicode) for our, other in zip(ours[number], others[number], strict=True))
        for number, row in enumerate(lines)
    ]
    if people:
        drawn += [
            f"{name:>{margin - 1}} " + "".join(_sign(share, 0.0, unicode) for share in cells)
            for name, cells in user_shares(history, works, columns).items()
        ]
    return "\n".join([*drawn, " " * margin + scale(history.makespan_s, columns), " " * margin + legend(unicode)])


def _sign(our: float, other: float, unicode: bool) -> str:
    levels = _LEVELS if unicode else _PLAIN_LEVELS
    if other > max(our, 1 - our - other):
        return _EXTERNAL if unicode else _PLAIN_EXTERNAL
    if our <= 0:
        return _IDLE if unicode else _PLAIN_IDLE
    return levels[min(len(levels) - 1, int(our * len(levels)))]


def legend(unicode: bool) -> str:
    """The legend of the timeline."""
    levels, external = (_LEVELS, _EXTERNAL) if unicode else (_PLAIN_LEVELS, _PLAIN_EXTERNAL)
    idle = f"{_IDLE} idle" if unicode else "blank: idle"
    return f"{levels} share used by our jobs   {external} external users   {idle}"


def scale(seconds: float, columns: int) -> str:
    """The scale of a timeline: times at its start, at half if there is room, at its end.

    >>> scale(7200, 30)
    '0             1 h          2 h'
    """
    end, half = short_time(seconds), short_time(seconds / 2)
    line = [" "] * columns
    line[0] = "0"
    middle = columns // 2 - len(half) // 2
    if middle > 3 and middle + len(half) + 2 < columns - len(end):
        line[middle : middle + len(half)] = half
    line[columns - len(end) :] = end
    return "".join(line)


def short_time(seconds: float) -> str:
    """A length of time in few characters, to two or three figures.

    >>> [short_time(each) for each in (0.25, 45, 90, 5400, 3600 * 50)]
    ['0.25 s', '45 s', '1.5 min', '1.5 h', '2.08 d']
    """
    for unit, size, least in (("d", 86400.0, 172800.0), ("h", 3600.0, 3600.0), ("min", 60.0, 60.0)):
        if seconds >= least * 0.9995:
            return f"{seconds / size:.3g} {unit}" if seconds / size < 1000 else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.3g} s"


# The SVG picture: a panel for each run, a row for each GPU, a bar for each attempt. Where there are too many GPUs or
# attempts for bars, a row stands for several GPUs and is filled by the share of them that was in use. All panels have
# the same scale of time, so that they can be compared by eye.

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
# Neighbouring attempts on a GPU are distinguishable, also with colour blindness (after Okabe and Ito).
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#5a9bd4", "#33709e", "#7fc8a9")
_USER_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#b8a800", "#5a4fa2")
_MOST_NAMED = 6
_FAILED = "#d55e00"
_GAVE_WAY = "#e69f00"
_EXTERNAL_FILL = "url(#external)"


@dataclass(frozen=True, slots=True)
class Panel:
    """A run to draw: its title, its figures in a line, and its history."""

    title: str
    line: str
    history: History


def gantt(panels: Sequence[Panel], works: Sequence[Work], *, title: str) -> str:
    """The picture as the text of an SVG file."""
    longest_s = max((panel.history.makespan_s for panel in panels), default=0.0) or 1.0
    fills = _user_fills(panels[0].history) if panels else {}
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
            '<defs><pattern id="external" width="6" height="6" patternUnits="userSpaceOnUse">'
            '<rect width="6" height="6" fill="#dddddd" fill-opacity="0.5"/><path d="M0 6 L6 0" stroke="#888888"/>'
            "</pattern></defs>",
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            _text(_LEFT, 24, title, size=16, weight="bold"),
            *parts,
            *_legend(top + 12, fills),
            "</svg>",
            "",
        ]
    )


def _panel(panel: Panel, works: Sequence[Work], lines: Sequence[GpuRange], top: int, longest_s: float) -> list[str]:
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


def _user_fills(history: History) -> dict[str, str]:
    """The colour of each of several users."""
    return {user.name: _USER_COLOURS[place % len(_USER_COLOURS)] for place, user in enumerate(history.users)}


def _bars(history: History, works: Sequence[Work], begin: int, longest_s: float, width: int) -> list[str]:
    scale = width / longest_s
    parts = []
    depth = _depths(history)
    fills = _user_fills(history)
    for number, attempt in enumerate(history.attempts):
        job = works[attempt.job].job
        user = works[attempt.job].user
        name = clean(f"{user}: {job.title or job.name}" if user else job.title or job.name)
        how = f"{attempt.ending.value}{f', {attempt.failure.value}' if attempt.failure is not None else ''}"
        tip = f"{name}: {short_time(attempt.start)} to {short_time(attempt.end)}, {how}"
        level, of = depth.get(number, (0, 1))
        thick = (_ROW - 2) / of
        for gpu in attempt.gpus:
            top = begin + gpu * _ROW + 1 + level * thick
            parts.append(_bar(attempt.start, attempt.end, scale, top, thick, _colour(attempt, fills.get(user)), tip))
    # On top, because external users may come to a GPU where a job of ours runs.
    for visit in history.visits:
        end = min(visit.end, history.makespan_s)
        if end > visit.start:
            parts.append(
                _bar(visit.start, end, scale, begin + visit.gpu * _ROW + 1, _ROW - 2, _EXTERNAL_FILL, "external user")
            )
    return parts


def _depths(history: History) -> dict[int, tuple[int, int]]:
    """For attempts that shared a GPU: which lane of its row each gets, and how many lanes the row has."""
    lanes: dict[int, list[float]] = {}
    lane_of: dict[int, tuple[int, int]] = {}
    shared = [(attempt.start, number) for number, attempt in enumerate(history.attempts) if attempt.shared]
    for start, number in sorted(shared):
        attempt = history.attempts[number]
        ends = lanes.setdefault(attempt.gpus[0], [])
        lane = next((each for each, end in enumerate(ends) if end <= start), len(ends))
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = attempt.end
        lane_of[number] = (attempt.gpus[0], lane)
    return {number: (lane, len(lanes[gpu])) for number, (gpu, lane) in lane_of.items()}


def _shades(history: History, lines: Sequence[GpuRange], begin: int, longest_s: float, width: int) -> list[str]:
    """Rows filled by shares: our jobs from below, external users on top."""
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


def _colour(attempt: FinishedAttempt, of_user: str | None) -> str:
    if attempt.ending is Ending.FAILED:
        return _FAILED
    if attempt.ending is Ending.GAVE_WAY:
        return _GAVE_WAY
    return of_user or _COLOURS[attempt.job % len(_COLOURS)]


def _axis(top: int, longest_s: float, width: int) -> list[str]:
    parts = []
    for step in range(5):
        x = _LEFT + width * step / 4
        anchor = "start" if step == 0 else "end" if step == 4 else "middle"
        parts.append(f'<path d="M{x:.1f} {top} v4" stroke="#555555"/>')
        label = "0" if step == 0 else short_time(longest_s * step / 4)
        parts.append(_text(x, top + 15, label, anchor=anchor, fill="#555555"))
    return parts


def _legend(top: int, fills: Mapping[str, str]) -> list[str]:
    parts, x = [], _LEFT
    jobs = [(fill, name) for name, fill in fills.items()][:_MOST_NAMED] or [(_COLOURS[0], "jobs")]
    for fill, word in (
        *jobs,
        (_FAILED, "failed attempts"),
        (_GAVE_WAY, "requeued for an external user"),
        (_EXTERNAL_FILL, "external users"),
    ):
        parts += [_rect(x, top - 9, 12, 10, fill), _text(x + 17, top, word)]
        x += 45 + 7 * len(word)
    return parts


def _bar(start: float, end: float, scale: float, top: float, thick: float, fill: str, tip: str) -> str:
    x, wide = _LEFT + start * scale, max(0.3, (end - start) * scale)
    # A light edge, where there is room for it, separates two bars of one colour.
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


# The table of runs, and remarks in sentences. Makes text; prints nothing.


def headline(scenario: Scenario) -> str:
    """The title of a scenario: ``64 jobs on 8 GPUs``."""
    gpus = sum(len(machine) for machine in scenario.machines)
    where = f"{gpus} GPUs" if len(scenario.machines) == 1 else f"{len(scenario.machines)} machines with {gpus} GPUs"
    return f"{len(scenario.works)} jobs on {where}"


def line(result: Result) -> str:
    """The main figures in a line."""
    figures = result.figures
    parts = [f"makespan {short_time(figures.makespan_s)}"]
    if figures.over_least is not None:
        parts.append(f"{figures.over_least:.3g} times the least possible")
    if figures.utilisation is not None:
        parts.append(f"GPUs used {_percent(figures.utilisation)}")
    if figures.waits is not None:
        parts.append(f"wait {short_time(figures.waits.mean_s)} on average, {short_time(figures.waits.p95_s)} for 95 %")
    return "; ".join(parts)


def table(results: Sequence[Result]) -> Table:
    """A row for each variant."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    named = any(result.variant.name for result in results)
    external = any(result.figures.external_share for result in results)
    if named:
        made.add_column("Rules", overflow="fold", min_width=13)
    headings = ("Makespan", "x least", "Used", *(["Others"] if external else []), "Lost", "Wait", "p50", "p95", "max")
    # Figures are never cut: in a narrow window the rules get more lines.
    for heading in (*headings, "Done"):
        made.add_column(heading, justify="right", no_wrap=True, min_width=max(5, len(heading)))
    for result in results:
        figures, waits = result.figures, result.figures.waits
        made.add_row(
            *([result.variant.name] if named else []),
            _time(figures.makespan_s),
            _figure(figures.over_least, "{:.3f}"),
            _percent(figures.utilisation),
            *([_percent(figures.external_share)] if external else []),
            _percent(figures.lost_gpu_hours / figures.gpu_hours if figures.gpu_hours else None),
            *(
                _time(value)
                for value in ((waits.mean_s, waits.p50_s, waits.p95_s, waits.max_s) if waits is not None else ())
            ),
            *(["N/A"] * 4 if waits is None else []),
            str(figures.done),
        )
    return made


def remarks(scenario: Scenario, results: Sequence[Result]) -> Iterator[str]:
    """Remarks: failures, refused jobs, jobs that never started, and the fastest variant."""
    for result in results:
        figures = result.figures
        name = f"{result.variant.name}: " if result.variant.name else ""
        if figures.failures:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(figures.failures.items()))
            yield f"{name}attempts that failed: {kinds}; jobs failed: {figures.failed}, cancelled: {figures.cancelled}"
        if figures.gave_way:
            yield f"{name}{figures.gave_way} attempts were requeued for an external user"
        for reason, count in Counter(result.history.refused.values()).most_common(3):
            first = next(job for job, why in result.history.refused.items() if why == reason)
            job = scenario.works[first].job
            others = f" and {count - 1} more" if count > 1 else ""
            yield f"{name}refused: {clean(job.title or job.name)}{others} {reason}"
        if figures.stuck:
            yield f"{name}{figures.stuck} jobs never started: in a year nothing could start"
    if len(results) > 1:
        ended = [result for result in results if not result.figures.stuck]
        best = min(ended, key=lambda result: result.figures.makespan_s, default=None)
        worst = max(ended, key=lambda result: result.figures.makespan_s, default=None)
        if best is not None and worst is not None and worst.figures.makespan_s > best.figures.makespan_s > 0:
            times = worst.figures.makespan_s / best.figures.makespan_s
            yield f"Shortest: {best.variant.name}, {times:.3g} times as fast as {worst.variant.name}"


def _time(seconds: float) -> str:
    """A length of time that fits a column: ``1.78h``, ``35.2m``."""
    return short_time(seconds).replace(" min", "m").replace(" ", "")


def _percent(share: float | None) -> str:
    return "N/A" if share is None else f"{100 * share:.1f}%"


def _figure(value: float | None, form: str) -> str:
    return "N/A" if value is None else form.format(value)
