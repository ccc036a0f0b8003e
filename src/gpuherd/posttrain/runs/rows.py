"""A round's rows on disk: a line of JSON a problem, with all rows of that problem, in the order of a shard's problems.

A problem's line is there whole or not at all; where an algorithm drops a problem the line has no rows. So a shard that
was killed goes on behind its last whole batch, and a round reads back the same from any number of shards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.posttrain.types import Comparison, Problem, Rollout, Row
from gpuherd.runs.shard_file import Shard, unsealed

_KINDS: dict[str, type[Rollout] | type[Comparison]] = {"rollout": Rollout, "comparison": Comparison}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class BadRows(GpuherdError):
    """A file of rows is damaged, or an algorithm gave rows that belong to none of its problems."""

    exit_code = ExitCode.BAD_INPUT


def shard_of(problems: int, shard: int, shards: int, batch: int) -> Shard:
    """A shard's problems as places in the round's list: each ``shards``-th, in batches that are written whole.

    >>> shard_of(7, 1, 3, 2).batches, shard_of(7, 0, 3, 2).batches
    (((1, 4),), ((0, 3), (6,)))
    """
    places = range(problems)[shard::shards]
    return Shard(tuple(tuple(places[start : start + batch]) for start in range(0, len(places), batch)))


def by_problem(rows: Iterable[Row], problems: Sequence[Problem]) -> Iterator[list[Row]]:
    """The rows of each problem, problem by problem, as soon as they are all there; [] of one that has none.

    Raises BadRows for a row of another problem, or one that comes too late.
    """
    places = {problem.id: place for place, problem in enumerate(problems)}
    waiting: list[Row] = []
    at = 0
    for row in rows:
        place = places.get(row.problem)
        if place is None or place < at:
            raise BadRows(f"a row of problem {row.problem!r} is none of this job's, or out of order")
        while at < place:
            yield waiting
            waiting, at = [], at + 1
        waiting.append(row)
    for _ in range(at, len(problems)):
        yield waiting
        waiting = []


def line_of(problem: Problem, rows: Sequence[Row]) -> str:
    """A problem's line."""
    told = [{"kind": _NAMES[type(row)], **row.to_dict()} for row in rows]
    return json.dumps({"problem": problem.id, "rows": told}, separators=(",", ":"), allow_nan=False)


def read_round(paths: Sequence[Path], problems: int) -> tuple[Row, ...]:
    """All rows of a round in the order of its problems.

    Args:
        paths: a file a shard, in order.
        problems: how many there were.

    Raises BadRows: a file is not whole.
    """
    found: dict[int, list[Row]] = {}
    for number, path in enumerate(paths):
        places = range(problems)[number :: len(paths)]
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except OSError as problem:
            raise BadRows(f"{path} can't be read: {problem.strerror}") from None
        again = f"remove {path.with_suffix('.json')} and start the same command again"
        if len(lines) != len(places):
            raise BadRows(f"{path} has {len(lines)} lines and should have {len(places)}; {again}")
        for at, (place, line) in enumerate(zip(places, lines, strict=True), 1):
            if (content := unsealed(line)) is None:
                raise BadRows(f"{path}: line {at} is incomplete or has changed; {again}")
            found[place] = _rows_of(content, path)
    return tuple(row for place in sorted(found) for row in found[place])


def _rows_of(line: bytes, path: Path) -> list[Row]:
    try:
        return [
            _KINDS[row["kind"]].from_dict({key: value for key, value in row.items() if key != "kind"})
            for row in json.loads(line)["rows"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise BadRows(f"{path} is damaged: {type(problem).__name__}: {problem}") from None
