"""What a sweep's jobs are: composed once, known by what their result depends on, with what they are to be given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.types import HydraContext, RunMode

from gpuherd.errors import UsageError
from hydra_plugins.gpuherd_launcher import _parcels
from hydra_plugins.gpuherd_launcher._planning import Planned, Planner
from hydra_plugins.gpuherd_launcher._settings import read

PROGRAM = Path(__file__).parent / "program"


def task(config: object) -> object:
    return config


class Plans:
    """Plans of the test's program."""

    def __init__(self, folder: Path):
        self._folder = folder

    def plan(
        self, *overrides: str, jobs: tuple[str, ...] = ("seed=1",), first: int = 0, **said: object
    ) -> list[Planned]:
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        words = ["wait_a_step=0", *overrides]
        config = hydra.compose_config("config", words, run_mode=RunMode.MULTIRUN)
        context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
        planner = Planner(context, task, config, read(said), self._folder)
        return planner.plan([[*config.hydra.overrides.task, *job.split()] for job in jobs], first)


@pytest.fixture
def plans(tmp_path: Path) -> Iterator[Plans]:
    with initialize_config_dir(str(PROGRAM / "conf"), version_base="1.3", job_name="fit"):
        yield Plans(tmp_path / "hydra")


def test_a_job_has_its_number_and_what_it_is_given(plans: Plans) -> None:
    _, found = plans.plan(jobs=("seed=1", "seed=2 optimizer.lr=0.5"), first=4, gpus_per_job="1-2", mem="20GB")
    assert (found.job.name, found.job.title) == ("5", "#5 wait_a_step=0 seed=2 optimizer.lr=0.5")
    assert (found.job.gpus, found.job.gpus_at_most, found.job.memory_mb) == (1, 2, 20480)
    assert found.job.result == str(found.returned)
    config = _parcels.read_one(found.task)
    assert (config.seed, config.optimizer.lr, config.hydra.job.num, config.hydra.job.id) == (2, 0.5, 5, "5")


def test_a_job_is_known_by_what_its_result_depends_on(plans: Plans) -> None:
    (first,) = plans.plan()
    # Where and how it runs changes nothing.
    (other_place,) = plans.plan("hydra.sweep.dir=elsewhere", gpus_per_job=2)
    assert other_place.job.identity == first.job.identity
    # A default of the program's config does, and so do overrides.
    for words in ({"jobs": ("seed=2",)}, {"jobs": ("seed=1 optimizer=nesterov",)}):
        (other,) = plans.plan(**words)  # type: ignore[arg-type]
        assert other.job.identity != first.job.identity
        assert other.returned != first.returned


def test_jobs_that_say_their_memory_share_where_it_is_asked_for(plans: Plans) -> None:
    assert [each.job.share for each in plans.plan(share=True, mem="1GB")] == [True]
    assert [each.job.share for each in plans.plan(share=True)] == [False]
    assert [each.job.share for each in plans.plan(mem="1GB")] == [False]


def test_what_people_are_told_is_one_line(plans: Plans) -> None:
    (found,) = plans.plan(jobs=("+note='a\x1b[31mb'",))
    assert found.job.title == "#0 wait_a_step=0 +note='a\\x1b[31mb'"


@pytest.mark.parametrize(
    "word", ["+hydra.job.env_set.CUDA_DEVICE_ORDER=x", "hydra.job.env_copy=[CUDA_VISIBLE_DEVICES]"]
)
def test_gpus_are_not_the_programs_to_set(plans: Plans, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(UsageError, match="gpuherd sets it when it knows the job's GPUs"):
        plans.plan(word)
