"""A start that is refused, however late, has changed nothing in the queue."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpuherd.errors import GpuherdError, JobCannotFit, NoSuchGpu, QueueBusy, UsageError
from gpuherd.jobs import DispatchOptions, GpuOptions, Job, Queue, RunDirectory, run_jobs
from gpuherd.jobs.job import JobState
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.standin.machine import SimulatedMachine

BEFORE = {"bad": JobState.FAILED, "later": JobState.WAITING}


def job(name: str, script: str = "true", gpus: int = 1) -> Job:
    return Job(name=name, argv=("/bin/sh", "-c", script), gpus=gpus, retries=0)


@pytest.fixture
def run(tmp_path: Path, standin: Callable[..., SimulatedMachine]) -> RunDirectory:
    """A folder in which a job has failed; another has been added since."""
    standin("2x40GB")
    directory = RunDirectory(tmp_path / "run")
    assert run_jobs([job("bad", "exit 3")], options(), directory, grace_s=0.3).failed == 1
    with closing(Queue(directory.queue)) as queue:
        queue.add([job("later")])
    return directory


def options(**said: object) -> DispatchOptions:
    return DispatchOptions(max_checks=1, check_interval=0.02, **said)  # type: ignore[arg-type]


def diary(run: RunDirectory) -> list[tuple[object, ...]]:
    """All that the queue says of jobs and what happened."""
    with closing(Queue(run.queue)) as queue:
        tables = ("jobs", "attempts", "runs", "meta", "events")
        return [tuple(row) for table in tables for row in queue._db.execute(f"SELECT * FROM {table}")]


def is_refused(
    run: RunDirectory, error: type[GpuherdError], options: GpuOptions, jobs: list[Job] | None = None
) -> None:
    before = diary(run)
    with pytest.raises(error):
        run_jobs([job("bad"), job("new")] if jobs is None else jobs, options, run, grace_s=0.3)
    assert diary(run) == before
    with closing(Queue(run.queue)) as queue:
        assert queue.states() == BEFORE


def test_for_a_gpu_that_is_not_there(run: RunDirectory) -> None:
    is_refused(run, NoSuchGpu, options(gpu_list=(7,)))


def test_for_jobs_none_of_which_fits(run: RunDirectory) -> None:
    is_refused(run, JobCannotFit, options(), [job("bad", gpus=3)])


def test_for_jobs_that_need_what_is_not_there(run: RunDirectory) -> None:
    is_refused(run, UsageError, options(), [job("bad"), Job(name="new", argv=("true",), gpus=0, needs=("nobody",))])


def test_for_a_settings_file_that_is_wrong(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "gpuherd").mkdir(exist_ok=True)
    (tmp_path / "gpuherd" / "config.toml").write_text("[limits]\nmax_gpus = 'many'\n")
    is_refused(run, UsageError, options())


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which somebody listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield int(server.getsockname()[1])


def test_for_a_port_that_is_taken(run: RunDirectory, port: int) -> None:
    is_refused(run, UsageError, options(prometheus=port))


def test_for_a_notice_that_could_never_be_sent(run: RunDirectory) -> None:
    is_refused(run, UsageError, options(webhook="ftp://example.org"))


def test_while_another_works_on_the_folder(run: RunDirectory) -> None:
    with closing(DispatcherLock(run.lock)):
        is_refused(run, QueueBusy, options())


def test_what_is_not_refused_goes_on(run: RunDirectory) -> None:
    assert run_jobs([job("bad"), job("new")], options(), run, grace_s=0.3).done == 2
    with closing(Queue(run.queue)) as queue:
        assert queue.states() == {"bad": JobState.DONE, "new": JobState.DONE, "later": JobState.CANCELLED}
