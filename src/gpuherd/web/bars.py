"""The chart of days: stacked bars, a bar a day and a block a user, as numbers that a template draws. Pure.

>>> bars = bars_of([DayUse(1.7e9, {"alice": 7200.0, "bob": 3600.0}), DayUse(1.7e9 + 86400, {})])
>>> bars.total_h, [user.name for user in bars.users], len(bars.days[0].blocks), bars.days[1].words
(3.0, ['alice', 'bob'], 2, 'nothing')
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from gpuherd.web.machine_data import DayUse

WIDTH, HEIGHT, LEFT, RIGHT, BELOW, ABOVE = 720, 180, 32, 12, 20, 8
# Users with a colour of their own; the others share one.
_COLOURS = 5
_OTHERS = "others"
_LABEL_EVERY = 5
# A block that is there is at least visible.
_LEAST_HEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Block:
    """A user's part of a bar; ``rank`` names the colour."""

    rank: int
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A day. ``label``: below it, "" for most; ``words``: its figures for people."""

    day: str
    x: float
    hours: float
    blocks: tuple[Block, ...]
    words: str
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the grid and its label."""

    y: float
    label: str


@dataclass(frozen=True, slots=True)
class User:
    """A user in the legend, with the GPU-hours of all days."""

    name: str
    rank: int
    hours: float


@dataclass(frozen=True, slots=True)
class Bars:
    """The chart, in units of a picture ``width`` by ``height``; ``bar`` is a bar's width."""

    days: tuple[Bar, ...]
    lines: tuple[Line, ...]
    users: tuple[User, ...]
    total_h: float
    bar: float
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT


def bars_of(days: Sequence[DayUse]) -> Bars:
    """The chart of these days, in their order; without a bar where there is no day or nothing was used at all."""
    hours = _by_user(days)
    total_h = sum(hours.values())
    if not days or total_h <= 0:
        return Bars((), (), (), 0.0, 0.0)
    order = sorted(hours, key=lambda name: (-hours[name], name))
    named = order if len(order) <= _COLOURS + 1 else order[:_COLOURS]
    ranks = {name: rank for rank, name in enumerate(named)}
    users = [User(name, rank, hours[name]) for name, rank in ranks.items()]
    if len(named) < len(order):
        users.append(
            User(f"{len(order) - len(named)} {_OTHERS}", _COLOURS, sum(hours[name] for name in order[_COLOURS:]))
        )
    top_h, step_h = _scale(max(day.total_s for day in days) / 3600)
    base, room = HEIGHT - BELOW, HEIGHT - BELOW - ABOVE
    pitch = (WIDTH - LEFT - RIGHT) / len(days)
    lines = [
        Line(round(base - room * number * step_h / top_h, 1), f"{number * step_h:g}")
        for number in range(round(top_h / step_h) + 1)
    ]
    bars = [
        _bar(day, ranks, LEFT + pitch * (place + 0.1), room / top_h, base, (len(days) - 1 - place) % _LABEL_EVERY == 0)
        for place, day in enumerate(days)
    ]
    return Bars(tuple(bars), tuple(lines), tuple(users), total_h, round(pitch * 0.8, 1))


def _by_user(days: Sequence[DayUse]) -> dict[str, float]:
    hours: dict[str, float] = {}
    for day in days:
        for user, held_s in day.held_s.items():
            hours[user] = hours.get(user, 0.0) + held_s / 3600
    return hours


def _bar(day: DayUse, ranks: Mapping[str, int], x: float, per_h: float, base: float, labelled: bool) -> Bar:
    when = datetime.fromtimestamp(day.since)
    of_rank: dict[int, float] = {}
    for user, held_s in day.held_s.items():
        rank = ranks.get(user, _COLOURS)
        of_rank[rank] = of_rank.get(rank, 0.0) + held_s / 3600
    blocks, y = [], base
    for rank, hours in sorted(of_rank.items()):
        if hours > 0:
            height = max(_LEAST_HEIGHT, hours * per_h)
            y -= height
            blocks.append(Block(rank, round(y, 2), round(height, 2)))
    most = sorted(day.held_s.items(), key=lambda each: -each[1])
    words = ", ".join(f"{user} {held_s / 3600:.1f} h" for user, held_s in most if held_s > 0) or "nothing"
    label = f"{when.day} {when:%b}" if labelled else ""
    return Bar(f"{when:%Y-%m-%d}", round(x, 1), day.total_s / 3600, tuple(blocks), words, label)


def _scale(most: float) -> tuple[float, float]:
    """The top of the axis and the distance of its lines: 2 to 5 of them, at 1, 2 or 5 times a power of ten.

    >>> _scale(7.3), _scale(0.4), _scale(96.0)
    ((8.0, 2.0), (0.4, 0.1), (100.0, 20.0))
    """
    raw = max(most, 1e-6) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999999)
    return round(step * math.ceil(most / step - 1e-9), 9) or step, round(step, 9)
