"""How jobs are told that an engine beyond this machine has: in its line, on a node, ended there, and never begun."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.jobs.attempts import attempt_of, settled

from gpuherd.errors import UsageError
from gpuherd.gpus.state import Machine
from gpuherd.jobs import Job, JobState, Queue, RunDirectory, clock
from gpuherd.jobs.dispatcher_state import DispatcherState, StateFile
from gpuherd.jobs.dispatcher_state import read as read_state
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.monitor.format import as_json, as_table, at_work, gpus, headline, state_word, what
from gpuherd.jobs.monitor.job_status import EVERYTHING
from gpuherd.jobs.monitor.logs import follow, read
from gpuherd.jobs.monitor.metrics import gpu_metrics, read_metrics
from gpuherd.jobs.monitor.prometheus import exposition
from gpuherd.jobs.monitor.status import InEngine, RunStatus, opened, read_status
from gpuherd.jobs.records import AttemptState, Begun, Handed, JobStatus, StartRecord
from gpuherd.top import look as picture
from gpuherd.top.look import GpuHistory, Snapshot


class Cluster:
    """A queue of which SLURM has four jobs: one whose handle is not known, one in its line, one on a node for a minute,
    and one that has ended there.
    """

    def __init__(self, root: Path):
        self.run = RunDirectory(root)
        self.run.create()
        self.run.handover.mkdir()
        self.queue = Queue(self.run.queue)
        names = ("unheard", "in-line", "begun", "done")
        self.queue.submit([Job(name=name, argv=("true",), gpus=2) for name in names])
        self.run_id = self.queue.begin_run(clock.wall(), clock.mono(), engine="slurm")
        now, mono = clock.wall(), clock.mono()
        starts = [
            replace(
                attempt_of(queued, number),
                process=None,
                handed=Handed("slurm", "b1", number - 1),
                log=str(self.run.attempt_log(queued.job.name, 1)),
                started_at=now - 100,
                started_mono=mono - 100,
            )
            for number, queued in enumerate(self.queue.head(10, now), start=1)
        ]
        self.queue.record_starts([StartRecord(each, 1.0, None) for each in starts], self.run_id)
        self.queue.record_handles({2: "17_1", 3: "17_2", 4: "17_3"})
        begun = Begun(attempt=3, node="n1", gpus=("n1:0", "n1:1"), labels=("n1:0", "n1:1"), at=now - 60, mono=mono - 60)
        self.queue.record_begun([begun, replace(begun, attempt=4, node="n2", gpus=("n2:0",), labels=("n2:0",))])
        self.end(4, AttemptState.DONE, JobState.DONE)

    def end(self, attempt: int, state: AttemptState, job: JobState) -> None:
        self.queue.record_ends([settled(attempt, state, job, clock.wall(), mono=clock.mono(), code=0)])

    def status(self) -> RunStatus:
        return read_status(self.run, EVERYTHING)

    def job(self, name: str) -> JobStatus:
        return next(job for job in self.status().jobs if job.name == name)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "run")
    yield made
    made.queue.close()


def test_where_each_of_them_is(cluster: Cluster) -> None:
    assert what(cluster.job("unheard")) == "is being handed to SLURM, for 1 min 41 s"
    assert what(cluster.job("in-line")).startswith("waits in SLURM, for 1 min 4")
    assert [state_word(cluster.job(name)) for name in ("in-line", "begun", "done")] == ["handed", "running", "done"]
    assert [gpus(cluster.job(name)) for name in ("in-line", "begun", "done")] == ["any 2", "n1:0,n1:1", "n2:0"]
    assert what(cluster.job("begun")).startswith("for 1 min 0 s")
    assert what(cluster.job("done")).startswith("in 1 min 0 s")


def test_none_of_them_has_a_process_or_counts_time_that_it_did_not_run(cluster: Cluster) -> None:
    attempts = {name: cluster.job(name).attempt for name in ("unheard", "in-line", "begun", "done")}
    assert [each.pid for each in attempts.values() if each] == [None] * 4
    assert [each.in_line for each in attempts.values() if each] == [True, True, False, False]
    assert [each.run_s is None for each in attempts.values() if each] == [True, True, False, False]
    in_line, begun = attempts["in-line"], attempts["begun"]
    assert in_line and begun
    assert in_line.wait_s >= 101  # what it waited before, and in the line
    assert begun.wait_s == pytest.approx(41, abs=1)


@pytest.mark.parametrize(("engine", "how"), [("slurm", 2), ("ray", 2), ("local", 1)])
def test_what_an_engine_was_given_is_on_the_disk_before_it_has_it(tmp_path: Path, engine: str, how: int) -> None:
    """Its jobs go on when this machine has no power: a queue that forgot them would hand them over a second time. Those
    of this machine end with it, and are worth no wait for the disk (FULL and NORMAL of SQLite's documentation)."""
    with closing(Queue(tmp_path / "queue.sqlite")) as queue:
        queue.begin_run(clock.wall(), clock.mono(), engine)
        assert queue._db.execute("PRAGMA synchronous").fetchone()[0] == how


def test_one_that_never_began_has_run_for_no_time(cluster: Cluster) -> None:
    cluster.end(2, AttemptState.REQUEUED, JobState.WAITING)
    attempt = cluster.job("in-line").attempt
    assert attempt is not None and attempt.run_s is None and not attempt.in_line
    cluster.end(1, AttemptState.FAILED, JobState.CANCELLED)
    assert gpus(cluster.job("unheard")) == "" and gpus(cluster.job("done")) == "n2:0"


def test_why_it_waits_is_what_the_engine_says(cluster: Cluster) -> None:
    state = DispatcherState(pid=os.getpid(), handed={2: "Priority\x1b[2J"}, away="SLURM has not answered since 12:03")
    path = cluster.run.state_file
    file = StateFile(path)
    file.touch()
    file.keep_time(0.0, lambda: state)
    with closing(DispatcherLock(cluster.run.lock)):
        assert what(cluster.job("in-line")).startswith("waits in SLURM: Priority, for 1 min")
        assert at_work(cluster.status()).endswith("; SLURM has not answered since 12:03")


def test_what_a_dispatcher_without_engines_told_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    plain = {"pid": 11, "mode": "working", "closed": None, "waits": {}, "gpus": [], "settings": {}}
    path.write_text(json.dumps(plain), encoding="utf-8")
    assert read_state(path, 11) == DispatcherState(pid=11)  # as one without engines wrote it


def test_the_counts_say_how_many_are_in_the_line(cluster: Cluster) -> None:
    status = cluster.status()
    assert status.in_engine == InEngine("slurm", 3, 2)
    assert headline(status).startswith("1 of 4 done, 1 running, 2 handed over, 0 waiting")
    told = json.loads(json.dumps(as_json(status)))
    assert told["counts"]["running"] == 3 and told["counts"]["in_line"] == 2
    assert told["in_engine"] == {"engine": "slurm", "jobs": 3, "in_line": 2}
    by_name = {job["name"]: job["attempt"]["handed"] for job in told["jobs"]}
    assert by_name["begun"] == {"engine": "slurm", "batch": "b1", "index": 2, "handle": "17_2", "node": "n1"}
    assert by_name["unheard"]["handle"] is None


def test_who_is_at_work(cluster: Cluster) -> None:
    status = cluster.status()
    alone = replace(status, dispatcher=None)
    assert at_work(alone).startswith(
        "no gpuherd works on it now; 3 jobs in SLURM, 2 of them in its queue, all the same; the same command again"
    )


def test_the_table_and_the_screen_show_them(cluster: Cluster) -> None:
    file = io.StringIO()
    status = cluster.status()
    Console(file=file, width=100, color_system=None).print(as_table(status))
    assert [line.split()[0] for line in file.getvalue().splitlines()[5:]] == ["handed", "handed", "running", "done"]
    look = Snapshot(at=0.0, machine=Machine(gpus=(), problem="no driver"), status=status, log_of="in-line")
    assert picture.log_title(look).plain == "Log of in-line · attempt 1 · SLURM 17_1"
    assert picture.log_text(look).plain == "It has not begun: waits in SLURM"
    assert picture.log_title(replace(look, log_of="begun")).plain == "Log of begun · attempt 1 · GPU n1:0,n1:1"
    assert picture.gpu_lines(look, GpuHistory(), 80)[0].plain == "No GPUs: no driver. Jobs run in SLURM."


def test_the_log_of_one_in_the_line(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match="waits in SLURM and has not begun, so it has no log; -f waits for it"):
        list(read(cluster.run, "in-line"))
    cluster.run.engine_output("b1", 1).write_text("slurmstepd: error: no such folder\n")
    assert [part.lines for part in read(cluster.run, "in-line")] == [["slurmstepd: error: no such folder"]]


def test_the_log_is_what_the_job_wrote_if_it_wrote_anything(cluster: Cluster) -> None:
    cluster.run.engine_output("b1", 3).write_text("srun: job 17 queued\n")
    assert [part.lines for part in read(cluster.run, "done")] == [["srun: job 17 queued"]]
    assert [part.lines for part in follow(cluster.run, "done")] == [["srun: job 17 queued"]]
    cluster.run.attempt_log("done", 1).write_text("epoch 1\n")
    assert [part.lines for part in read(cluster.run, "done")] == [["epoch 1"]]
    assert [part.lines for part in follow(cluster.run, "done")] == [["epoch 1"]]


def test_figures_count_what_ran_and_where(cluster: Cluster) -> None:
    cluster.end(2, AttemptState.REQUEUED, JobState.WAITING)
    with opened(cluster.run) as reader:
        told = gpu_metrics(cluster.run, reader, cluster.queue.runs(), clock.wall())
    assert told["attempts_by_engine"] == {"slurm": 4}
    assert told["attempts_by_node"] == {"n1": 1, "n2": 1}
    assert told["gpu_hours_by_outcome"]["requeued"] == 0
    assert told["gpus"]["n2:0"]["busy_share"] is None and told["gpus"]["n2:0"]["busy_seconds"] >= 60
    with opened(cluster.run) as reader:
        figures = read_metrics(cluster.run, reader)
    assert figures.status.in_engine == InEngine("slurm", 2, 1)
    assert figures.gpus["n1:0"].busy_s == pytest.approx(60, abs=5) and figures.gpus["n1:0"].running == 1
    text = exposition(figures)
    assert 'gpuherd_jobs_in_engine{engine="slurm",phase="in_line"} 1.0\n' in text
    assert 'gpuherd_gpu_running_jobs{gpu="n1:1",uuid="n1:1"} 1.0\n' in text
