"""Curves: a line a step, none twice."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpuherd.errors import CannotWrite, MissingExtra, UsageError
from gpuherd.posttrain.engine.curves import Curves, read_curves
from gpuherd.posttrain.engine.dist_env import DistEnv

WORLD = DistEnv.single()


def test_lines_are_read_back(tmp_path: Path) -> None:
    with Curves(tmp_path, WORLD) as curves:
        curves.log(1, {"loss": 0.5, "reward": None})
        curves.log(2, {"loss": 0.25})
    assert read_curves(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    assert read_curves(tmp_path / "none") == []


def test_going_on_cuts_later_steps_off(tmp_path: Path) -> None:
    with Curves(tmp_path, WORLD) as curves:
        for step in range(1, 5):
            curves.log(step, {"loss": float(step)})
    with (tmp_path / "curves.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a kill
    with Curves(tmp_path, WORLD, step=2) as curves:
        curves.log(3, {"loss": 9.0})
    assert [(line["step"], line["loss"]) for line in read_curves(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 9.0)]


def test_a_figure_that_is_none_is_refused(tmp_path: Path) -> None:
    with Curves(tmp_path, WORLD) as curves, pytest.raises(ValueError, match="reward of step 1 is nan"):
        curves.log(1, {"reward": float("nan")})
    with pytest.raises(ValueError, match="closed"):
        curves.log(1, {"reward": 1.0})


def test_a_file_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "curves.jsonl").write_text("dear diary\n")
    with pytest.raises(UsageError, match="line 1"):
        Curves(tmp_path, WORLD)
    assert (tmp_path / "curves.jsonl").read_text() == "dear diary\n"


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    with Curves(tmp_path / "new", DistEnv(1, 2, 1, "cpu", "gloo")) as curves:
        curves.log(1, {"loss": 1.0})
    assert not (tmp_path / "new").exists()


def test_reporters(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mlflow"):
        Curves(tmp_path, WORLD, report_to=("mlflow",))
    try:
        import wandb  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(MissingExtra, match="pip install wandb"):
            Curves(tmp_path, WORLD, report_to=("wandb",))
    if find_spec("trackio") is None:
        with pytest.raises(MissingExtra, match="pip install trackio"):
            Curves(tmp_path, WORLD, report_to=("trackio",))


def test_a_training_that_goes_on_goes_on_with_its_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, object]] = []

    class Run:
        def log(self, figures: dict[str, float], step: int) -> None:
            begun[-1].setdefault("steps", []).append(step)  # type: ignore[attr-defined]

        def finish(self) -> None:
            """Nothing is sent."""

    def init(**told: object) -> Run:
        begun.append(told)
        return Run()

    wandb = ModuleType("wandb")
    wandb.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for step in (0, 1, 2):
        with Curves(tmp_path / "a", WORLD, report_to=("wandb",), step=step) as curves:
            curves.log(step + 1, {"loss": 1.0})
    with Curves(tmp_path / "b", WORLD, report_to=("wandb",)):
        pass
    first, second, third, other = begun
    assert first["id"] == second["id"] == third["id"] != other["id"]
    assert {each["resume"] for each in begun} == {"allow"}
    assert [each.get("steps") for each in begun] == [[1], [2], [3], None]
    # A training that begins again in the same folder is another run; what the environment says counts.
    with Curves(tmp_path / "a", WORLD, report_to=("wandb",)):
        assert begun[-1]["id"] != first["id"]
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    with Curves(tmp_path / "a", WORLD, report_to=("wandb",), step=1):
        assert begun[-1]["id"] == "mine"


def test_a_training_that_goes_on_goes_on_with_its_run_of_trackio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []

    class Run:
        def log(self, figures: dict[str, float], step: int) -> None:
            begun[-1].setdefault("logged", []).append((step, figures))

    def finish() -> None:
        begun[-1]["finished"] = True

    def init(**told: Any) -> Run:
        begun.append(told)
        print("trackio says where it logs")
        return Run()

    trackio = ModuleType("trackio")
    trackio.init, trackio.finish = init, finish  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    for step in (0, 1):
        with Curves(tmp_path / "a", WORLD, ("trackio",), step=step, name="mine", project="sums") as curves:
            curves.log(step + 1, {"loss": 1.0})
    with Curves(tmp_path / "a", WORLD, ("trackio",)):
        pass
    first, second, again = begun
    assert first["name"] == second["name"] != again["name"] and first["name"].startswith("mine-")
    assert (first["project"], again["project"]) == ("sums", "gpuherd") and again["name"].startswith("a-")
    assert first["logged"] == [(1, {"loss": 1.0})] and second["logged"] == [(2, {"loss": 1.0})]
    assert all(each["finished"] and each["resume"] == "allow" for each in begun)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_has_one_run_of_a_training_that_goes_on(tmp_path: Path) -> None:
    """By trackio itself, offline, where it is installed; two processes, as a training and the one that goes on."""
    pytest.importorskip("trackio")
    script = """
import sys
from pathlib import Path
from gpuherd.posttrain.engine.curves import Curves
from gpuherd.posttrain.engine.dist_env import DistEnv
begun = int(sys.argv[2])
with Curves(Path(sys.argv[1]), DistEnv.single(), ("trackio",), step=begun, name="mine", project="sums") as curves:
    for step in range(begun + 1, begun + 3):
        curves.log(step, {"loss": 1.0 / step})
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    for begun in ("0", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "a"), begun],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert done.stdout == ""
    read = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
names = [each.name for each in trackio.Api().runs("sums")]
print(json.dumps([names, [[each["step"], each["loss"]] for each in SQLiteStorage.get_logs("sums", names[0])]]))
"""
    found = subprocess.run(
        [sys.executable, "-c", read], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    names, logged = json.loads(found.stdout.strip().splitlines()[-1])
    assert names == [(tmp_path / "a" / "trackio-run").read_text().strip()]
    assert logged == [[step, 1 / step] for step in (1, 2, 3, 4)]


@pytest.mark.slow
def test_tensorboard_gets_its_files(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Curves(tmp_path, WORLD, report_to=("tensorboard",)) as curves:
        curves.log(1, {"loss": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(1, 0.5)]


def test_what_can_not_be_written_is_told(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Curves(tmp_path, WORLD) as curves:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            with pytest.raises(CannotWrite, match=r"curves\.jsonl: File too large"):
                curves.log(1, {"loss": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
