"""A run that goes on with other numbers: shards, of which results don't depend, and GPUs of trainings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from rich.console import Console
from tests.jobs.attempts import attempt_of
from tests.posttrain.runs.conftest import MakeSettings
from tests.posttrain.runs.test_experiment import begun
from tests.posttrain.runs.test_work import work

from gpuherd.errors import Enqueued, JobCannotFit, UsageError
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import StartRecord
from gpuherd.posttrain.runs.experiment import RoundsExperiment
from gpuherd.posttrain.runs.folder import RoundsDirectory, read_record, resumed, unfinished
from gpuherd.posttrain.runs.options import RoundsOptions
from gpuherd.posttrain.runs.plan import Phase
from gpuherd.posttrain.runs.settings import Settings
from gpuherd.posttrain.runs.work import do, rows_of_rounds
from gpuherd.standin.machine import SimulatedMachine

DATA = {"sums": {"task": "arithmetic", "settings": {"digits": 2, "train": 24, "test": 8}}}


def going_on(folder: RoundsDirectory, dry_run: bool = True, **said: Any) -> RoundsExperiment:
    """``--resume`` of the run with these values by their keys; its jobs are put into the queue."""
    options = RoundsOptions(dry_run=dry_run, enqueue_only=not dry_run)
    keys = {key.replace("__", "."): value for key, value in said.items()}
    settings = resumed(folder, keys).settings
    found = RoundsExperiment(settings, options, console=Console(quiet=True), simulate=True, going_on=folder)
    if dry_run:
        found.run()
    else:
        with pytest.raises(Enqueued):
            found.run()
    return found


def shards_of(plan: RoundsExperiment | RoundsDirectory) -> dict[str, int]:
    """How many jobs collect and evaluate, by name of the whole."""
    steps = read_record(plan).steps() if isinstance(plan, RoundsDirectory) else [each.step for each in plan.plan]
    return dict(Counter(step.undivided.partition("tiny_")[2] for step in steps if not step.joins))


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    evaluation = {"num_samples": 2, "etas": [1, 0.1], "resamples": 100, "shards": 2, "base": False}
    return make_settings(datasets=DATA, evaluation=evaluation)


def test_what_has_begun_keeps_its_shards_and_all_else_is_divided_anew(settings: Settings) -> None:
    folder = begun(settings, datetime(2026, 1, 1))
    before = shards_of(folder)
    assert before == {f"r{n}_{phase}": each for n in (0, 1) for phase, each in
                      {"collect": 2, "train": 1, "evaluate": 2}.items()}  # fmt: skip
    do(work(folder, read_record(folder), "QSharp_sums_tiny_r0_collect_1"))
    assert shards_of(going_on(folder)) == before
    expected = before | {"r1_collect": 4, "r0_evaluate": 3, "r1_evaluate": 3}
    said: dict[str, Any] = {"data_collection__shards": 4, "evaluation__shards": 3}
    assert shards_of(going_on(folder, **said)) == expected
    assert shards_of(folder) == before, "a dry run changes nothing"
    record = read_record(folder)
    going_on(folder, dry_run=False, **said)
    after = read_record(folder)
    assert shards_of(folder) == expected
    assert after.divided == {"QSharp_sums_tiny_r0_collect": 2} and after.identity == record.identity
    assert (after.settings.data_collection.shards, after.settings.evaluation.shards) == (4, 3)
    assert after.made == record.made
    with closing(Queue(folder.queue)) as queue:
        assert queue.job("QSharp_sums_tiny_r1_collect_3") is not None
        assert queue.job("QSharp_sums_tiny_r0_collect_2") is None
    # And once more: what has no shard of four yet is divided by three, and that of two stays.
    going_on(folder, dry_run=False, data_collection__shards=3)
    assert shards_of(folder) == expected | {"r1_collect": 3}
    do(work(folder, read_record(folder), "QSharp_sums_tiny_r0_collect_0"))
    (rows,) = rows_of_rounds(work(folder, read_record(folder), "QSharp_sums_tiny_r0_train"))
    assert len(rows) == 48


def test_a_shard_at_work_that_has_written_nothing_keeps_its_number(settings: Settings) -> None:
    folder = begun(settings, datetime(2026, 1, 1))
    going_on(folder, dry_run=False)
    with closing(Queue(folder.queue)) as queue:
        found = queue.job("QSharp_sums_tiny_r0_collect_1")
        assert found is not None
        queue.record_starts([StartRecord(attempt_of(found[0], 1), 0.0, None)], queue.begin_run(0.0, 0.0))
    assert shards_of(going_on(folder, data_collection__shards=4)) == shards_of(folder) | {"r1_collect": 4}


def test_an_evaluation_that_has_begun_keeps_its_shards(settings: Settings) -> None:
    folder = begun(replace(settings, evaluation=replace(settings.evaluation, base=True)), datetime(2026, 1, 1))
    do(work(folder, read_record(folder), "reference_sums_tiny_evaluate_0"))
    going_on(folder, dry_run=False, evaluation__shards=1)
    assert shards_of(folder)["evaluate"] == 2 and shards_of(folder)["r0_evaluate"] == 1
    do(work(folder, read_record(folder), "reference_sums_tiny_evaluate_1"))
    do(work(folder, read_record(folder), "reference_sums_tiny_evaluate"))
    assert (folder.results / "reference" / "tiny" / "sums" / "result.json").exists()


def test_more_gpus_are_used_by_what_is_left(
    settings: Settings, standin: Callable[..., SimulatedMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the number of shards is left to the machine."""
    auto = replace(
        settings,
        data_collection=replace(settings.data_collection, shards=None),
        evaluation=replace(settings.evaluation, shards=None),
    )
    folder = begun(auto, datetime(2026, 1, 1))
    assert set(shards_of(folder).values()) == {1}
    standin("3x40GB")
    assert {name: each for name, each in shards_of(going_on(folder)).items() if each > 1} == {
        "r0_collect": 3,
        "r1_collect": 3,
    }


def test_the_same_command_with_other_shards_goes_on(settings: Settings) -> None:
    folder = begun(settings, datetime(2026, 1, 1))
    other = replace(
        settings,
        data_collection=replace(settings.data_collection, shards=None),
        evaluation=replace(settings.evaluation, shards=7),
    )
    assert other.identity() == settings.identity()
    found = unfinished(other)
    assert found is not None and found.root == folder.root
    other = replace(settings, training=replace(settings.training, seed=5))
    assert unfinished(other) is None


# ---- runs of versions that dealt single problems -------------------------------------------------------------------


@pytest.fixture
def old(settings: Settings) -> RoundsDirectory:
    """A run as such a version began it."""
    folder = begun(settings, datetime(2026, 1, 1))
    values = json.loads(folder.run_json.read_bytes())
    values["identity"] = settings.earlier_identity(values["settings"])
    del values["divided"]
    for each in values["combinations"]:
        del each["whole_batches"]
    folder.run_json.write_text(json.dumps(values))
    return folder


def test_rows_of_an_earlier_version_keep_their_shards(settings: Settings, old: RoundsDirectory) -> None:
    found = unfinished(settings)
    assert found is not None and found.root == old.root
    before, identity = shards_of(old), read_record(old).identity
    assert identity != settings.identity()
    plan = going_on(old, evaluation__shards=3)
    assert shards_of(plan) == before | {"r0_evaluate": 3, "r1_evaluate": 3}
    collections = [each.step for each in plan.plan if each.step.phase is Phase.COLLECT]
    assert not any(step.whole_batches for step in collections)
    with pytest.raises(UsageError, match=r"depend on the number of shards: data_collection\.shards=3 would change"):
        going_on(old, data_collection__shards=3)
    # With its number left to the machine it is the same run, and keeps its two; also when it is said again.
    for said in (None, 2):
        going_on(old, dry_run=False, data_collection__shards=said, evaluation__shards=3)
        assert shards_of(old) == before | {"r0_evaluate": 3, "r1_evaluate": 3}
        found = unfinished(settings)
        assert found is not None and found.root == old.root
    assert read_record(old).identity == identity


def test_one_job_of_an_earlier_version_has_had_whole_batches(make_settings: MakeSettings) -> None:
    settings = make_settings(datasets=DATA, data_collection={"shards": 1})
    folder = begun(settings, datetime(2026, 1, 1))
    values = json.loads(folder.run_json.read_bytes())
    for each in values["combinations"]:
        del each["whole_batches"]
    folder.run_json.write_text(json.dumps(values))
    assert shards_of(going_on(folder, data_collection__shards=3))["r0_collect"] == 3


# ---- GPUs of trainings ---------------------------------------------------------------------------------------------


def test_a_training_goes_on_with_other_gpus(
    make_settings: MakeSettings, standin: Callable[..., SimulatedMachine]
) -> None:
    standin("4x40GB")
    settings = make_settings(algos={"GRPO": {"batch_size": 4, "gpus": 2, "strategy": "fsdp"}})
    folder = begun(settings, datetime(2026, 1, 1))

    def asked(**said: Any) -> set[int]:
        plan = going_on(folder, **said).plan
        return {each.asked.gpus for each in plan if each.step.phase is Phase.TRAIN}

    assert asked() == {2}
    assert asked(algos__GRPO__gpus=4) == asked(algos__GRPO__gpus=4, algos__GRPO__strategy="ddp") == {4}
    assert asked(algos__GRPO__gpus=1, algos__GRPO__strategy=None) == {1}
    with pytest.raises(UsageError, match=r"algos\.GRPO\.strategy=fsdp: on 1 GPU nothing is shared"):
        asked(algos__GRPO__gpus=1)
    with pytest.raises(UsageError, match=r"algos\.GRPO\.gpus=3: a step has 16 sequences"):
        asked(algos__GRPO__gpus=3)
    with pytest.raises(JobCannotFit, match="it trains on 8 GPUs together, and there are 4"):
        asked(algos__GRPO__gpus=8)
    with pytest.raises(UsageError, match=r"begun with algos\.GRPO\.batch_size=4"):
        asked(algos__GRPO__batch_size=8)
    going_on(folder, dry_run=False, algos__GRPO__gpus=4)
    (choice,) = read_record(folder).settings.choices()
    assert choice.gpus == 4, "workers read it there"
    # The command with either number goes on; without it is another run, as results are equal but for rounding.
    for gpus in (2, 4):
        assert (
            unfinished(make_settings(algos={"GRPO": {"batch_size": 4, "gpus": gpus, "strategy": "fsdp"}})) is not None
        )
    assert unfinished(make_settings(algos={"GRPO": {"batch_size": 4}})) is None
