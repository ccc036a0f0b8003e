"""The policy that a round passes to the next, as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuherd.lm.guidance.guide import Guide, Mode
from gpuherd.posttrain.runs.folder import BadPolicy, read_policy, write_policy
from gpuherd.posttrain.types import Policy


def test_a_policy_moves_with_its_run(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    guide = Guide(str(run / "models" / "x" / "model"), 0.25, Mode.EXPECTATION, 10)
    policy = Policy("org/model", str(run / "adapter"), guide)
    write_policy(run / "policy.json", policy, run)
    assert read_policy(run / "policy.json", run) == policy
    assert str(tmp_path) not in (run / "policy.json").read_text()
    run.rename(other)
    moved = read_policy(other / "policy.json", other)
    assert moved.guide is not None and moved.guide.classifier == str(other / "models" / "x" / "model")
    assert moved.model == "org/model" and moved.adapter == str(other / "adapter")


def test_models_elsewhere_stay_where_they_are(tmp_path: Path) -> None:
    policy = Policy(str(tmp_path / "elsewhere"))
    write_policy(tmp_path / "policy.json", policy, tmp_path / "run")
    assert read_policy(tmp_path / "policy.json", tmp_path / "run") == policy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(format=2), "newer gpuherd"),
        (lambda values: values["policy"].pop("model"), "damaged"),
        (lambda values: values["policy"].update(model={"inside": "../../etc"}), "damaged"),
        (lambda values: values["policy"].update(guide={"classifier": "x"}), "damaged"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "policy.json"
    write_policy(path, Policy("m"), tmp_path)
    values = json.loads(path.read_text())
    change(values)  # type: ignore[operator]
    path.write_text(json.dumps(values))
    with pytest.raises(BadPolicy, match=message):
        read_policy(path, tmp_path)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text("[" * 100_000)
    with pytest.raises(BadPolicy, match="damaged"):
        read_policy(tmp_path / "policy.json", tmp_path)
    with pytest.raises(BadPolicy, match="can't be read"):
        read_policy(tmp_path / "none.json", tmp_path)
