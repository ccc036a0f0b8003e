"""Rows on disk: what is killed goes on behind its last whole batch, and any division reads back the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.posttrain.runs.collecting import comparison, problems, rollout, rows_of

from gpuherd.errors import ExitCode
from gpuherd.posttrain.engine.options import Stopped
from gpuherd.posttrain.runs.plan import Phase, Step
from gpuherd.posttrain.runs.rows import BadRows, by_problem, collect_rows, line_of, read_round
from gpuherd.posttrain.runs.work import shard_of
from gpuherd.posttrain.types import Problem, Row
from gpuherd.runs.shard_file import Shard, ShardFile
from gpuherd.runs.shards import in_batches


def test_what_was_killed_asks_for_what_is_missing_alone(tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(some: Sequence[Problem]) -> list[Row]:
        asked.extend(each.id for each in some)
        return rows_of(some)

    of, shard = problems(7), in_batches(7, 3)
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    ends: list[dict[str, int]] = []
    figures = collect_rows(whole, shard, of, ask, done=ends.append)
    assert ends == [figures] == [{"problems": 7, "problems_last_start": 7, "rows_last_start": 12}]
    content = whole.read_bytes()
    broken.write_bytes(content[: len(content) * 2 // 3])  # as a kill leaves it
    asked.clear()
    collect_rows(broken, shard, of, ask)
    assert asked == ["p3", "p4", "p5", "p6"] and broken.read_bytes() == content
    asked.clear()
    assert collect_rows(broken, shard, of, ask)["problems_last_start"] == 0 and not asked
    assert read_round([(broken, shard)]) == tuple(rows_of(of))
    # Batches of another number of processes: those that are whole in both stay.
    broken.write_bytes(content[: len(content) * 2 // 3])
    collect_rows(broken, in_batches(7, 2), of, ask)
    assert asked == ["p4", "p5", "p6"] and broken.read_bytes() == content


def test_it_is_stopped_behind_a_batch(tmp_path: Path) -> None:
    path, of, shard = tmp_path / "rows.jsonl", problems(5), in_batches(5, 2)
    with pytest.raises(Stopped, match="stopped with 2 of 5 problems answered"):
        collect_rows(path, shard, of, rows_of, stopping=lambda: True)
    assert len(path.read_bytes().splitlines()) == 2
    collect_rows(path, shard, of, rows_of)
    assert read_round([(path, shard)]) == tuple(rows_of(of))


@pytest.mark.slow
def test_several_processes_collect_the_same_file_and_end_together(tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone.jsonl", tmp_path / "shared.jsonl"
    collect_rows(alone, in_batches(7, 3), problems(7), rows_of)
    root = Path(__file__).parents[3]
    torchrun = [sys.executable, "-m", "gpuherd.posttrain.runs.launch", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    words = [*torchrun, str(root / "tests/posttrain/runs/collecting.py"), str(shared)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.OK, done.stderr
    assert shared.read_bytes() == alone.read_bytes()
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(said[0]["asked"] + said[1]["asked"]) == [each.id for each in problems(7)]
    with ShardFile(shared, in_batches(7, 3), sealed=True):  # another process has it: none waits for the others
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.BUSY and done.stderr.count("another process writes") == 1, done.stderr


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3), max_size=8))
def test_rows_are_grouped_as_they_come(counts: list[int]) -> None:
    asked = problems(len(counts))
    rows = [[rollout(each.id, sample) for sample in range(many)] for each, many in zip(asked, counts, strict=True)]
    assert list(by_problem((row for some in rows for row in some), asked)) == rows


def test_rows_come_on_as_soon_as_a_problem_is_whole() -> None:
    seen = []

    def produce() -> object:
        for number in range(3):
            seen.append(number)
            yield rollout(f"p{number}", 0)

    found = by_problem(produce(), problems(3))  # type: ignore[arg-type]
    next(found)
    assert seen == [0, 1]


@pytest.mark.parametrize("ids", [["p1", "p0"], ["q"]])
def test_strange_rows_are_refused(ids: list[str]) -> None:
    with pytest.raises(BadRows, match="none of this job's, or out of order"):
        list(by_problem([rollout(each, 0) for each in ids], problems(2)))


def shard(number: int, shards: int, *, whole_batches: bool = True) -> Step:
    return Step(Phase.COLLECT, "Q#", "sums", "tiny", 0, number, shards, whole_batches=whole_batches)


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_shards_share_the_problems(count: int, shards: int, batch: int, whole_batches: bool) -> None:
    parts = [shard_of(shard(each, shards, whole_batches=whole_batches), count, batch) for each in range(shards)]
    assert sorted(item for part in parts for item in part.items) == list(range(count))
    assert all(0 < len(some) <= batch for part in parts for some in part.batches)
    if whole_batches:
        assert sorted(some for part in parts for some in part.batches) == list(in_batches(count, batch).batches)
    else:  # a version before wrote such files
        assert [part.items for part in parts] == [tuple(range(count)[each::shards]) for each in range(shards)]


Parts = list[tuple[Path, Shard]]


def write(folder: Path, asked: list[Problem], rows: dict[str, list[Row]], shards: int, whole_batches: bool) -> Parts:
    parts = []
    for number in range(shards):
        path = folder / f"{shards}-{number}.jsonl"
        mine = shard_of(shard(number, shards, whole_batches=whole_batches), len(asked), 2)
        path.write_text("".join(line_of(asked[item], rows[asked[item].id]) + "\n" for item in mine.items))
        parts.append((path, mine))
    return parts


def test_a_round_reads_back_the_same_from_any_number_of_shards(tmp_path: Path) -> None:
    asked = problems(7)
    rows: dict[str, list[Row]] = {each.id: [rollout(each.id, 0), comparison(each.id)] for each in asked}
    rows["p3"] = []
    expected = tuple(row for each in asked for row in rows[each.id])
    for shards in (1, 2, 3, 7):
        for whole_batches in (True, False):
            assert read_round(write(tmp_path, asked, rows, shards, whole_batches)) == expected


def test_what_is_damaged_is_told(tmp_path: Path) -> None:
    asked = problems(2)
    ((path, two),) = write(tmp_path, asked, {each.id: [rollout(each.id, 0)] for each in asked}, 1, True)
    with pytest.raises(BadRows, match=r"has 2 lines and should have 3; remove .*1-0\.json"):
        read_round([(path, in_batches(3, 2))])
    path.write_text(path.read_text().replace('"kind":"rollout"', '"kind":"thing"'))
    with pytest.raises(BadRows, match="is damaged: KeyError"):
        read_round([(path, two)])
    with pytest.raises(BadRows, match="can't be read"):
        read_round([(tmp_path / "none", two)])


def test_a_line_that_has_changed_is_no_row(tmp_path: Path) -> None:
    """Damage that keeps the size: JSON still, and another reward. Only what stands from there on is made again."""
    asked = problems(4)
    rows = {each.id: [rollout(each.id, 0)] for each in asked}
    shard, path = in_batches(4, 2), tmp_path / "00000.jsonl"
    with ShardFile(path, shard, sealed=True) as file:
        for batch in file.todo:
            file.append([line_of(asked[place], rows[asked[place].id]) for place in batch])
    expected = tuple(row for each in asked for row in rows[each.id])
    assert read_round([(path, shard)]) == expected
    first, *others, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, *others, last.replace(b'"reward":', b'"reword":')]))
    with pytest.raises(BadRows, match=r"line 4 is incomplete or has changed; remove .*00000\.json and start the same"):
        read_round([(path, shard)])
    with ShardFile(path, shard, sealed=True) as file:
        assert file.todo == ((2, 3),)
