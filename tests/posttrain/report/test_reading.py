"""Runs are read as they are: whole, unfinished, damaged, and what is none of ours."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.jobs.attempts import SIMULATED_GPU, queue_that_ran_on
from tests.posttrain.report.made_runs import made_curves, made_run, made_training

from gpuherd.errors import UsageError
from gpuherd.jobs.queue.reader import SIMULATED_GPUS
from gpuherd.posttrain.report import OutputKind, output_kind
from gpuherd.posttrain.report.jobs import Bar, gpu_hours, hours_by, read_timeline
from gpuherd.posttrain.report.reading import SHOWN_PROBLEMS, RunReport, find_trainings, read_run, series_of, thinned


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return read_run(made_run(tmp_path_factory.mktemp("look") / "run"))


def test_all_that_a_run_holds(shown: RunReport) -> None:
    assert shown.title == "first" and len(shown.gathered.rows) == 11
    assert [each.name for each in shown.trainings] == [
        "DPO/star_tiny_r0", "DPO/star_tiny_r1", "QSharp/star_tiny_r0", "QSharp/star_tiny_r1",
    ]  # fmt: skip
    assert shown.trainings[0].steps == 120 and set(shown.trainings[0].series) == {
        "loss", "reward", "kl", "entropy", "learning_rate",
    }  # fmt: skip
    assert len(shown.samples) == 11 and all(len(each.answered) == SHOWN_PROBLEMS for each in shown.samples)
    assert ("algos.QSharp.lr", "2e-05") in shown.settings and ("x[0].y", "1") in shown.settings
    assert shown.facts == [
        ("", "gpuherd posttrain", ""),
        ("policies evaluated", "7", ""),
        ("trainings", "4", ""),
        ("jobs done", "6", ""),
        ("job running", "1", ""),
        ("job waiting", "1", ""),
        ("job failed", "1", "#/jobs"),
        ("GPU-hours", "0.14", ""),
        ("started", "2026-11-22 04:30 UTC", ""),
    ]
    assert shown.notes == ["This run was not finished when this page was made: 1 running, 1 waiting.", "a note"]


def test_jobs_in_time_and_what_failed(shown: RunReport) -> None:
    timeline = shown.timeline
    assert timeline is not None
    assert [(bar.phase, bar.lanes, bar.start, bar.end, bar.state) for bar in timeline.bars][:3] == [
        ("collect", ("GPU 0",), 0.0, 60.0, "done"),
        ("collect", ("GPU 1",), 0.0, 40.0, "failed"),
        ("collect", ("GPU 1",), 45.0, 95.0, "done"),
    ]
    assert timeline.bars[-1].end is None and timeline.bars[-1].state == "running"
    assert timeline.counts == {"done": 6, "failed": 1, "running": 1, "waiting": 1}
    assert [(each.job, each.kind, each.final) for each in timeline.failures] == [
        ("DPO_star_tiny_r0_train", "out of memory", True),
        ("QSharp_star_tiny_r0_collect_1", "out of memory", False),
    ]
    assert dict(timeline.gpu_hours or {}) == {
        "collect": pytest.approx((60 + 40 + 50 + 54 + 29) / 3600),
        "train": pytest.approx((204 + 19) / 3600),
        "evaluate": pytest.approx(49 / 3600),
    }
    assert timeline.hours["DPO"] == {"collect": pytest.approx(83 / 3600), "train": pytest.approx(19 / 3600)}
    assert set(timeline.hours) == {"DPO", "QSharp"}


def test_all_attempts_count_though_not_all_are_drawn(tmp_path: Path) -> None:
    root = made_run(tmp_path / "run")
    whole, few = (read_timeline(root / "queue.sqlite", ["DPO"], most) for most in (9, 3))
    assert (len(whole.bars), whole.left_out) == (9, 0) and (len(few.bars), few.left_out) == (3, 6)
    assert few.gpu_hours == whole.gpu_hours and few.hours == whole.hours and few.failures == whole.failures
    with closing(sqlite3.connect(root / "queue.sqlite")) as db, db:
        db.execute("UPDATE attempts SET gpus = '{'")
    shown = read_run(root)
    assert shown.timeline is None and any("damaged" in each for each in shown.notes)


def test_hours_by_the_longest_name_that_fits() -> None:
    cpu = Bar("GRPO-HF_a_r0_train", "train", ("CPU",), 0, 3600, "done", 0)
    assert gpu_hours([cpu]) is None
    two = Bar("GRPO_a_r0_x", "", ("0", "1"), 0, 1800, "failed", 2)
    running = Bar("GRPO_a_r0_train", "train", ("0",), 0, None, "running", 1)
    assert hours_by([cpu, two, running, Bar("new_job", "", ("CPU",), 0, 36, "done", 0)], ["GRPO", "GRPO-HF"]) == {
        "GRPO-HF": {"train": 1.0},
        "GRPO": {"other": 1.0},
        "new": {"other": 0.01},
    }


def test_an_output_of_train(tmp_path: Path) -> None:
    folder = made_training(tmp_path / "out")
    assert output_kind(folder) is OutputKind.TRAINING
    shown = read_run(folder)
    assert shown.title == "sums" and shown.timeline is None and shown.gathered.rows == ()
    assert [each.name for each in shown.trainings] == ["out"]
    assert shown.facts == [
        ("", "gpuherd train", ""),
        ("", "ppo", ""),
        ("steps", "60", ""),
        ("reward at the end", "0.9", ""),
    ]
    assert shown.notes == []
    (folder / "done.json").unlink()
    assert read_run(folder).notes == ["This training was not finished when this page was made."]
    assert ("training.algorithm", "ppo") in shown.settings and ("ended with.last.reward", "0.9") in shown.settings


def test_simulated_gpus_are_told(tmp_path: Path) -> None:
    root = made_run(tmp_path / "run")
    assert SIMULATED_GPUS not in read_run(root).notes
    (root / "queue.sqlite").unlink()
    queue_that_ran_on(root / "queue.sqlite", SIMULATED_GPU)
    assert read_run(root).notes[0] == SIMULATED_GPUS
    folder = made_training(tmp_path / "out")
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**about, "simulated": True}))
    assert read_run(folder).notes == [SIMULATED_GPUS]


def test_what_is_none_of_ours_or_empty(tmp_path: Path) -> None:
    for content in (None, "{", "[1]", '{"kind": "answers"}', '{"kind": 3}', "{}"):
        folder = tmp_path / f"f{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        if content is not None:
            (folder / "run.json").write_text(content)
        assert output_kind(folder) is None
        with pytest.raises(UsageError, match="no run of gpuherd posttrain"):
            read_run(folder)
    (folder / "run.json").write_text('{"kind": "posttrain"}')
    with pytest.raises(UsageError, match="nothing is finished"):
        read_run(folder)


def test_damage_is_told_and_spoils_nothing_else(tmp_path: Path) -> None:
    root = made_run(tmp_path / "run")
    (root / "models" / "DPO" / "star_tiny_r0" / "curves.jsonl").write_text('{"step": "x"}\n')
    (root / "results" / "DPO" / "tiny" / "star" / "r0" / "answers.jsonl").write_text("nonsense\n")
    (root / "results" / "CD" / "tiny" / "star" / "r0" / "result.json").write_text(json.dumps({"format": 1}))
    (root / "queue.sqlite").write_bytes(b"no queue at all, and long enough to be looked at" * 50)
    shown = read_run(root)
    assert len(shown.trainings) == 3 and shown.timeline is None
    assert len(shown.gathered.rows) == 9 and len(shown.samples) == 8
    for word in ("curves.jsonl", "answers.jsonl", "result.json", "queue"):
        assert any(word in note for note in shown.notes), word


def test_many_trainings_have_coarser_curves(tmp_path: Path) -> None:
    for number in range(4):
        made_curves(tmp_path / f"t{number}", ("loss", "reward"), seed=number)
    found, told = find_trainings(tmp_path, most_points=700)
    assert [each.steps for each in found] == [120] * 4 and told == []
    assert 400 <= sum(len(points) for each in found for points in each.series.values()) <= 750


def test_figures_that_are_no_numbers_are_left_out() -> None:
    found = series_of(
        [
            {"step": 1, "a": 1, "b": True, "c": "x"},
            {"step": 2, "a": float("nan"), "d": 2.5, "e": 10**400},
            {"step": 10**400, "a": 1},
        ]
    )
    assert found == {"a": [(1.0, 1.0)], "d": [(2.0, 2.5)]}


@settings(max_examples=30)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500), st.integers(1, 60))
def test_thinned_curves_keep_their_mean_and_ends(values: list[float], most: int) -> None:
    points = [(float(step), value) for step, value in enumerate(values)]
    found = thinned(points, most)
    assert len(found) <= most or len(points) <= most
    assert [x for x, _ in found] == sorted(x for x, _ in found)
    assert min(values) - 1e-6 <= min(y for _, y in found) and max(y for _, y in found) <= max(values) + 1e-6
