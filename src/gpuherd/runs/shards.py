"""A list of items that jobs share: who has which, in which batches; each job's work on its part; one file in the end.

An item is its place in a list of questions, prompts or pairs; what it is, this module does not know. The plan is pure
(the same items always give the same shards), written before anything starts, and kept by every later start: a run that
was begun with four jobs continues with four, whatever GPUs there are now, because which items share a batch can change
the last bits of a log-prob, and no start may mix two plans. The lines themselves are kept by ``shard_file``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpuherd.engines import progress
from gpuherd.errors import ExitCode, GpuherdError, UsageError
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.runs import records
from gpuherd.runs.files import WrittenLines, creating_file, write_file, write_lines, write_values
from gpuherd.runs.shard_file import Shard, ShardFile, batches_done, line_ends, unsealed

FORMAT = 1  # of the plan, the task and what is recorded of a shard that is done
T = TypeVar("T")


# ---- the plan

# A job loads a model first: one with fewer items than this is mostly that.
LEAST_ITEMS = 8

Batches = Callable[[Sequence[int]], Sequence[Sequence[int]]]


def in_batches(items: int, size: int) -> Shard:
    """One job's items in their order, so many in a batch.

    >>> in_batches(5, 2).batches
    ((0, 1), (2, 3), (4,))
    """
    return Shard(tuple(tuple(range(at, min(at + size, items))) for at in range(0, items, size)))


def dealt(items: int, size: int, shards: int) -> tuple[Shard, ...]:
    """The items in batches as one job has them, whole batches dealt in turn to so many jobs: what a batch gives, to the
    last bit, then doesn't depend on their number.

    >>> [shard.batches for shard in dealt(7, 2, 3)]
    [((0, 1), (6,)), ((2, 3),), ((4, 5),)]
    """
    batches = in_batches(items, size).batches
    return tuple(Shard(batches[number::shards]) for number in range(shards))


def number_of_shards(items: int, at_once: int, wanted: int | None = None, *, batch_size: int = 1) -> int:
    """The number of jobs that the items are divided among: as many as can run at once, each with some items at least.

    Args:
        at_once: the number of jobs that can run at the same time.
        wanted: the number that the user asks for; None for the number that suits.
        batch_size: of batches that are dealt as a whole: at most a job each.

    >>> [number_of_shards(items, at_once=4) for items in (0, 7, 16, 31, 400)]
    [1, 1, 2, 3, 4]
    >>> number_of_shards(3, at_once=4, wanted=5), number_of_shards(64, 4, 99, batch_size=30)
    (3, 3)
    """
    if items < 0 or at_once < 1 or (wanted is not None and wanted < 1):
        raise UsageError(f"{items} items for {at_once} jobs at once, {wanted} wanted: there must be at least 1 job")
    suits = min(at_once, items // LEAST_ITEMS) if wanted is None else wanted
    return max(1, min(suits, -(-items // batch_size)))


def plan_shards(lengths: Sequence[int], shards: int, batches: Batches) -> tuple[Shard, ...]:
    """Divides items among shards, so that each has the same amount of work.

    Args:
        lengths: what each item costs, in tokens, say.
        shards: among how many.
        batches: makes batches of the lengths of a shard's items: places among them, each place once.

    Sorted by length, the longest first, the items are dealt in alternating directions (1 2 3 3 2 1 1 2 ...): shards
    differ by one item at most, and by little in length.
    """
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    dealt: list[list[int]] = [[] for _ in range(shards)]
    for place, item in enumerate(order):
        turn, seat = divmod(place, shards)
        dealt[seat if turn % 2 == 0 else shards - 1 - seat].append(item)
    return tuple(_in_batches(sorted(items), lengths, batches) for items in dealt)


def _in_batches(items: Sequence[int], lengths: Sequence[int], batches: Batches) -> Shard:
    found = tuple(tuple(items[place] for place in batch) for batch in batches([lengths[item] for item in items]))
    if sorted(item for batch in found for item in batch) != list(items):
        raise ValueError("batches are to have each item once")
    return Shard(found)


class ShardedDirectory(RunDirectory):
    """A run of jobs that share one list of items, each a part of it.

    Attributes:
        plan: which items each shard has, and in which batches; written before any job starts, and never changed.
        shards: what the jobs write, ``<shard>.jsonl`` as it comes; ``<shard>.json`` last, when the shard is done.
        task: what the jobs do, where the plan is not enough.
    """

    def __init__(self, root: str | Path, log_dir: str | Path | None = None):
        super().__init__(root, log_dir)
        self.plan = self.root / "shards.json"
        self.shards = self.root / "shards"
        self.task = self.root / "task.json"

    def shard(self, number: int) -> Path:
        """The lines of a shard."""
        return self.shards / f"{number:05d}.jsonl"

    def shard_done(self, number: int) -> Path:
        """The record of how a shard was made; it is there when the shard is done."""
        return self.shards / f"{number:05d}.json"


class BadShardPlan(GpuherdError):
    """The file of the plan can't be used."""

    exit_code = ExitCode.BAD_INPUT


def kept_plan(
    folder: ShardedDirectory, identity: str, make: Callable[[], Sequence[Shard]], *, wanted: int | None = None
) -> tuple[Shard, ...]:
    """The shards of the work in this folder: those of its first start, else those that ``make`` gives, now written.

    Args:
        identity: what the items and their results depend on, as a text.
        wanted: how many shards the user requests now.

    Raises:
        UsageError: the folder's work depends on something else, or has another number of shards than is wanted.
        BadShardPlan, CannotWrite: the file can't be read, or written.
    """
    if folder.plan.exists():
        kept_identity, shards = _read(folder)
        if kept_identity != identity:
            raise UsageError(f"{folder.root} was begun with other items or settings; take another name for this work")
        items = sum(len(shard.items) for shard in shards)
        if number_of_shards(items, len(shards), wanted or len(shards)) != len(shards):
            raise UsageError(f"{folder.root} was begun with {len(shards)} shards and continues so, not with {wanted}")
        return shards
    shards = tuple(make())
    batches = [[list(batch) for batch in shard.batches] for shard in shards]
    text = json.dumps({"format": FORMAT, "identity": identity, "shards": batches}, separators=(",", ":"))
    with creating_file(folder.plan) as file:
        file.write(text.encode() + b"\n")
    # Another start may have been first, with more or fewer GPUs: then its plan holds.
    return read_plan(folder)


def read_plan(folder: ShardedDirectory) -> tuple[Shard, ...]:
    """The shards of work that was begun. Raises BadShardPlan."""
    return _read(folder)[1]


def _read(folder: ShardedDirectory) -> tuple[str, tuple[Shard, ...]]:
    try:
        value = json.loads(folder.plan.read_bytes())
        if value["format"] > FORMAT:
            raise BadShardPlan(f"{folder.plan} is of a newer gpuherd (format {value['format']}); update gpuherd")
        shards = tuple(
            Shard(tuple(tuple(int(item) for item in batch) for batch in batches)) for batches in value["shards"]
        )
        return str(value["identity"]), shards
    except OSError as problem:
        raise BadShardPlan(f"{folder.plan} can't be read: {problem.strerror}; no work was begun there") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadShardPlan(f"{folder.plan} is damaged; remove {folder.root} to begin anew") from None


# ---- what the jobs do


class Damaged(GpuherdError):
    """A finished file is not as it was written, or a shard that is done lacks lines."""

    exit_code = ExitCode.BAD_INPUT


@contextmanager
def undamaged(path: Path, remedy: str) -> Iterator[None]:
    """Raises Damaged where the file can't be read in the block, or is not as it was written."""
    try:
        yield
    except OSError as problem:
        raise Damaged(f"{path} can't be read: {problem.strerror}; {remedy}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise Damaged(f"{path} can't be read: {problem}; {remedy}") from None


def write_task(folder: ShardedDirectory, task: Any) -> None:
    """Writes a dataclass that says what the jobs do. Raises CannotWrite."""
    write_values(folder.task, {"format": FORMAT, **records.jsonable(task)})


def read_task(folder: ShardedDirectory, kind: type[T]) -> T:
    """What ``write_task`` wrote. Raises Damaged."""
    with undamaged(folder.task, f"remove {folder.root} to begin anew"):
        values = json.loads(folder.task.read_bytes())
        if values["format"] > FORMAT:
            raise Damaged(f"{folder.task} is of a newer gpuherd (format {values['format']}); update gpuherd")
        task: T = records.read(kind, values)
    return task


# ---- a job's part

# A batch's items -> a line for each, in their order.
DoBatch = Callable[[tuple[int, ...]], Sequence[str]]


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The work of a job: all its items, and how many of them were done in this start."""

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
    do: DoBatch,
    *,
    stage: str,
    record: Callable[[], Mapping[str, Any]] = dict,
    writes: bool = True,
) -> WorkDone:
    """Does each batch of the shard that is not done yet, and reports its progress in items.

    Args:
        do: given a batch's items, gives a line for each.
        stage: what progress lines call the work.
        record: what is kept of how the shard was made; called when all is done.
        writes: False in the ranks of a tensor-parallel model that compute with the one that writes.

    Raises CannotWrite, ShardBusy, UsageError, BadShardPlan, and what ``do`` raises.
    """
    shard = my_shard(folder, number)
    items, now = len(shard.items), 0
    if not writes:
        # The same batches as the writer: it can't have finished one more without this rank.
        for batch in shard.batches[batches_done(folder.shard(number), shard) :]:
            do(batch)
            now += len(batch)
        return WorkDone(items, now)
    with ShardFile(folder.shard(number), shard, sealed=True) as file:
        todo = file.todo
        before = items - sum(map(len, todo))
        progress.report(before, items, stage)
        for batch in todo:
            file.append(do(batch))
            now += len(batch)
            progress.report(before + now, items, stage)
        # Before the file's lock is released, so that no other worker of this shard is taken to be done.
        mark_done(folder, number, {**record(), "items": items, "items_last_start": now})
    return WorkDone(items, now)


def is_done(folder: ShardedDirectory, number: int) -> bool:
    """Whether a shard is done."""
    return folder.shard_done(number).exists()


def mark_done(folder: ShardedDirectory, number: int, record: Mapping[str, Any]) -> None:
    """Writes the file that says that a shard is done, and how it was made. Raises CannotWrite."""
    write_file(folder.shard_done(number), json.dumps({"format": FORMAT, **record}, indent=2).encode() + b"\n")


# ---- all parts


@dataclass(frozen=True, slots=True)
class ShardedWork:
    """A list of items that jobs share in a folder.

    Attributes:
        identity: what the items and their results depend on, as a text.
        lengths: what each item costs, in tokens, say.
        batches: makes batches of the lengths of a shard's items.
        wanted: how many shards the user requests now.
    """

    folder: ShardedDirectory
    identity: str
    lengths: Sequence[int]
    batches: Batches
    wanted: int | None = None

    @property
    def begun(self) -> bool:
        """Whether a start has written the plan."""
        return self.folder.plan.exists()

    def shards(self, at_once: int) -> tuple[Shard, ...]:
        """The plan: that of the first start, or before it the one for so many jobs at once. Writes nothing."""
        if self.begun:
            return read_plan(self.folder)
        return plan_shards(self.lengths, number_of_shards(len(self.lengths), at_once, self.wanted), self.batches)

    def begin(self, at_once: int) -> tuple[Shard, ...]:
        """The plan, written if this is the first start. Raises as ``kept_plan``."""
        return kept_plan(self.folder, self.identity, lambda: self.shards(at_once), wanted=self.wanted)

    def is_done(self) -> bool:
        """Whether every shard is done."""
        return self.begun and all(
            is_done(self.folder, number) for number, shard in enumerate(read_plan(self.folder)) if shard.items
        )


def items_done(folder: ShardedDirectory, shards: Sequence[Shard]) -> int:
    """The number of items whose lines are written, in whole batches."""
    whole = [shard.batches[: batches_done(folder.shard(number), shard)] for number, shard in enumerate(shards)]
    return sum(len(batch) for batches in whole for batch in batches)


def shard_records(folder: ShardedDirectory, shards: Sequence[Shard]) -> list[dict[str, Any]]:
    """The record of how each shard was made, with the shard's number. Raises Damaged."""
    found = []
    for number, shard in enumerate(shards):
        if not shard.items:
            continue
        path = folder.shard_done(number)
        with undamaged(path, "remove it and start again"):
            found.append({"shard": number, **json.loads(path.read_bytes())})
    return found


def gather(folder: ShardedDirectory, shards: Sequence[Shard], target: Path) -> WrittenLines:
    """Puts the lines of all shards into ``target`` in the order of the items, whole or not at all.

    Raises:
        Damaged: a shard lacks lines; the message says which, and what to remove.
        CannotWrite.
    """
    return write_lines(target, gathered_lines(folder, shards))


def gathered_lines(folder: ShardedDirectory, shards: Sequence[Shard]) -> Iterator[bytes]:
    """The lines of all shards in the order of the items, without line breaks. Raises Damaged."""
    return lines_in_order(
        [(folder.shard(number), shard) for number, shard in enumerate(shards)],
        lambda number: f"remove {folder.shard_done(number)} and start the same command again, which makes the others",
    )


def lines_in_order(parts: Sequence[tuple[Path, Shard]], remedy: Callable[[int], str]) -> Iterator[bytes]:
    """The lines of files, each of a shard, in the order of the items, without line breaks and checksums.

    Args:
        remedy: what to do where the shard of this number lacks lines, in words.

    Raises Damaged.
    """
    places: dict[int, tuple[Path, int, int]] = {}
    for number, (path, shard) in enumerate(parts):
        items = shard.items
        ends = line_ends(path) if path.exists() else []
        if len(ends) != len(items):
            raise Damaged(f"{path} has {len(ends)} whole lines and should have {len(items)}; {remedy(number)}")
        for item, start, end in zip(items, [0, *ends], ends, strict=False):
            places[item] = path, start, end
    for item in sorted(places):
        path, start, end = places[item]
        # Opened anew for each line: there may be more shards than a process may have files open.
        with path.open("rb") as file:
            file.seek(start)
            line = unsealed(file.read(end - start))
        if line is None:
            raise Damaged(f"{path} was changed while it was read; start the same command again")
        yield line
