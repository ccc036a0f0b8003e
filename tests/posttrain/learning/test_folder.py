"""A training's folder: begun once, and gone on with only by the same training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.posttrain.learning.config_file import read_config
from gpuherd.posttrain.learning.folder import TrainDirectory, prepare

CONFIG: TrainConfig = read(TrainConfig, {"policy_env": {"dataset": "arithmetic"}})


def test_a_folder_is_begun_and_gone_on_with(tmp_path: Path) -> None:
    folder = TrainDirectory(tmp_path / "new" / "run")
    prepare(folder, CONFIG, resume=False)
    assert read_config(folder.config) == CONFIG
    about = json.loads(folder.run_json.read_text())
    assert (about["kind"], about["simulated"]) == ("train", False)
    other = TrainDirectory(tmp_path / "simulated")
    prepare(other, CONFIG, resume=False, simulate=True)
    assert json.loads(other.run_json.read_text())["simulated"] is True
    folder.stop.touch()
    prepare(folder, CONFIG, resume=True)
    assert folder.stop.exists()  # it may be meant for the start that is being made


def test_the_folder_is_what_is_said_and_a_name_leads_nowhere_else(tmp_path: Path) -> None:
    told = replace(CONFIG, experiment_name="../../etc/passwd")
    found = TrainDirectory.of(told).root
    assert found.parent == Path("outputs").absolute() and found.name.startswith("etc-passwd-")
    assert TrainDirectory.of(CONFIG).root == Path("outputs/training").absolute()
    named = replace(told, output_dir=str(tmp_path / "mine"))
    assert TrainDirectory.of(named).root == tmp_path / "mine"
    assert TrainDirectory.of(named, str(tmp_path / "other")).root == tmp_path / "other"


def test_without_resume_it_is_refused(tmp_path: Path) -> None:
    folder = TrainDirectory(tmp_path / "run")
    prepare(folder, CONFIG, resume=False)
    with pytest.raises(UsageError, match="a training was begun here; add --resume"):
        prepare(folder, CONFIG, resume=False)
    folder.done.write_text("{}")
    with pytest.raises(UsageError, match="a training has ended here"):
        prepare(folder, CONFIG, resume=False)


def test_another_training_is_refused_by_its_key(tmp_path: Path) -> None:
    folder = TrainDirectory(tmp_path / "run")
    prepare(folder, CONFIG, resume=False)
    other = replace(CONFIG, model=replace(CONFIG.model, model_name_or_path="other"))
    with pytest.raises(UsageError, match=r"its model\.model_name_or_path is 'gpt2', and here it is 'other'"):
        prepare(folder, other, resume=True)
    # What changes no result may be another.
    faster = replace(
        CONFIG,
        training=replace(CONFIG.training, micro_batch_size=2, save_every=1),
        distributed=replace(CONFIG.distributed, num_gpus=2),
    )
    prepare(folder, faster, resume=True)
    assert read_config(folder.config) == faster


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="files of something else"):
        prepare(TrainDirectory(tmp_path), CONFIG, resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite):
        prepare(TrainDirectory(tmp_path / "file" / "run"), CONFIG, resume=False)


def test_a_damaged_summary_is_told(tmp_path: Path) -> None:
    folder = TrainDirectory(tmp_path)
    assert folder.summary() is None
    folder.done.write_text("[1")
    with pytest.raises(UsageError, match="remove it to train again"):
        folder.summary()
    folder.done.write_text("[1]")
    with pytest.raises(UsageError, match="is no summary"):
        folder.summary()
