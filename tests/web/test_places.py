"""Which folders the pages show, whose they are, and which of them are believed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from tests.web.scenes import Scene, place_of

from gpuherd.posttrain.runs.folder import RoundsDirectory, TrainDirectory
from gpuherd.qa.folder import KIND
from gpuherd.web.places import Places, Results, key_of, results_of


def test_a_folder_of_runs_stands_for_the_runs_in_it(tmp_path: Path) -> None:
    top = tmp_path / "outputs"
    Scene(top / "first" / "2026-11-22")
    for name, record in (("a", {"kind": "train"}), ("b", {"kind": "posttrain"}), ("c", {"kind": "qa"}), ("d", {})):
        (top / name).mkdir()
        (top / name / "run.json").write_text(json.dumps(record))
    (top / "esd").mkdir()
    (top / "esd" / "esd_results_summary.csv").write_text("model\n")
    for name in ("stats", "coverage"):
        (top / "unfinished" / name).mkdir(parents=True)
    (top / ".hidden").mkdir()
    Scene(top / ".hidden" / "run")
    (top / "link").symlink_to(top / "a")
    found = {place.title: place for place in Places([top]).all()}
    assert found.keys() == {
        "outputs/first/2026-11-22",
        "outputs/a",
        "outputs/b",
        "outputs/c",
        "outputs/esd",
        "outputs/unfinished",
    }
    assert found["outputs/first/2026-11-22"].has_queue
    assert {title: place.results for title, place in found.items()} == {
        "outputs/first/2026-11-22": None,
        "outputs/a": Results.TRAINING,
        "outputs/b": Results.POSTTRAIN,
        "outputs/c": Results.ANSWERS,
        "outputs/esd": Results.SPECTRA,
        "outputs/unfinished": Results.SPECTRA,
    }
    assert len({place.key for place in found.values()}) == 6


def test_the_kinds_are_those_that_the_rooms_write(tmp_path: Path) -> None:
    for kind, results in (
        (KIND, "answers"),
        (RoundsDirectory.kind, "post-training"),
        (TrainDirectory.kind, "training"),
    ):
        (tmp_path / "run.json").write_text(json.dumps({"kind": kind}))
        assert results_of(tmp_path) == results


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"kind": ["qa"]}', "[" * 100_000, '{"kind": 7}'])
def test_a_broken_record_is_no_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    assert results_of(tmp_path) is None


def test_records_that_are_no_files_or_endless_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    assert results_of(tmp_path) is None
    (tmp_path / "run.json").unlink()
    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(2**30)
    began = time.monotonic()
    assert results_of(tmp_path) is None and time.monotonic() - began < 1


def test_own_queues_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUHERD_QUEUE", str(tmp_path / "own"))
    assert Places().all() == ()
    Scene(tmp_path / "own")
    Scene(tmp_path / "own-slurm")
    Scene(tmp_path / "run")
    places = Places([tmp_path / "run", tmp_path / "own", tmp_path / "nothing"]).all()
    assert [(place.title, place.engine) for place in places] == [
        ("My queue", "local"),
        ("My queue for SLURM", "slurm"),
        ("run", None),
    ]


def test_only_a_folder_of_ones_own_that_others_can_not_write_is_trusted(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run")
    for root, queue, trusted in (
        (0o755, 0o600, True),
        (0o777, 0o600, False),
        (0o775, 0o600, True),
        (0o755, 0o666, False),
    ):
        scene.run.root.chmod(root)
        scene.run.queue.chmod(queue)
        assert scene.place.trusted is trusted
    assert "chmod o-w" in scene.place.why_not_trusted


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_run_of_another_user_is_theirs(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run")
    os.chown(scene.run.queue, 12345, -1)
    assert not scene.place.trusted
    os.chown(scene.run.root, 12345, -1)
    place = scene.place
    assert not place.trusted and place.uid == 12345 and "uid 12345" in place.why_not_trusted


def test_keys_name_one_folder_each_and_no_path() -> None:
    keys = {key_of(Path(name)) for name in ("/a/run", "/b/run", "/b/RUN", "/\udcff", "/" + "x" * 300, "/a/../b")}
    assert len(keys) == 6
    assert all(len(key) < 60 and key.replace("-", "").isalnum() and key.isascii() for key in keys)


def test_a_key_leads_to_known_folders_only_and_to_how_they_stand_now(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run")
    places = Places([tmp_path / "run"])
    key = scene.place.key
    assert places.find("../../etc") is None and places.find(key_of(Path("/etc"))) is None
    scene.run.root.chmod(0o777)
    found = places.find(key)
    assert found is not None and not found.trusted
    scene.queue.close()
    scene.run.root.rename(tmp_path / "moved")
    gone = places.find(key)
    assert gone is not None and not gone.trusted and not gone.has_queue


def test_a_queue_that_comes_is_found_after_a_while_or_on_request(tmp_path: Path) -> None:
    places = Places([tmp_path])
    assert places.all() == ()
    Scene(tmp_path / "run")
    assert places.all() == ()
    places.forget()
    assert [place.title for place in places.all()] == [f"{tmp_path.name}/run"]
    assert place_of(tmp_path / "run").changed_at > time.time() - 60
