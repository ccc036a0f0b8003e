"""A training's folder: begun once, and gone on with only by the same training."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.posttrain.learning.prepare import begin
from gpuherd.posttrain.learning.settings import read_settings, settings_of
from gpuherd.posttrain.runs.folder import TrainDirectory

CONFIG = settings_of({"policy_env": {"dataset": "arithmetic"}})


def test_a_folder_is_begun_and_gone_on_with(tmp_path: Path) -> None:
    folder = TrainDirectory(tmp_path / "new" / "run")
    begin(folder, CONFIG, resume=False)
    assert read_settings(folder.config) == CONFIG
    about = json.loads(folder.run_json.read_text())
    assert (about["kind"], about["simulated"]) == ("train", False)
    other = TrainDirectory(tmp_path / "simulated")
    begin(other, CONFIG, resume=False, simulate=True)
    assert json.loads(other.run_json.read_text())["simulated"] is True
    folder.stop.touch()
    begin(folder, CONFIG, resume=True)
    assert folder.stop.exists()  # it may be meant for the start that is being made


def test_the_folder_is_what_is_said_and_a_name_leads_nowhere_else(tmp_path: Path) -> None:
    told = replace(CONFIG, experiment_name="../../etc/passwd")
    found = told.directory().root
    assert found.parent == Path("outputs").absolute() and found.name.startswith("etc-passwd-")
    assert CONFIG.directory().root == Path("outputs/training").absolute()
    named = replace(told, output_dir=str(tmp_path / "mine"))
    assert named.directory().root == tmp_path / "mine"
    assert named.directory(str(tmp_path / "other")).root == tmp_path / "other"


def test_without_resume_it_is_refused(tmp_path: Path) -> None:
    folder = TrainDirectory(tmp_path / "run")
    begin(folder, CONFIG, resume=False)
    with pytest.raises(UsageError, match="a training was begun here; add --resume"):
        begin(folder, CONFIG, resume=False)
    folder.done.write_text("{}")
    with pytest.raises(UsageError, match="a training has ended here"):
        begin(folder, CONFIG, resume=False)


def test_another_training_is_refused_by_its_key(tmp_path: Path) -> None:
    folder = TrainDirectory(tmp_path / "run")
    begin(folder, CONFIG, resume=False)
    other = CONFIG.changed(model__model_name_or_path="other")
    with pytest.raises(UsageError, match=r"its model\.model_name_or_path is 'gpt2', and here it is 'other'"):
        begin(folder, other, resume=True)
    # What changes no result may be another.
    faster = CONFIG.changed(training__micro_batch_size=2, training__save_every=1, distributed__num_gpus=2)
    begin(folder, faster, resume=True)
    assert read_settings(folder.config) == faster


def test_a_folder_of_an_earlier_version_is_gone_on_with(tmp_path: Path) -> None:
    folder = TrainDirectory(tmp_path)
    shutil.copyfile(Path(__file__).with_name("earlier.yaml"), folder.config)
    kept = read_settings(folder.config)
    options = kept.algorithm.options
    assert (options.samples_per_prompt, options.clip_range, options.reward_normalization) == (8, 0.1, "none")
    assert (kept.discount, kept.sampling.temperature, kept.sampling.max_new_tokens) == (0.5, 0.3, 9)
    assert (kept.steps(2).strategy, kept.steps(2).fsdp_cpu_offload) == ("fsdp", True)
    begin(folder, kept.changed(training__micro_batch_size=1), resume=True)
    with pytest.raises(UsageError, match=r"its grpo\.clip_range is 0\.1, and here it is 0\.2"):
        begin(folder, kept.changed(grpo__clip_range=0.2), resume=True)
    with pytest.raises(UsageError, match=r"its grpo\.num_iterations is 1, and here it is 2"):
        begin(folder, kept.changed(grpo__num_iterations=2), resume=True)


def test_a_training_does_not_go_on_with_another_reward(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def score(completions):\n    return [0.0] * len(completions)\n")
    block = {"dataset": "arithmetic", "reward": f"{file}:score"}
    config = settings_of({"policy_env": block, "eval_envs": [block]})
    slower = settings_of(
        {"policy_env": {**block, "reward_timeout": 600}, "eval_envs": [{**block, "reward_timeout": 9}]}
    )
    folder, earlier = TrainDirectory(tmp_path / "run"), TrainDirectory(tmp_path / "earlier")
    for each in (folder, earlier):
        begin(each, config, resume=False)
        begin(each, slower, resume=True)
    about = json.loads(earlier.run_json.read_text())
    assert about.pop("rewards").keys() == {"policy_env", "eval_envs[0]"}
    earlier.run_json.write_text(json.dumps(about))  # as an earlier version writes it
    file.write_text(file.read_text().replace("0.0", "1.0"))
    with pytest.raises(UsageError, match=r"was begun with another policy_env\.reward, whose file has changed since"):
        begin(folder, config, resume=True)
    begin(earlier, config, resume=True)
    folder.done.write_text("{}")
    begin(folder, config, resume=True)


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="files of something else"):
        begin(TrainDirectory(tmp_path), CONFIG, resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite):
        begin(TrainDirectory(tmp_path / "file" / "run"), CONFIG, resume=False)


def test_a_damaged_summary_is_told(tmp_path: Path) -> None:
    folder = TrainDirectory(tmp_path)
    assert folder.summary() is None
    folder.done.write_text("[1")
    with pytest.raises(UsageError, match="remove it to train again"):
        folder.summary()
    folder.done.write_text("[1]")
    with pytest.raises(UsageError, match="is no summary"):
        folder.summary()
