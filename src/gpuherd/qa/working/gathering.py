"""Makes one file of what the jobs wrote: a line an item, in the items' order, written whole, with its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_write, replacing
from gpuherd.errors import CannotWrite, ExitCode, GpuherdError
from gpuherd.qa.folder import ShardedDirectory
from gpuherd.qa.working.shardfile import line_ends, unsealed
from gpuherd.qa.working.sharding import Shard

_CHUNK = 1 << 20


class Damaged(GpuherdError):
    """A file that was finished is not as it was written, or a shard that is done lacks lines."""

    exit_code = ExitCode.BAD_INPUT


@dataclass(frozen=True, slots=True)
class Written:
    """A file that is there as a whole: its digest, and how many lines it has."""

    sha256: str
    lines: int


def gather(folder: ShardedDirectory, shards: Sequence[Shard], target: Path) -> Written:
    """Puts the lines of all shards into ``target`` in the order of the items, whole or not at all.

    Raises:
        Damaged: a shard lacks lines; the message says which, and what to remove.
        CannotWrite.
    """
    return write_lines(target, gathered_lines(folder, shards))


def gathered_lines(folder: ShardedDirectory, shards: Sequence[Shard]) -> Iterator[bytes]:
    """The lines of all shards in the order of the items, without line breaks. Raises Damaged."""
    places: dict[int, tuple[Path, int, int]] = {}
    for number, shard in enumerate(shards):
        path = folder.shard(number)
        items = shard.items
        ends = line_ends(path) if path.exists() else []
        if len(ends) != len(items):
            raise Damaged(
                f"{path} has {len(ends)} whole lines and should have {len(items)}; remove "
                f"{folder.shard_done(number)} and start the same command again, which makes the others"
            )
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


def write_lines(target: Path, lines: Iterable[bytes]) -> Written:
    """Writes lines, whole or not at all. Raises CannotWrite."""
    digest, count = hashlib.sha256(), 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            for line in lines:
                whole = line + b"\n"
                digest.update(whole)
                file.write(whole)
                count += 1
    except OSError as problem:
        raise CannotWrite(f"can't write {target}: {problem.strerror}") from None
    return Written(digest.hexdigest(), count)


def write_values(target: Path, values: Mapping[str, Any]) -> None:
    """Writes JSON for people and programs, whole or not at all. Raises CannotWrite."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, json.dumps(values, indent=2, allow_nan=False, default=str).encode() + b"\n")
    except OSError as problem:
        raise CannotWrite(f"can't write {target}: {problem.strerror}") from None


def sha256_of(path: Path) -> str:
    """A file's digest in hex. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
