"""A user's code that is called while a model is trained: its events, what is refused, and that it changes nothing."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain.algos.training_work import curves, same, work
from tests.posttrain.guidance.conftest import reference, small
from tests.posttrain.guidance.test_training import rollouts
from tests.posttrain.preference.vowels import collecting
from tests.posttrain.preference.vowels import training as sft_training

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.grpo import GRPO, GRPOOptions
from gpuherd.posttrain.algos.qsharp import QSharp
from gpuherd.posttrain.algos.sft import SFT
from gpuherd.posttrain.engine.callbacks import Callbacks, check_callbacks
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import Stopped
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.runs import console

__all__ = ["reference", "small"]
FAST = GRPOOptions(lr=5e-3, kl_coef=0.0, epochs=2, batch_size=4, samples_per_prompt=2)
WATCH = """
import json, os, pathlib

MADE = []

class Watch:
    def __init__(self):
        MADE.append(self)
        self.file = pathlib.Path(__file__).with_suffix(".jsonl")

    def on_step(self, event):
        self.note(event)

    on_evaluation = on_checkpoint = on_end = on_step

    def note(self, event):
        told = {"kind": event.kind, "step": event.step, "of": event.total_steps, "metrics": dict(event.metrics),
                "folder": str(event.folder), "path": event.path and str(event.path),
                "there": event.path and event.path.is_dir(), "pid": os.getpid()}
        with self.file.open("a") as file:
            file.write(json.dumps(told) + "\\n")

class AtTheEnd:
    def on_end(self, event):
        with pathlib.Path(__file__).with_suffix(".end").open("a") as file:
            file.write(f"{len(MADE)} {event.path.name}\\n")

class Broken:
    def on_step(self, event):
        raise ValueError("a bug of mine")
    def on_end(self, event):
        raise SystemExit("enough")

class Unmade:
    def __init__(self):
        raise RuntimeError("no server")
    def on_step(self, event): ...

class Nothing:
    def of_step(self, event): ...

watch = Watch
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(WATCH)
    return path


def told(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.with_suffix(".jsonl").read_text().splitlines()]


def test_it_is_told_of_steps_evaluations_checkpoints_and_the_end(
    policy_model: Path, tmp_path: Path, file: Path
) -> None:
    hooks = Hooks(
        callbacks=(f"{file}:Watch", f"{file}:AtTheEnd"),
        save_every=2,
        evaluate=lambda _, step: {"eval/accuracy": float(step)},
        evaluate_every=2,
    )
    GRPO(FAST).train(work(policy_model, tmp_path / "out", hooks=hooks))
    events = told(file)
    assert [(each["kind"], each["step"]) for each in events] == [
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("checkpoint", 2),
        ("step", 3),
        ("step", 4),
        ("evaluation", 4),
        ("checkpoint", 4),
        ("end", 4),
    ]
    assert all(each["of"] == 4 and each["folder"] == str(tmp_path / "out") for each in events)
    lines = read_curves(tmp_path / "out")
    for line, each in zip(lines, [each for each in events if each["kind"] == "step"], strict=True):
        assert {"step": each["step"], **each["metrics"]} == line
    assert events[2]["metrics"] == {"eval/accuracy": 2.0}
    assert Path(events[3]["path"]).name == "step-00000002" and events[3]["there"]
    assert events[-1]["path"] == str(tmp_path / "out/model") and events[-1]["there"]
    # Both classes are of one module.
    assert file.with_suffix(".end").read_text() == "1 model\n"


def test_what_it_raises_is_logged_and_changes_nothing(
    policy_model: Path, tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_warned", set())
    GRPO(FAST).train(work(policy_model, tmp_path / "without"))
    hooks = Hooks(callbacks=(f"{file}:Broken", f"{file}:Watch"))
    with caplog.at_level(logging.WARNING):
        GRPO(FAST).train(work(policy_model, tmp_path / "with", hooks=hooks))
    assert same(tmp_path / "with/model", tmp_path / "without/model")
    assert curves(tmp_path / "with") == curves(tmp_path / "without")
    said = [each.getMessage() for each in caplog.records if "callback" in each.getMessage()]
    assert len(said) == 2  # the first step's, and the end's
    assert "mine.py:Broken, on_step at step 1: it raised ValueError: a bug of mine (mine.py, line" in said[0]
    assert "on_end at step 4: it raised SystemExit (enough)" in said[1]
    assert len([each for each in told(file) if each["kind"] == "step"]) == 4  # the other one is still told


def test_a_training_that_goes_on_tells_of_the_steps_behind_its_checkpoint(
    policy_model: Path, tmp_path: Path, file: Path
) -> None:
    stopping = iter([False, True]).__next__
    names = (f"{file}:Watch",)
    with pytest.raises(Stopped):
        GRPO(FAST).train(work(policy_model, tmp_path / "out", hooks=Hooks(callbacks=names, stopping=stopping)))
    assert [(each["kind"], each["step"]) for each in told(file)] == [("step", 1), ("step", 2), ("checkpoint", 2)]
    GRPO(FAST).train(work(policy_model, tmp_path / "out", hooks=Hooks(callbacks=names)))
    assert [each["step"] for each in told(file) if each["kind"] == "step"] == [1, 2, 3, 4]


def test_what_learns_from_rows_and_classifiers_tell_too(
    policy_model: Path, reference: Path, small: Path, tmp_path: Path, file: Path
) -> None:
    hooks = Hooks(callbacks=(f"{file}:Watch",), save_every=1)
    rows = list(SFT().collect(collecting(policy_model, 4)))
    given = sft_training(policy_model, rows, tmp_path / "sft", extra={"hooks": hooks})
    SFT(SFT.Options(batch_size=2)).train(given)
    events = told(file)
    assert [(each["kind"], each["step"]) for each in events] == [
        ("step", 1), ("checkpoint", 1), ("step", 2), ("end", 2),
    ]  # fmt: skip
    assert events[0]["metrics"]["loss"] > 0 and events[-1]["there"]

    file.with_suffix(".jsonl").unlink()
    options = QSharp.Options(batch_size=8, epochs=1, validation_share=0.25)
    QSharp(options).train(
        replace(
            work(reference, tmp_path / "guide", hooks=hooks, value_model=str(small), rows=(rollouts(),)),
            problems=(),
        )
    )
    kinds = [each["kind"] for each in told(file)]
    assert kinds[0] == "step" and kinds[-1] == "end" and "checkpoint" in kinds and "evaluation" in kinds
    (evaluation,) = [each for each in told(file) if each["kind"] == "evaluation"]
    assert evaluation["metrics"] and all(isinstance(value, float) for value in evaluation["metrics"].values())


def test_its_folder_is_searched_behind_the_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports its neighbours, and none of them takes the place of a library that is imported later."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "neighbour.py").write_text("WORD = 'hello'\n")
    (folder / "this.py").write_text("raise RuntimeError('no library')\n")
    (folder / "own.py").write_text("import neighbour\nclass Watch:\n    def on_end(self, event): ...\n")
    check_callbacks([f"{folder}/own.py:Watch"])
    Callbacks((f"{folder}/own.py:Watch",), DistEnv.single(), tmp_path, 1)
    found = importlib.util.find_spec("this")
    assert found is not None and found.origin is not None and str(folder) not in found.origin


def test_only_the_first_process_has_them(tmp_path: Path, file: Path) -> None:
    for rank, wanted in ((0, 1), (1, 0)):
        callbacks = Callbacks((f"{file}:Watch",), DistEnv(rank, 2, rank, "cpu", "gloo"), tmp_path, 3)
        callbacks.step(1, {"loss": 0.5, "kl": None})
        assert len(told(file)) == 1
        assert len(callbacks._instances) == wanted
    assert told(file)[0]["metrics"] == {"loss": 0.5}


def test_what_can_not_be_called_is_refused_by_a_process_of_its_own(
    tmp_path: Path, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check_callbacks([])
    before = set(sys.modules)
    check_callbacks([f"{file}:Watch", f"{file}:watch", f"{file}:Unmade"])
    (tmp_path / "broken.py").write_text("import no_such_module_of_mine\n")
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "silent.py").write_text("import os\nos._exit(0)\n")
    (tmp_path / "talks.py").write_text(
        "import atexit\natexit.register(print, 'bye')\nprint('hello', end='')\nclass Watch:\n    on_end = print\n"
    )
    check_callbacks([f"{tmp_path}/talks.py:Watch"])
    assert capfd.readouterr().err == "hellobye\n"
    for name, message in (
        ("mine", "callbacks='mine' is no class; write package.module:class or path/to/file.py:class"),
        (f"{tmp_path}/none.py:Watch", rf"callbacks='.*none.py:Watch': there is no file {tmp_path}/none.py"),
        (f"{file}:Wotch", r"callbacks: .*mine.py has no class Wotch; it has Watch, AtTheEnd, Broken, Unmade"),
        (f"{file}:MADE", r"callbacks: .*mine.py has no class MADE"),
        (f"{file}:Nothing", r"Nothing has none of the methods on_step, on_evaluation, on_checkpoint, on_end"),
        (f"{tmp_path}/broken.py:Watch", r"broken.py can't be imported: ModuleNotFoundError: .*\(broken.py, line 1\)"),
        (f"{tmp_path}/ends.py:Watch", r"importing .*ends.py:Watch ended its process \(exit code 3\)"),
        (f"{tmp_path}/silent.py:Watch", r"importing .*silent.py:Watch ended its process \(exit code 0\)"),
        ("no_such_module_of_mine:Watch", "callbacks: no_such_module_of_mine can't be imported"),
    ):
        with pytest.raises(UsageError, match=message):
            check_callbacks([f"{file}:Watch", name])
    assert capfd.readouterr().err.count("Traceback") == 1, "of broken.py alone: its own code raised"
    assert not {"mine", "broken", "ends"} & (set(sys.modules) - before)
    with pytest.raises(UsageError, match="Unmade can't be made: RuntimeError: no server"):
        Callbacks((f"{file}:Unmade",), DistEnv.single(), tmp_path, 3)
