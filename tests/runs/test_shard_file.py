"""What a killed writer leaves, at any byte, is cut back to whole batches; what is written then is as if nothing had
happened."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import ExitCode, UsageError
from gpuherd.runs.files import sha256_of
from gpuherd.runs.shard_file import Shard, ShardBusy, ShardFile, batches_done, line_ends
from gpuherd.runs.shards import (
    BadShardPlan,
    Damaged,
    ShardedDirectory,
    gather,
    gathered_lines,
    is_done,
    kept_plan,
    read_plan,
    work_through,
)

SHARD = Shard(((4, 0), (2,), (1, 3, 5)))


def lines_of(batch: tuple[int, ...]) -> list[str]:
    return [json.dumps({"item": item, "text": "Zürich\u2028" * item}) for item in batch]


def written(path: Path, shard: Shard = SHARD) -> bytes:
    with ShardFile(path, shard) as file:
        for batch in file.todo:
            file.append(lines_of(batch))
    return path.read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("whole") / "0.jsonl")


def test_a_file_cut_anywhere_goes_on_to_the_same_bytes(tmp_path: Path, undisturbed: bytes) -> None:
    path = tmp_path / "0.jsonl"
    ends = [place for place, byte in enumerate(undisturbed) if byte == ord("\n")]
    around = {end + step for end in ends for step in (-1, 0, 1)}
    for length in sorted({*range(0, len(undisturbed), 40), *around, len(undisturbed)}):
        path.write_bytes(undisturbed[:length])
        assert written(path) == undisturbed


@settings(max_examples=20)
@given(st.binary(max_size=60), st.integers(0, 6))
def test_what_no_writer_wrote_is_cut_off(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: bytes, junk: bytes, lines: int
) -> None:
    path = tmp_path_factory.mktemp("junk") / "0.jsonl"
    kept = b"".join(undisturbed.splitlines(keepends=True)[:lines])
    # A power cut can leave zeros, or bytes of another file.
    path.write_bytes(kept + b"\0\0" + junk + b"\n")
    assert written(path) == undisturbed


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    with ShardFile(path, SHARD), pytest.raises(ShardBusy) as refused:
        ShardFile(path, SHARD)
    assert refused.value.exit_code is ExitCode.BUSY
    assert "another process writes" in str(refused.value)
    with ShardFile(path, SHARD) as again:
        assert again.done == 0


def test_a_batch_is_whole(tmp_path: Path) -> None:
    with ShardFile(tmp_path / "0.jsonl", SHARD) as file:
        with pytest.raises(ValueError, match="1 lines for 2 items"):
            file.append(["{}"])
        with pytest.raises(ValueError, match="one line"):
            file.append(["{}", "{\n}"])
        file.append(lines_of(SHARD.batches[0]))
        assert file.todo == SHARD.batches[1:]
    assert batches_done(tmp_path / "0.jsonl", SHARD) == 1


# ---- a job's side, and what is made of it ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> ShardedDirectory:
    found = ShardedDirectory(tmp_path / "run")
    kept_plan(found, "these", lambda: [SHARD, Shard(((6,), (7, 8))), Shard(())])
    return found


def test_work_is_done_once(folder: ShardedDirectory) -> None:
    asked: list[tuple[int, ...]] = []

    def do(batch: tuple[int, ...]) -> list[str]:
        asked.append(batch)
        return lines_of(batch)

    first = work_through(folder, 0, do, stage="x", record=lambda: {"dtype": "float32"})
    assert (first.items, first.now, asked) == (6, 6, list(SHARD.batches))
    assert is_done(folder, 0) and not is_done(folder, 1)
    assert json.loads(folder.shard_done(0).read_bytes())["dtype"] == "float32"
    again = work_through(folder, 0, do, stage="x")
    assert (again.now, len(asked)) == (0, 3)


def test_work_that_fails_goes_on_behind_what_was_done(folder: ShardedDirectory) -> None:
    def fails_at(item: int | None) -> object:
        def do(batch: tuple[int, ...]) -> list[str]:
            if item in batch:
                raise RuntimeError("lost")
            return lines_of(batch)

        return do

    with pytest.raises(RuntimeError, match="lost"):
        work_through(folder, 0, fails_at(3), stage="x")  # type: ignore[arg-type]
    assert not is_done(folder, 0)
    assert work_through(folder, 0, fails_at(None), stage="x").now == 3  # type: ignore[arg-type]


def test_ranks_that_do_not_write_do_the_same_batches(folder: ShardedDirectory) -> None:
    with ShardFile(folder.shard(0), SHARD) as file:
        file.append(lines_of(SHARD.batches[0]))
    asked = []
    before = folder.shard(0).read_bytes()
    work_through(folder, 0, lambda batch: asked.append(batch) or [], stage="x", writes=False)  # type: ignore[func-returns-value]
    assert asked == [(2,), (1, 3, 5)]
    assert folder.shard(0).read_bytes() == before and not is_done(folder, 0)


def test_gathered_in_the_order_of_items(folder: ShardedDirectory) -> None:
    for number in range(3):
        work_through(folder, number, lines_of, stage="x")
    target = folder.root / "all.jsonl"
    made = gather(folder, read_plan(folder), target)
    assert [json.loads(line)["item"] for line in target.read_bytes().splitlines()] == list(range(9))
    assert made.lines == 9 and made.sha256 == sha256_of(target)


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    found, many = ShardedDirectory(tmp_path / "run"), 40
    kept_plan(found, "these", lambda: [Shard(((number,),)) for number in range(many)])
    found.shards.mkdir()
    for number in range(many):
        found.shard(number).write_text(f'{{"item": {number}}}\n')
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, limits[1]))
    try:
        assert gather(found, read_plan(found), found.root / "all.jsonl").lines == many
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_shard_that_lacks_lines_is_told(folder: ShardedDirectory) -> None:
    for number in range(3):
        work_through(folder, number, lines_of, stage="x")
    os.truncate(folder.shard(1), line_ends(folder.shard(1))[0])
    with pytest.raises(Damaged, match=r"1 whole lines and should have 3; remove .*00001\.json"):
        list(gathered_lines(folder, read_plan(folder)))
    target = folder.root / "all.jsonl"
    with pytest.raises(Damaged):
        gather(folder, read_plan(folder), target)
    assert not target.exists()


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_the_first_plan_is_kept(folder: ShardedDirectory) -> None:
    before = folder.plan.read_bytes()
    assert kept_plan(folder, "these", lambda: [Shard(((0,),))])[0] == SHARD
    assert folder.plan.read_bytes() == before
    with pytest.raises(UsageError, match="other items or settings"):
        kept_plan(folder, "those", list)
    with pytest.raises(UsageError, match="begun with 3 shards"):
        kept_plan(folder, "these", list, wanted=2)
    assert len(kept_plan(folder, "these", list, wanted=3)) == 3


def test_a_plan_that_cannot_be_used(folder: ShardedDirectory, tmp_path: Path) -> None:
    with pytest.raises(BadShardPlan, match="no work was begun"):
        read_plan(ShardedDirectory(tmp_path / "nothing"))
    for text, told in (
        (b"{", "damaged"),
        (b"[]", "damaged"),
        (b'{"format": 1, "identity": "x", "shards": [[["a"]]]}', "damaged"),
        (b'{"format": 99}', "newer gpuherd"),
    ):
        folder.plan.write_bytes(text)
        with pytest.raises(BadShardPlan, match=told):
            read_plan(folder)


def test_there_is_no_such_shard(folder: ShardedDirectory) -> None:
    with pytest.raises(UsageError, match="has 3 shards, from 0; there is no shard 3"):
        work_through(folder, 3, lines_of, stage="x")


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_any_bit_of_a_sealed_shard_that_changes_is_noticed_and_made_again(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("sealed") / "0.jsonl"

    def write() -> bytes:
        with ShardFile(path, SHARD, sealed=True) as file:
            for batch in file.todo:
                file.append(lines_of(batch))
        return path.read_bytes()

    undisturbed = write()
    assert len(line_ends(path)) == 6 and batches_done(path, SHARD) == 3
    damaged = bytearray(undisturbed)
    place %= len(damaged)
    damaged[place] ^= 1 << bit
    path.write_bytes(damaged)
    # Nothing before the line with that bit is lost; of what stands behind it nothing is believed.
    assert len(line_ends(path)) == undisturbed[:place].count(b"\n")
    assert write() == undisturbed


def test_lines_of_versions_before_are_read_beside_sealed_ones(tmp_path: Path, undisturbed: bytes) -> None:
    folder = ShardedDirectory(tmp_path / "work")
    kept_plan(folder, "same", lambda: (SHARD,))
    folder.shard(0).parent.mkdir(parents=True, exist_ok=True)
    folder.shard(0).write_bytes(b"".join(undisturbed.splitlines(keepends=True)[:2]))
    work_through(folder, 0, lines_of, stage="test")
    raw = folder.shard(0).read_bytes()
    assert raw.count(b"\t") == 4 and raw.startswith(b"".join(undisturbed.splitlines(keepends=True)[:2]))
    assert sorted(gathered_lines(folder, (SHARD,))) == sorted(undisturbed.splitlines())
