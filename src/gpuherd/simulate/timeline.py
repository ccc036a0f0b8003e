"""A simulated run as a picture of characters: a line for each GPU, or for several where there are many. Pure.

Each character stands for a stretch of time: how high it is filled, for the share of it in which our jobs ran; hatched
where strangers had the most of it; a dot where none of ours ran, and mostly nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.simulate.history import History, busy_spans

WIDTH = 80
MOST_ROWS = 16
_LEVELS = "▁▂▃▄▅▆▇█"
_STRANGERS = "░"
_NOBODY = "·"
_PLAIN_LEVELS = ".:-=+*%#"
_PLAIN_STRANGERS = "x"
_PLAIN_NOBODY = " "


@dataclass(frozen=True, slots=True)
class Row:
    """Some GPUs by number, and what they are called."""

    label: str
    first: int
    last: int

    @property
    def gpus(self) -> int:
        """How many they are."""
        return self.last - self.first + 1


def rows(history: History, most: int = MOST_ROWS) -> tuple[Row, ...]:
    """The lines of the picture: a GPU each, else a machine each, else several machines or GPUs each."""
    machines = history.machines
    if history.gpus <= most:
        found, number = [], 0
        for machine, gpus in enumerate(machines):
            for gpu in range(gpus):
                label = f"GPU {gpu}" if len(machines) == 1 else f"{machine}/{gpu}"
                found.append(Row(label, number, number))
                number += 1
        return tuple(found)
    if len(machines) == 1:
        return _grouped([1] * machines[0], most, "GPU")
    return _grouped(machines, most, "machine")


def _grouped(sizes: Sequence[int], most: int, word: str) -> tuple[Row, ...]:
    each = -(-len(sizes) // most)
    found, number = [], 0
    for begin in range(0, len(sizes), each):
        part = sizes[begin : begin + each]
        last = begin + len(part) - 1
        label = f"{word} {begin}" if len(part) == 1 else f"{word}s {begin}-{last}"
        found.append(Row(label, number, number + sum(part) - 1))
        number += sum(part)
    return tuple(found)


def shares(history: History, lines: Sequence[Row], columns: int) -> tuple[list[list[float]], list[list[float]]]:
    """For each line and each of ``columns`` stretches of the makespan: the share of ours, and of strangers, 0 to 1."""
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


def timeline(history: History, *, width: int = WIDTH, unicode: bool = True) -> str:
    """The picture, with a scale below. ``unicode``: with blocks; else with plain signs that every terminal has."""
    lines = rows(history)
    if not lines or history.makespan_s <= 0:
        return "nothing ran"
    margin = max(len(row.label) for row in lines) + 1
    columns = max(10, width - margin - 1)
    ours, others = shares(history, lines, columns)
    drawn = [
        f"{row.label:>{margin - 1}} "
        + "".join(_sign(our, other, unicode) for our, other in zip(ours[number], others[number], strict=True))
        for number, row in enumerate(lines)
    ]
    return "\n".join([*drawn, " " * margin + scale(history.makespan_s, columns), " " * margin + legend(unicode)])


def _sign(our: float, other: float, unicode: bool) -> str:
    levels = _LEVELS if unicode else _PLAIN_LEVELS
    if other > max(our, 1 - our - other):
        return _STRANGERS if unicode else _PLAIN_STRANGERS
    if our <= 0:
        return _NOBODY if unicode else _PLAIN_NOBODY
    return levels[min(len(levels) - 1, int(our * len(levels)))]


def legend(unicode: bool) -> str:
    """What the signs mean."""
    levels, strangers = (_LEVELS, _STRANGERS) if unicode else (_PLAIN_LEVELS, _PLAIN_STRANGERS)
    nobody = f"{_NOBODY} nobody" if unicode else "blank: nobody"
    return f"{levels} share used by our jobs   {strangers} by strangers   {nobody}"


def scale(seconds: float, columns: int) -> str:
    """Times under the picture: at its begin, at a half if there is room, at its end.

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
    """A length of time in few signs, to two or three figures.

    >>> [short_time(each) for each in (0.25, 45, 90, 5400, 3600 * 50)]
    ['0.25 s', '45 s', '1.5 min', '1.5 h', '2.08 d']
    """
    for unit, size, least in (("d", 86400.0, 172800.0), ("h", 3600.0, 3600.0), ("min", 60.0, 60.0)):
        if seconds >= least * 0.9995:
            return f"{seconds / size:.3g} {unit}" if seconds / size < 1000 else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.3g} s"
