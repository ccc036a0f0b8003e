"""A job's side: opens its shard, does the batches that are not there yet, and says at the end that it is done."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.atomic import atomic_write
from gpuherd.engines import progress
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.qa.folder import FORMAT, ShardedDirectory
from gpuherd.qa.working.shardfile import ShardFile, batches_done
from gpuherd.qa.working.sharding import Shard
from gpuherd.qa.working.shardplan import read_plan

# A batch's items -> a line for each, in their order.
Do = Callable[[tuple[int, ...]], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Worked:
    """What a job has done: items in all, and how many of them now."""

    items: int
    now: int


def my_shard(folder: ShardedDirectory, number: int) -> Shard:
    """The shard of this number. Raises UsageError where there is none, BadShardPlan."""
    shards = read_plan(folder)
    if not 0 <= number < len(shards):
        raise UsageError(f"{folder.root} has {len(shards)} shards, from 0; there is no shard {number}")
    return shards[number]


def work_through(
    folder: ShardedDirectory,
    number: int,
    do: Do,
    *,
    stage: str,
    record: Callable[[], Mapping[str, Any]] = dict,
    writes: bool = True,
) -> Worked:
    """Does each batch of the shard that is not done yet, and tells its progress in items.

    Args:
        do: given a batch's items, gives a line for each.
        stage: what is told of the work in progress lines.
        record: what is kept of how the shard was made; called when all is done.
        writes: False in those ranks of a tensor-parallel model that compute along with the one that writes.

    Raises CannotWrite, ShardBusy, UsageError, BadShardPlan, and what ``do`` raises.
    """
    shard = my_shard(folder, number)
    items, now = len(shard.items), 0
    if not writes:
        # The same batches as the writer: it can't have finished one more without this rank.
        for batch in shard.batches[batches_done(folder.shard(number), shard) :]:
            do(batch)
            now += len(batch)
        return Worked(items, now)
    with ShardFile(folder.shard(number), shard, sealed=True) as file:
        todo = file.todo
        before = items - sum(map(len, todo))
        progress.report(before, items, stage)
        for batch in todo:
            file.append(do(batch))
            now += len(batch)
            progress.report(before + now, items, stage)
        # While the file is ours: nobody can be taken to be done who isn't.
        _say_done(folder, number, {**record(), "items": items, "items_last_start": now})
    return Worked(items, now)


def is_done(folder: ShardedDirectory, number: int) -> bool:
    """Whether a shard is done."""
    return folder.shard_done(number).exists()


def _say_done(folder: ShardedDirectory, number: int, record: Mapping[str, Any]) -> None:
    target = folder.shard_done(number)
    try:
        atomic_write(target, json.dumps({"format": FORMAT, **record}, indent=2).encode() + b"\n")
    except OSError as problem:
        raise CannotWrite(f"can't write {target}: {problem.strerror}") from None
