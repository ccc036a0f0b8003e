"""A job's work in this process: what is collected goes on exactly, and reads back; the reference is evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.posttrain import tiny
from tests.posttrain.runs.conftest import MakeSettings

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.eval.files import read_result
from gpuherd.posttrain.runs.dividing import combinations_of
from gpuherd.posttrain.runs.folder import RoundsDirectory
from gpuherd.posttrain.runs.handing import write_policy
from gpuherd.posttrain.runs.prepared import prepare
from gpuherd.posttrain.runs.record import RunRecord, begin, read_record
from gpuherd.posttrain.runs.settings import Settings
from gpuherd.posttrain.runs.work import Work, do, rows_of_rounds, seed_for, step_named
from gpuherd.posttrain.types import Policy, Rollout


def begun(settings: Settings, root: Path, places: int = 2) -> tuple[RoundsDirectory, RunRecord]:
    folder = RoundsDirectory(root)
    folder.create()
    record = RunRecord(settings, combinations_of(settings, prepare(settings), places), settings.identity(), "/", {})
    return folder, begin(folder, record)


def work(folder: RoundsDirectory, record: RunRecord, name: str) -> Work:
    return Work(folder, record, step_named(record, name), "cpu")


def test_rows_go_on_exactly_and_read_back_in_order(make_settings: MakeSettings, tmp_path: Path) -> None:
    quiet, record = begun(make_settings(), tmp_path / "quiet")
    killed, again = begun(make_settings(), tmp_path / "killed")
    assert read_record(killed) == again
    for number in range(2):
        name = f"QSharp_sums_tiny_r0_collect_{number}"
        assert do(work(quiet, record, name))["problems_last_start"] == 6
        whole = quiet.rows(quiet.data("QSharp", "sums", "tiny", 0), number).read_bytes()
        path = killed.rows(killed.data("QSharp", "sums", "tiny", 0), number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole[: len(whole) * 2 // 3])  # as a kill leaves it
        assert do(work(killed, again, name))["problems_last_start"] == 3
        assert path.read_bytes() == whole
        told = json.loads(killed.rows_done(path.parent, number).read_text())
        assert told["problems"] == 6 and told["rows_last_start"] == 6
    train = work(quiet, record, "QSharp_sums_tiny_r0_train")
    (rows,) = rows_of_rounds(train)
    assert [row.problem for row in rows] == [problem.id for problem in train.problems for _ in range(2)]
    assert all(isinstance(row, Rollout) for row in rows)
    later = work(quiet, record, "QSharp_sums_tiny_r1_collect_0")
    assert later.sampling("round 1").seed != later.sampling("round 0").seed


def test_the_reference_is_evaluated(make_settings: MakeSettings, tmp_path: Path) -> None:
    folder, record = begun(make_settings(), tmp_path / "run")
    do(work(folder, record, "reference_sums_tiny_evaluate"))
    result = read_result(folder.results / "reference" / "tiny" / "sums")
    assert result.about.algorithm == "reference" and result.about.round is None
    assert result.own.metrics.problems == 4 and result.own.metrics.samples == 2
    assert result.policy == Policy(record.settings.models["tiny"].reference).to_dict()


def test_a_share_of_answers_is_the_teachers_and_the_policy_comes_nearer(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    teacher = tiny.tiny_llama(tmp_path / "teacher", seed=7)
    told = {"teacher": str(teacher), "on_policy": 0.5, "batch_size": 6, "lr": 5e-3, "epochs": 3}
    settings = make_settings(algos={"Distill": told}, rounds_of_training=1)
    folder, record = begun(settings, tmp_path / "run")
    for shard in range(2):
        do(work(folder, record, f"Distill_sums_tiny_r0_collect_{shard}"))
    do(work(folder, record, "Distill_sums_tiny_r0_train"))
    lines = read_curves(folder.model("Distill", "sums", "tiny", 0))
    assert len(lines) == 6 and lines[-1]["jsd"] < lines[0]["jsd"] and {line["own"] for line in lines} == {0.5}
    do(work(folder, record, "Distill_sums_tiny_r0_evaluate"))


def test_an_algorithm_is_evaluated_as_it_asks(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(algos={"RLCR": {"instruction": " sure?", "batch_size": 6}}, rounds_of_training=1)
    folder, record = begun(settings, tmp_path / "run")
    do(work(folder, record, "RLCR_sums_tiny_r0_train"))
    assert [line["stated"] for line in read_curves(folder.model("RLCR", "sums", "tiny", 0))] == [0, 0]
    do(work(folder, record, "RLCR_sums_tiny_r0_evaluate"))
    do(work(folder, record, "reference_sums_tiny_evaluate"))
    lengths = []
    for name in ("RLCR", "reference"):
        (path,) = (folder.results / name / "tiny" / "sums").rglob("*answers*.jsonl")
        rows = [json.loads(line.partition("\t")[0]) for line in path.read_text().splitlines()]
        lengths.append([len(row["prompt_ids"]) for row in rows])
    assert [more - less for more, less in zip(*lengths, strict=True)] == [len(" sure?")] * 4  # tokens are characters


def test_which_policy_a_step_asks(make_settings: MakeSettings, tmp_path: Path) -> None:
    folder, record = begun(make_settings(rounds_of_training=3, async_rounds=True), tmp_path / "run")
    reference = Policy(record.settings.models["tiny"].reference)
    for number in range(2):
        place = folder.policy(folder.model("QSharp", "sums", "tiny", number))
        place.parent.mkdir(parents=True)
        write_policy(place, Policy(f"trained{number}"), folder.root)
    asked = {
        name: work(folder, record, f"QSharp_sums_tiny_{name}").policy
        for name in ("r0_train", "r1_collect_0", "r2_collect_0", "r2_train", "r1_evaluate")
    }
    assert asked["r0_train"] == asked["r1_collect_0"] == reference
    assert asked["r2_collect_0"].model == "trained0"
    assert asked["r2_train"].model == asked["r1_evaluate"].model == "trained1"


def test_a_job_that_is_none(make_settings: MakeSettings, tmp_path: Path) -> None:
    _, record = begun(make_settings(), tmp_path / "run")
    with pytest.raises(UsageError, match="no job 'x'"):
        step_named(record, "x")


def test_seeds_of_purposes() -> None:
    assert seed_for(1, "round 0") == seed_for(1, "round 0")
    assert len({seed_for(seed, f"round {number}") for seed in range(5) for number in range(20)}) == 100
