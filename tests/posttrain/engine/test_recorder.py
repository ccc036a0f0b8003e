"""What happens behind each step of a training: lines, checkpoints, and the end where one is asked for."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tests.posttrain.engine.nets import net, trained, trainee

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.engine.options import Stopped, Watching
from gpuherd.posttrain.engine.recorder import Recorder


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("saves_last", [True, False])
def test_lines_and_checkpoints_come_when_they_are_due(tmp_path: Path, saves_last: bool) -> None:
    one = trainee()
    with closing(
        Recorder(tmp_path, one, Watching(save_every=2, keep=9, log_every=3), identity={}, total_steps=5)
    ) as recorder:
        assert recorder.restored is None
        for step in range(1, 6):
            evaluated = {"share": 0.5} if step == 4 else None
            recorder.step(step, {"loss": float(step), "none": None}, evaluated=evaluated, saves_last=saves_last)
    assert read_curves(tmp_path) == [
        {"step": 3, "loss": 3.0}, {"step": 4, "loss": 4.0, "share": 0.5}, {"step": 5, "loss": 5.0}
    ]  # fmt: skip
    assert checkpoints(tmp_path) == ["step-00000002", "step-00000004"] + ["step-00000005"] * saves_last


def test_one_that_is_asked_to_stop_goes_on_from_there(tmp_path: Path) -> None:
    one, asked = trainee(), iter([False, True])
    watching = Watching(save_every=100, stopping=asked.__next__)
    with closing(Recorder(tmp_path, one, watching, identity={"model": "a"}, total_steps=3)) as recorder:
        trained(one, range(1))
        recorder.step(1, {"loss": 1.0})
        trained(one, range(1, 2))
        with pytest.raises(Stopped, match="stopped after step 2 of 3"):
            recorder.step(2, {"loss": 2.0}, extra={"place": 2})
    assert checkpoints(tmp_path) == ["step-00000002"]
    again, always = trainee(net(5)), Watching(save_every=100, stopping=lambda: True)
    with closing(Recorder(tmp_path, again, always, identity={"model": "a"}, total_steps=3)) as recorder:
        assert recorder.restored is not None and (recorder.restored.step, recorder.restored.extra) == (2, {"place": 2})
        assert again.steps_done == 2
        recorder.step(3, {"loss": 3.0})  # the last one: there is nothing left to stop
    assert [line["step"] for line in read_curves(tmp_path)] == [1, 2, 3]
    with pytest.raises(UsageError, match="another training"):
        Recorder(tmp_path, trainee(), Watching(), identity={"model": "b"}, total_steps=3)
