"""Where the user's own queue is, who may use it, and what ``gpuherd submit`` puts there."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from tests.forking import Forking

from gpuherd.batch.daemon import down, up
from gpuherd.batch.user_queue import folder, in_use, open_folder, submit, with_surroundings
from gpuherd.errors import CannotWrite, ExitCode, UsageError
from gpuherd.jobs.feasibility import dispatchers_machine
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.settings import user_file
from gpuherd.standin.machine import SimulatedMachine


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "state" / "queue"
    monkeypatch.setenv("GPUHERD_QUEUE", str(place))
    return place


forking: Forking


@pytest.fixture(scope="module", autouse=True)
def _forking(forking_gpuherd: Forking) -> None:
    """Commands are forks of one process."""
    global forking
    forking = forking_gpuherd


def gpuherd(
    *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return forking.start(module="gpuherd", words=words, env=env, cwd=cwd).end()


def queued(own: Path) -> Queue:
    return Queue(own / "queue.sqlite")


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
    assert folder() == own
    monkeypatch.delenv("GPUHERD_QUEUE")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert folder() == Path("/state/gpuherd/queue")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/alice")
    assert folder() == Path("/home/alice/.local/state/gpuherd/queue")


def test_there_is_one_for_each_engine(own: Path) -> None:
    assert (folder("local"), folder("slurm"), folder("ray")) == (
        own,
        own.parent / "queue-slurm",
        own.parent / "queue-ray",
    )
    assert in_use() == ()
    for engine in ("ray", "local"):
        open_folder(engine=engine)
        Queue(folder(engine) / "queue.sqlite").close()
    assert in_use() == ("local", "ray")
    assert stat.S_IMODE(folder("ray").stat().st_mode) == 0o700


def looked_at() -> str:
    """What ``status`` tells."""
    return gpuherd("status").stdout


def test_commands_find_the_queue_that_is_meant(own: Path) -> None:
    """The one that is named, else that of the settings, else the only one there is."""
    submitted = gpuherd("submit", "--engine=slurm", "--nodes=2", "--cpus=4", "--host-mem=2GB", "--", "true")
    assert (submitted.stdout, submitted.returncode) == ("job-0001\n", ExitCode.OK)
    assert "start it with: gpuherd up --engine slurm" in submitted.stderr
    with closing(Queue(folder("slurm") / "queue.sqlite")) as queue:
        found = queue.job("job-0001")
    assert found is not None
    assert (found[0].job.nodes, found[0].job.cpus, found[0].job.host_memory_mb) == (2, 4, 2048)
    assert "queue-slurm" in looked_at()  # the only one
    assert "no queue of your own yet" in gpuherd("status", "--engine=ray").stderr
    assert gpuherd("submit", "--", "true").stdout == "job-0001\n"  # to this machine's
    assert "queue-slurm" not in looked_at()
    assert gpuherd("cancel", "--engine=slurm", "job-0001").returncode == ExitCode.OK
    assert "1 cancelled" in gpuherd("status", "--engine=slurm").stdout
    both = gpuherd("status", "--engine=slurm", str(own))
    assert both.returncode == ExitCode.USAGE and "name one of them" in both.stderr
    user_file().parent.mkdir(parents=True)
    user_file().write_text("[defaults]\nengine = 'slurm'\n")
    assert "queue-slurm" in looked_at()
    told = json.loads(gpuherd("submit", "--dry-run", "--json", "--", "true").stdout)
    assert told["engine"] == "slurm"
    shutil.rmtree(folder("slurm"))
    open_folder(engine="ray")
    Queue(folder("ray") / "queue.sqlite").close()
    several = gpuherd("status")
    assert several.returncode == ExitCode.USAGE and "for local and ray; say which: --engine local" in several.stderr


def test_what_this_machine_could_never_run_is_refused_at_once(own: Path) -> None:
    for words, refused in (
        (("--nodes=2",), "the job spans 2 nodes, and this is one machine; use --engine slurm or --engine ray"),
        (("--host-mem=900000GB",), "MB of main memory; there are"),
        (("--node-gpus=4xA100-80GB", "--model=llama-3.1-8b"), "--node-gpus is for --engine slurm or --engine ray"),
    ):
        for more in ((), ("--dry-run",)):
            shown = gpuherd("submit", *more, *words, "--", "true")
            assert refused in shown.stderr and shown.returncode == ExitCode.USAGE, shown
    assert not (own / "queue.sqlite").exists()


def test_a_model_is_planned_for_the_clusters_gpus() -> None:
    """Of this machine no GPU is looked at."""
    words = ("submit", "--dry-run", "--json", "--engine=ray", "--model=llama-3.1-70b", "--new-tokens=8")
    told = json.loads(gpuherd(*words, "--node-gpus=8xA100-80GB", "--", "true").stdout)
    assert told["gpus"] == 2
    unsaid = gpuherd(*words, "--", "true")
    assert unsaid.returncode == ExitCode.USAGE and "say what a node has by --node-gpus" in unsaid.stdout


def test_it_is_for_its_owner_alone(own: Path) -> None:
    run = open_folder()
    assert stat.S_IMODE(run.root.stat().st_mode) == 0o700
    own.chmod(0o777)
    with pytest.raises(CannotWrite, match="chmod go-w"):
        open_folder()


def test_it_can_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUHERD_QUEUE", "/proc/none/queue")
    with pytest.raises(CannotWrite, match="GPUHERD_QUEUE"):
        open_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_someone_else_is_refused(own: Path) -> None:
    open_folder()
    os.chown(own, 12345, 12345)
    with pytest.raises(CannotWrite, match="someone else"):
        open_folder()


def test_a_command_goes_in_with_its_folder_and_environment(own: Path, tmp_path: Path) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "3", "GPUHERD_ATTEMPT": "x/1", "MINE": "two words"}
    words = "submit --num-gpus 1-4 --mem 2GB --priority -3 --timeout 2h --retries 0 --cost 5 --round 1 -- prog --name x"
    ran = gpuherd(*words.split(), cwd=tmp_path, env=environment)
    assert (ran.returncode, ran.stdout) == (0, "job-0001\n"), ran.stderr
    assert "gpuherd up" in ran.stderr
    with closing(queued(own)) as queue:
        (job,) = queue.jobs()
    assert (job.argv, job.gpus, job.gpus_at_most, job.memory_mb) == (("prog", "--name", "x"), 1, 4, 2048)
    assert (job.priority, job.timeout_s, job.retries, job.cost, job.round) == (-3, 7200, 0, 5, 1)
    assert job.cwd == str(tmp_path)
    assert job.env["MINE"] == "two words"
    assert not {"CUDA_VISIBLE_DEVICES", "GPUHERD_ATTEMPT", "GPUHERD_QUEUE"} & job.env.keys()
    assert stat.S_IMODE((own / "queue.sqlite").stat().st_mode) == 0o600


def test_names_and_needs(own: Path) -> None:
    assert gpuherd("submit", "--name", "a", "--", "x").stdout == "a\n"
    told = json.loads(gpuherd("submit", "--needs", "a", "--json", "--", "y").stdout)
    assert told == {"name": "job-0001", "state": "waiting", "worker": None}
    for words, message in (
        (("--name", "a", "--", "other"), "the name 'a' is taken"),
        (("--needs", "nobody", "--", "z"), "there is no such job"),
        (("--needs", "a,,b", "--", "z"), "is no name"),
        (("--share", "--", "z"), "share is for jobs on 1 GPU that say how much memory"),
        ((), "no command"),
        (("--prioritty", "1", "--", "z"), "did you mean --priority?"),
    ):
        ran = gpuherd("submit", *words)
        assert ran.returncode == ExitCode.USAGE, words
        assert message in ran.stderr
    with closing(queued(own)) as queue:
        assert queue.states() == {"a": JobState.WAITING, "job-0001": JobState.WAITING}


def test_a_dry_run_and_a_job_that_is_there_already(own: Path) -> None:
    assert gpuherd("submit", "--dry-run", "--", "a b", "c").stdout == "would submit (the next number): 'a b' c\n"
    assert not own.exists()
    job = with_surroundings(Job(name="x", argv=("true",)), {"A": "1"}, "/tmp")
    assert submit(job, named=True).state is JobState.WAITING
    again = with_surroundings(Job(name="x", argv=("true",)), {"A": "2"}, "/tmp")
    assert submit(again, named=True).state is JobState.WAITING  # another terminal's environment is no other job
    elsewhere = with_surroundings(Job(name="x", argv=("true",)), {}, "/")
    with pytest.raises(UsageError, match="waiting"):
        submit(elsewhere, named=True)


def test_a_dry_run_refuses_what_submit_refuses_and_changes_nothing(own: Path, tmp_path: Path) -> None:
    refused = (
        (("--cwd", str(tmp_path / "none"), "--", "z"), "there is no folder"),
        (("--needs", "train", "--", "z"), "there is no such job"),
    )
    for words, message in refused:
        for dry in ((), ("--dry-run",)):
            ran = gpuherd("submit", *dry, *words)
            assert (ran.returncode, ran.stdout) == (ExitCode.USAGE, "")
            assert message in ran.stderr
    assert gpuherd("submit", "--name", "trian", "--", "a").returncode == 0
    before = sorted(path.name for path in own.iterdir())
    assert "did you mean 'trian'" in gpuherd("submit", "--dry-run", "--needs", "train", "--", "z").stderr
    assert "is taken" in gpuherd("submit", "--dry-run", "--name", "trian", "--", "other").stderr
    assert (
        gpuherd("submit", "--dry-run", "--needs", "trian", "--cwd", str(tmp_path / "later"), "--", "z").returncode == 0
    )
    assert gpuherd("submit", "--dry-run", "--name", "new", "--", "z").stdout == "would submit new: z\n"
    assert sorted(path.name for path in own.iterdir()) == before
    with closing(queued(own)) as queue:
        assert queue.states() == {"trian": JobState.WAITING}


def test_a_program_that_is_not_there_is_told_and_taken(own: Path) -> None:
    told = gpuherd("submit", "--", "python3 train.py").stderr
    assert "there is no program 'python3 train.py' in any folder of PATH yet; write the words apart" in told
    assert "no program" not in gpuherd("submit", "--", "sh", "-c", "true").stderr
    with closing(queued(own)) as queue:
        assert len(queue.states()) == 2


def test_what_can_never_run_here_is_refused_by_a_dry_run(standin: Callable[..., SimulatedMachine]) -> None:
    standin("2x40GB")
    for words, message in (
        (("--num-gpus", "3"), "the job asks for 3 GPUs; there are 2 to use"),
        (("--mem", "50GB"), "the job asks for 51200 MB on a GPU; the largest has 40960 MB"),
    ):
        ran = gpuherd("submit", "--dry-run", *words, "--", "z")
        assert (ran.returncode, ran.stdout) == (ExitCode.USAGE, "")
        assert message in ran.stderr
    assert gpuherd("submit", "--dry-run", "--num-gpus", "2", "--mem", "40GB", "--", "z").returncode == 0
    # Nobody is at work who would have looked at the GPUs, and submit has no time to: it is taken.
    assert gpuherd("submit", "--num-gpus", "3", "--", "z").returncode == 0


def test_submit_refuses_what_the_dispatcher_at_work_could_never_run(
    own: Path, standin: Callable[..., SimulatedMachine]
) -> None:
    standin("2x40GB")
    assert gpuherd("submit", "--name", "first", "--", "true").returncode == 0
    up(DispatchOptions(max_checks=1, check_interval=0.01, max_gpus=2))
    try:
        run = RunDirectory(own)
        deadline = time.monotonic() + 60
        while dispatchers_machine(run) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        for words, message in (
            (("--num-gpus", "3"), "asks for 3 GPUs; there are 2 to use"),
            (("--mem", "50GB"), "the largest has 40960 MB"),
        ):
            ran = gpuherd("submit", *words, "--name", "never", "--", "true")
            assert (ran.returncode, ran.stdout) == (ExitCode.USAGE, "")
            assert message in ran.stderr
        assert gpuherd("submit", "--num-gpus", "2", "--mem", "40GB", "--name", "second", "--", "true").returncode == 0
        # What is set while it works counts from then on, also at once.
        assert gpuherd("set", "--max-gpus", "1").returncode == 0
        ran = gpuherd("submit", "--num-gpus", "2", "--name", "never", "--", "true")
        while ran.returncode == 0 and time.monotonic() < deadline:
            ran = gpuherd("submit", "--num-gpus", "2", "--name", "never", "--", "true")
        assert "asks for 2 GPUs; max_gpus is 1" in ran.stderr
        assert gpuherd("set", "--max-gpus", "2").returncode == 0
        assert gpuherd("submit", "--num-gpus", "2", "--name", "third", "--", "true").returncode == 0
        with closing(queued(own)) as queue:
            assert {"first", "second", "third"} <= set(queue.states())
    finally:
        down(now=True)


def test_many_submit_at_once_and_each_gets_a_name(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    job = with_surroundings(Job(name="new", argv=("true",)), {}, "/")
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: submit(job, named=False, run=run).job.name, range(40)))
    assert sorted(names) == [f"job-{number:04d}" for number in range(1, 41)]


def test_a_damaged_queue_is_left_alone(own: Path) -> None:
    open_folder()
    (own / "queue.sqlite").write_bytes(b"this is no database, whatever it is" * 100)
    before = (own / "queue.sqlite").read_bytes()
    ran = gpuherd("submit", "--", "x")
    assert ran.returncode != 0
    assert "damaged" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert (own / "queue.sqlite").read_bytes() == before
