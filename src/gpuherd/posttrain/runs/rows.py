"""The rows of a collection on disk: a line of JSON a problem, with all rows of that problem, in the order of a shard's
problems.

A problem's line is there whole or not at all; where an algorithm drops a problem the line has no rows. So a collection
that was killed resumes behind its last whole batch, and reads back the same from any number of shards or processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from gpuherd.engines import progress
from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import Stopped
from gpuherd.posttrain.types import Comparison, Problem, Rollout, Row
from gpuherd.runs.shard_file import Shard, ShardFile, unsealed

_KINDS: dict[str, type[Rollout] | type[Comparison]] = {"rollout": Rollout, "comparison": Comparison}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class BadRows(GpuherdError):
    """A file of rows is damaged, or an algorithm gave rows that belong to none of its problems."""

    exit_code = ExitCode.BAD_INPUT


def collect_rows(
    path: Path,
    shard: Shard,
    problems: Sequence[Problem],
    ask: Callable[[Sequence[Problem]], Iterable[Row]],
    *,
    world: DistEnv | None = None,
    stopping: Callable[[], bool] | None = None,
    done: Callable[[dict[str, int]], object] | None = None,
) -> dict[str, int]:
    """Adds the rows of the shard's problems that are not in its file yet, batch by batch: what goes on asks for exactly
    what an undisturbed start would have asked for, and rows are equal to the last bit.

    Args:
        shard: places in ``problems``.
        ask: gives the rows of some problems, in their order.
        world: the processes that collect together: each asks its share of a batch, and the main one writes.
        stopping: asked after each batch; where it says so in any process, Stopped is raised.
        done: called with the figures in the main process when the file is whole, while no other can write it.

    Returns figures: ``problems`` in all, those of this start, and their rows. Raises ShardBusy, CannotWrite, BadRows,
    and what ``ask`` raises.
    """
    world = DistEnv.single() if world is None else world
    files: list[ShardFile] = []
    with ExitStack() as stack:

        def opened() -> tuple[tuple[int, ...], ...]:
            files.append(stack.enter_context(ShardFile(path, shard, sealed=True)))
            return files[0].todo

        todo = world.from_main(opened)
        items, left = len(shard.items), sum(map(len, todo))
        now, rows = 0, 0
        if world.is_main:
            progress.report(items - left, items, "collect")
        for batch in todo:
            asked = [problems[place] for place in batch]
            mine = world.share(asked)
            shares = world.gather(list(by_problem(ask(mine) if mine else (), mine)))
            found = [shares[place % world.size][place // world.size] for place in range(len(asked))]
            for file in files:
                file.append([line_of(problem, of) for problem, of in zip(asked, found, strict=True)])
            now, rows = now + len(batch), rows + sum(map(len, found))
            if world.is_main:
                progress.report(items - left + now, items, "collect")
            if stopping is not None and world.any(stopping()):
                raise Stopped(
                    f"stopped with {items - left + now} of {items} problems answered; the same command goes on from "
                    "there"
                )
        figures = {"problems": items, "problems_last_start": now, "rows_last_start": rows}
        if done is not None and world.is_main:
            done(figures)
    return figures


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


def read_round(parts: Iterable[tuple[Path, Shard]]) -> tuple[Row, ...]:
    """All rows of a round in the order of its problems, from the files of its shards. Raises BadRows: one is not
    whole."""
    found: dict[int, list[Row]] = {}
    for path, shard in parts:
        places = shard.items
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
