"""Real processes: the go-ahead, the exit status that survives us, signals to the group, the environment."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpuherd.engines.local.process import (
    CannotStart,
    Exit,
    Launch,
    LocalProcess,
    adopt,
    job_environment,
    read_exit,
    start,
)
from gpuherd.engines.process_tree import ProcessId, identify, locks_held, tagged
from gpuherd.gpus.state import Gpu, Maker


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Launch]:
    def make(*argv: str, **more: object) -> Launch:
        fields = {
            "tag": "q/1",
            "log": tmp_path / "log",
            "status": tmp_path / "status",
            "progress": tmp_path / "progress",
        }
        return Launch(argv=argv, **{**fields, **more})  # type: ignore[arg-type]

    return make


def ended(process: LocalProcess, within_s: float = 10.0) -> bool:
    return bool(select.select([process.pidfd], [], [], within_s)[0])


def run(launch: Launch) -> Exit:
    process = start(launch, os.environ)
    process.go()
    assert ended(process)
    return process.collect()


def test_nothing_runs_before_the_go_ahead(launch: Callable[..., Launch], tmp_path: Path) -> None:
    process = start(launch("/usr/bin/touch", str(tmp_path / "ran")), os.environ)
    assert not ended(process, 0.3)
    assert not (tmp_path / "ran").exists()
    process.go()
    assert ended(process)
    assert process.collect() == Exit(started=True, code=0)
    assert (tmp_path / "ran").exists()
    assert read_exit(tmp_path / "status", "q/1") == Exit(started=True, code=0)


def test_a_starter_that_dies_before_the_go_ahead_leaves_no_job(launch: Callable[..., Launch], tmp_path: Path) -> None:
    process = start(launch("/usr/bin/touch", str(tmp_path / "ran")), os.environ)
    pidfd = os.dup(process.pidfd)
    process.release()  # what the kernel does with the descriptors of a dead starter
    assert select.select([pidfd], [], [], 10)[0]
    assert not (tmp_path / "ran").exists()
    assert read_exit(tmp_path / "status", "q/1") == Exit(started=False)
    os.close(pidfd)


def test_a_process_that_waits_is_told_its_gpus_and_leases_with_the_go_ahead(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    files = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("a", "b")]
    script = 'echo "$CUDA_VISIBLE_DEVICES" >seen; read -r line <wait'
    os.mkfifo(tmp_path / "wait")
    process = start(launch("/bin/sh", "-c", script, cwd=str(tmp_path), ahead_fds=tuple(files)), os.environ)
    # What is not locked is no trace of it: it may be the lease of another.
    assert process.traces.locks == frozenset()
    assert process.waits_for_go()
    fcntl.flock(files[1], fcntl.LOCK_EX)
    process.assign([Gpu(index=3, uuid="GPU-a", name="A", total_mb=1, used_mb=0, free_mb=1)], [files[1]])
    process.go()
    for descriptor in files:
        os.close(descriptor)
    with (tmp_path / "wait").open("w"):
        assert process.traces.locks == locks_held(process.identity.pid) != frozenset()
        assert {lock.path for lock in process.traces.locks} == {str(tmp_path / "b")}
    assert ended(process)
    assert process.collect() == Exit(started=True, code=1)
    assert (tmp_path / "seen").read_text() == "3\n"


def test_a_process_that_waits_gets_the_variables_of_its_gpus_maker_alone(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    script = 'echo "$ROCR_VISIBLE_DEVICES $HIP_VISIBLE_DEVICES ${CUDA_VISIBLE_DEVICES-unset}"'
    process = start(launch("/bin/sh", "-c", script), os.environ)
    gpus = [Gpu(index, f"GPU-{index}", "A", total_mb=1, used_mb=0, free_mb=1, maker=Maker.AMD) for index in (3, 1)]
    process.assign(gpus, [])
    process.go()
    assert ended(process)
    assert process.collect() == Exit(started=True, code=0)
    assert (tmp_path / "log").read_text() == "3,1 0,1 unset\n"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_waits_is_given_up_whatever_befell_it(
    launch: Callable[..., Launch], tmp_path: Path, number: int
) -> None:
    process = start(launch("/usr/bin/touch", str(tmp_path / "ran")), os.environ)
    process.signal(number)
    if number != signal.SIGSTOP:
        assert ended(process)
        assert not process.waits_for_go()
    pid = process.identity.pid
    process.abandon()
    assert identify(pid) is None
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("code", [0, 1, 65, 75, 126])
def test_exit_codes(launch: Callable[..., Launch], tmp_path: Path, code: int) -> None:
    assert run(launch(sys.executable, "-c", f"raise SystemExit({code})")) == Exit(started=True, code=code)
    assert read_exit(tmp_path / "status", "q/1") == Exit(started=True, code=code)


def test_a_job_killed_by_a_signal_says_which(launch: Callable[..., Launch], tmp_path: Path) -> None:
    ended_by = run(launch(sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"))
    assert ended_by == Exit(started=True, signal=signal.SIGSEGV)
    assert read_exit(tmp_path / "status", "q/1") == ended_by


def test_a_signal_to_the_group_ends_the_job_and_is_recorded(launch: Callable[..., Launch], tmp_path: Path) -> None:
    script = (
        "import signal,sys,time; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); time.sleep(60)"
    )
    process = start(launch(sys.executable, "-c", script), os.environ)
    process.go()
    deadline = time.monotonic() + 10
    while b"up" not in (tmp_path / "log").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.signal(signal.SIGTERM)
    assert ended(process)
    assert process.collect() == Exit(started=True, code=7)
    assert read_exit(tmp_path / "status", "q/1") == Exit(started=True, code=7)


def test_words_are_never_seen_by_a_shell(launch: Callable[..., Launch], tmp_path: Path) -> None:
    words = ["$(touch x)", ";", "a b", "`id`", "", "-e", "\n", "'", '"', "\\", "*", "é", "$HOME"]
    code = "import sys; sys.stdout.write(repr(sys.argv[1:]))"
    assert run(launch(sys.executable, "-c", code, *words, cwd=str(tmp_path))) == Exit(started=True, code=0)
    assert (tmp_path / "log").read_text() == repr(words)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("word", ["exit", "eval", "exec", "trap", ":", "set"])
def test_a_shells_own_commands_are_no_programs(launch: Callable[..., Launch], word: str) -> None:
    with pytest.raises(CannotStart, match="no such program"):
        start(launch(word, "0"), {"PATH": "/nowhere"})


def test_what_cannot_start_says_why(launch: Callable[..., Launch], tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="no such program: 'gpuherd-no-such'"):
        start(launch("gpuherd-no-such"), os.environ)
    with pytest.raises(CannotStart, match="no such program"):
        start(launch("./absent", cwd=str(tmp_path)), os.environ)
    with pytest.raises(CannotStart, match="absent"):
        start(launch("/bin/true", cwd=str(tmp_path / "absent")), os.environ)
    with pytest.raises(CannotStart) as too_long:
        start(launch("/bin/echo", "x" * 3_000_000), os.environ)
    assert not too_long.value.may_pass


def test_a_status_that_cannot_be_written_means_never_started(launch: Callable[..., Launch], tmp_path: Path) -> None:
    made = tmp_path / "ran"
    process = start(launch("/usr/bin/touch", str(made), status=tmp_path / "no" / "status"), os.environ)
    process.go()
    assert ended(process)
    process.collect()
    assert read_exit(tmp_path / "no" / "status", "q/1") == Exit(started=False)
    assert not made.exists()


def test_adopting_after_the_starter_has_died(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """Another process starts the job and is killed; this one takes the job over and learns its exit code."""
    starter = f"""
import os, sys, time
from pathlib import Path
from gpuherd.engines.local.process import Launch, start
from gpuherd.jobs.job import Job
here = Path({str(tmp_path)!r})
process = start(Launch(tag="q/1", argv=("/bin/sh", "-c", "sleep 0.5; exit 7"), log=here / "log",
                       status=here / "status", progress=here / "progress"), os.environ)
process.go()
print(process.identity.pid, process.identity.start_ticks, process.identity.boot, flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pid, ticks, boot = child.stdout.readline().split()
    child.kill()
    child.wait()
    child.stdout.close()
    process = adopt(ProcessId(int(pid), int(ticks), boot), tmp_path / "status", "q/1")
    assert process is not None
    assert ended(process)
    assert process.collect() == Exit(started=True, code=7)


def test_a_pid_used_again_is_not_adopted(launch: Callable[..., Launch], tmp_path: Path) -> None:
    me = identify(os.getpid())
    assert me is not None
    assert me.is_alive()
    assert adopt(ProcessId(me.pid, me.start_ticks + 1, me.boot), tmp_path / "status", "q/1") is None
    assert adopt(ProcessId(me.pid, me.start_ticks, "another boot"), tmp_path / "status", "q/1") is None


def test_half_a_status_is_no_status(tmp_path: Path) -> None:
    for text, expected in [
        ("", Exit(started=False)),
        ("\nq/1 started 5.25", Exit(started=False)),
        ("\nq/1 started 5.25\n", Exit(started=True)),
        ("\nq/1 started 5.25\n\nq/1 exit 1", Exit(started=True)),
        ("\nq/1 started 5.25\n\nq/1 exit 12 7.5\n", Exit(started=True, code=12)),
        ("\nq/1 started 5.25\n\nq/1 exit 137 7.5\n", Exit(started=True, signal=9)),
        # Others write into the same file, and a full disk may have cut one of them short.
        ("\nq/11 started 5.25\n\nq/11 exit 0 6.0\n", Exit(started=False)),
        ("\nq/2 exi\nq/1 started 5.25\n\nq/2 exit 3 6.0\n\nq/1 exit 0 7.5\n", Exit(started=True, code=0)),
    ]:
        (tmp_path / "status").write_text(text)
        assert read_exit(tmp_path / "status", "q/1") == expected


def test_the_status_file_knows_how_long_it_ran(launch: Callable[..., Launch], tmp_path: Path) -> None:
    assert run(launch("/bin/sleep", "0.3")) == Exit(started=True, code=0)
    ran_s = read_exit(tmp_path / "status", "q/1").ran_s
    assert ran_s is not None
    assert 0.28 <= ran_s < 5
    (tmp_path / "status").write_text("\nq/1 started\n\nq/1 exit 0\n")  # where /proc/uptime can't be read
    assert read_exit(tmp_path / "status", "q/1").ran_s is None


def test_attempts_share_a_status_file(launch: Callable[..., Launch], tmp_path: Path) -> None:
    processes = [start(launch("/bin/sh", "-c", f"exit {i}", tag=f"q/{i}"), os.environ) for i in range(20)]
    for process in processes:
        process.go()
    for process in processes:
        assert ended(process)
        process.collect()
    assert [read_exit(tmp_path / "status", f"q/{i}").code for i in range(20)] == list(range(20))


def test_a_jobs_own_variables_reach_it_unchanged(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """Also those that the shell between could use for itself."""
    env = dict.fromkeys(("status", "code", "go", "up", "rest"), "mine")
    assert run(launch("/usr/bin/env", env=env)) == Exit(started=True, code=0)
    lines = (tmp_path / "log").read_text().splitlines()
    assert {f"{name}=mine" for name in env} <= set(lines)


def test_the_jobs_environment(launch: Callable[..., Launch], tmp_path: Path) -> None:
    whole = Gpu(index=2, uuid="GPU-a", name="A", total_mb=1, used_mb=0, free_mb=1)
    slice_ = Gpu(index=0, uuid="MIG-b", name="B", total_mb=1, used_mb=0, free_mb=1, mig_parent="GPU-c", mig_position=0)
    inherited = {"CUDA_VISIBLE_DEVICES": "5", "CUDA_DEVICE_ORDER": "FASTEST_FIRST", "A": "1"}
    got = job_environment(inherited, launch("x", gpus=(whole,), env={"CUDA_VISIBLE_DEVICES": "7", "B": "2"}, threads=3))
    assert got["CUDA_VISIBLE_DEVICES"] == "2"
    assert got["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert (got["A"], got["B"], got["GPUHERD_ATTEMPT"]) == ("1", "2", "q/1")
    assert got["GPUHERD_PROGRESS"] == str(tmp_path / "progress")
    assert got["OMP_NUM_THREADS"] == got["MKL_NUM_THREADS"] == got["OPENBLAS_NUM_THREADS"] == "3"
    amd = replace(whole, maker=Maker.AMD)
    got = job_environment({"CUDA_VISIBLE_DEVICES": "1", "GPU_DEVICE_ORDINAL": "0"}, launch("x", gpus=(amd,)))
    shown = {name: value for name, value in got.items() if "DEVICE" in name}
    assert shown == {"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0"}
    assert job_environment({}, launch("x", gpus=(slice_,)))["CUDA_VISIBLE_DEVICES"] == "MIG-b"
    assert job_environment(inherited, launch("x"))["CUDA_VISIBLE_DEVICES"] == ""
    assert inherited["CUDA_VISIBLE_DEVICES"] == "5"


def test_the_users_own_thread_count_stands(launch: Callable[..., Launch]) -> None:
    got = job_environment({"OMP_NUM_THREADS": "8"}, launch("x", threads=2))
    assert got["OMP_NUM_THREADS"] == "8"
    assert "MKL_NUM_THREADS" not in got


def test_a_lease_lives_as_long_as_the_job(launch: Callable[..., Launch], tmp_path: Path) -> None:
    import fcntl

    file = tmp_path / "lock"
    file.touch()
    lease = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lease, fcntl.LOCK_EX)
    process = start(launch("/bin/sleep", "0.4", lease_fds=(lease,)), os.environ)
    os.close(lease)
    process.go()
    other = os.open(file, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert ended(process)
    process.collect()
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_what_sets_itself_apart_is_found_by_its_tag(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """A double fork with a session of its own: no process group finds it, the tag does."""
    script = (
        "import os,time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(30)\n os._exit(0)\nos.wait()"
    )
    tag = f"test-{os.getpid()}/1"
    assert run(launch(sys.executable, "-c", script, tag=tag)) == Exit(started=True, code=0)
    left = list(tagged(tag))
    assert [found.attempt for found in left] == [tag]
    os.kill(left[0].process.pid, signal.SIGKILL)


def test_a_start_for_want_of_descriptors_leaves_no_shell_and_none_open(launch: Callable[..., Launch]) -> None:
    """At each step that needs one in turn; the dispatcher then tries again a second later, for days if need be."""
    program = """
import os, resource, sys
from pathlib import Path
from gpuherd.engines.local.process import CannotStart, Launch, start
folder = Path(sys.argv[1])
launch = Launch(tag="q/1", argv=("/bin/true",), log=folder / "log", status=folder / "s", progress=folder / "p")
start(launch, os.environ).release()  # imports and caches are warm
before = sorted(os.listdir("/proc/self/fd"))
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
failed = 0
for spare in range(12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) - 1 + spare, hard))
    try:
        start(launch, os.environ).release()
    except (CannotStart, OSError) as problem:
        failed += 1
        assert not isinstance(problem, CannotStart) or problem.may_pass, problem
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
assert sorted(os.listdir("/proc/self/fd")) == before
try:
    os.waitpid(-1, os.WNOHANG)
    sys.exit("a child is left")
except ChildProcessError:
    print(failed)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(launch("x").log.parent)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert 4 <= int(done.stdout) < 12
