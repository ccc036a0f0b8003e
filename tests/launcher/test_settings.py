"""The options of hydra.launcher are gpuherd's own, and mean what they mean on the command line."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpuherd.errors import UsageError
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.settings import user_file
from hydra_plugins.gpuherd_launcher._settings import OPTIONS, TARGET, GpuherdConf, Settings, read
from hydra_plugins.gpuherd_launcher.configs import GpuherdConfigs, GpuherdSearchPath


def settings(*overrides: str) -> Settings:
    """What these words mean, by way of the structured config."""
    config = OmegaConf.merge(OmegaConf.structured(GpuherdConf), OmegaConf.from_dotlist(list(overrides)))
    said: dict[str, Any] = OmegaConf.to_container(config)
    assert said.pop("_target_") == TARGET
    return read(said)


def test_nothing_said_is_what_gpuherd_does_by_itself() -> None:
    assert settings() == Settings(DispatchOptions(), {})


def test_what_is_not_said_is_as_the_users_own_settings_have_it() -> None:
    file = user_file()
    file.parent.mkdir(parents=True)
    file.write_text("[defaults]\nmax_gpus = 2\ngpus_per_job = 2\ntimeout = '1h'\n")
    assert settings("timeout=2h").run == DispatchOptions(max_gpus=2, gpus_per_job=2, timeout=7200)
    file.write_text("[defaults]\nmax_gpu = 2\n")
    with pytest.raises(UsageError, match="did you mean max_gpus"):
        settings()


def test_every_option_of_a_run_is_here() -> None:
    of_a_run = {each.name for each in fields(DispatchOptions) if "option" in each.metadata}
    # Nothing is known of how long jobs of a sweep take.
    assert OPTIONS.keys() == of_a_run - {"order"} | {"mem", "nodes", "retries"}


def test_words_mean_what_they_mean_on_the_command_line() -> None:
    found = settings(
        "engine=slurm",
        "partition=gpu",
        "time_limit=4h",
        "host_mem=64GB",
        "cpus_per_job=8",
        "slurm_args=[--exclude=n3, --nice]",
        "gpus_per_job=1-4",
        "nodes=2",
        "ntasks_per_node=4",
        "mem=20GB",
        "retries=0",
        "timeout=90",
        "min_disk=0",
    )
    assert found.run == DispatchOptions(
        engine="slurm",
        partition="gpu",
        time_limit=14400,
        host_mem=65536,
        cpus_per_job=8,
        slurm_args=("--exclude=n3", "--nice"),
        ntasks_per_node=4,
        timeout=90,
        min_disk=0,
    )
    assert settings("gpu_list=[0, 2]").run == DispatchOptions(gpu_list=("0", "2"))
    assert found.job == {"gpus": (1, 4), "memory_mb": 20480, "nodes": 2, "retries": 0}
    assert settings("gpus_per_job=0").job == {"gpus": (0, 0)}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("timeout=soon", "hydra.launcher.timeout: 'soon' is not a length of time"),
        ("max_gpus=0", "hydra.launcher.max_gpus: '0' is not a whole number above 0"),
        ("gpus_per_job=some", "hydra.launcher.gpus_per_job: 'some' is no number of GPUs"),
        ("gpu_list=['']", "hydra.launcher.gpu_list: '' is no list of GPU ids"),
        ("engine=cloud", "hydra.launcher.engine: 'cloud' is not possible; possible: local, slurm, ray"),
        ("tasks_per_node=2", "hydra.launcher.tasks_per_node is called ntasks_per_node here"),
        ("timeout_min=60", "hydra.launcher.timeout_min is called time_limit, like time_limit=4h here"),
        ("partition=gpu", "--partition is for --engine slurm, and this is local"),
    ],
)
def test_what_means_nothing_is_told(word: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        settings(word)


@pytest.mark.parametrize("word", ["gpus_per_jobs=2", "share=perhaps", "gpu_list=0"])
def test_what_is_no_option_or_of_another_kind_is_hydras_to_tell(word: str) -> None:
    with pytest.raises(OmegaConfBaseException):
        settings(word)


def test_hydra_finds_the_config_and_nothing_else_there() -> None:
    source = GpuherdConfigs(provider="x", path="gpuherd://")
    assert source.available()
    assert [path for path in ("", "hydra", "hydra/launcher", "hydra/sweeper", "model") if source.is_group(path)] == [
        "",
        "hydra",
        "hydra/launcher",
    ]
    assert source.is_config("hydra/launcher/gpuherd.yaml")
    assert not source.is_config("hydra/launcher/basic")
    assert source.list("", None) == ["hydra"]
    assert source.list("hydra", None) == ["launcher"]
    assert source.list("hydra/launcher", None) == ["gpuherd"]
    assert source.load_config("hydra/launcher/gpuherd").config._target_ == TARGET
    added: list[tuple[str, str]] = []

    class Path:
        def append(self, provider: str, path: str) -> None:
            added.append((provider, path))

    GpuherdSearchPath().manipulate_search_path(Path())
    assert added == [("gpuherd-launcher", "gpuherd://")]
