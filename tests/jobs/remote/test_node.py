"""The leader of one attempt: real processes, real files, a real stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.jobs.remote.orders import NODE, end, leader, order, shell, written
from tests.patience import Gate, wait_until

from gpuherd.engines.process_tree import tagged
from gpuherd.engines.world import Stop
from gpuherd.errors import UsageError
from gpuherd.gpus import visible
from gpuherd.gpus.state import Gpu, GpuProcess
from gpuherd.jobs.completion import NoFault
from gpuherd.jobs.remote import agent
from gpuherd.jobs.remote.agent import environment, lead
from gpuherd.jobs.remote.node_job import most
from gpuherd.jobs.remote.protocol import (
    INTERRUPTED,
    Claim,
    EndReport,
    Manifest,
    Order,
    read_claim,
    read_ended,
    take,
    write_ended,
)


def alive(job: Order) -> bool:
    return any(each.attempt == job.tag for each in tagged(job.tag))


def test_success(tmp_path: Path) -> None:
    """The command runs with what it was told, in its folder, with its words untouched; and its end is told."""
    words = ("a b", "$HOME", "`id`", "\n;", "*")
    script = 'printf "%s|" "$@" "$A" "$B" "$GPUHERD_ATTEMPT" "$PWD"; echo made >result; echo x >&2'
    job = order(
        tmp_path,
        ("/bin/sh", "-c", script, "sh", *words),
        env={"B": "job"},
        cwd=str(tmp_path),
        result="result",
    )
    assert lead(written(tmp_path, job, environment={"A": "told", "B": "told"}), 0) == 0
    told = end(job)
    assert told.well and told.code == 0 and not told.interrupted and told.problem is None
    assert told.ran_s >= 0
    assert Path(job.log).read_text() == "|".join([*words, "told", "job", job.tag, str(tmp_path), ""]) + "x\n"
    claim = read_claim(Path(job.claim))
    assert claim is not None and claim.pid == os.getpid() and claim.node == os.uname().nodename and not claim.void
    # Nothing else stays than what others are to read.
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        "batch.json",
        "result",
        "1.log",
        "00000001.claim",
        "00000001.ended",
    }


@pytest.mark.parametrize(
    ("script", "code", "number"), [("exit 3", 3, None), ("kill -9 $$", None, 9), ("kill -TERM $$", None, 15)]
)
def test_failure(tmp_path: Path, script: str, code: int | None, number: int | None) -> None:
    job = shell(tmp_path, script)
    assert lead(written(tmp_path, job), 0) == 1
    told = end(job)
    assert (told.started, told.code, told.signal, told.interrupted) == (True, code, number, False)


def test_result_that_is_not_there(tmp_path: Path) -> None:
    """A command that ends well without its result has failed: what comes after it must not begin."""
    job = shell(tmp_path, "exit 0", result=str(tmp_path / "result"))
    assert lead(written(tmp_path, job), 0) == 1
    assert end(job).code == 0 and not end(job).has_result and not end(job).well


# --- whose attempt it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "code"),
    [
        (None, INTERRUPTED),
        (EndReport(at=1.0, ran_s=1.0, code=0), 0),
        (EndReport(at=1.0, ran_s=1.0, code=3), 1),
        (EndReport(at=1.0, ran_s=1.0, signal=15, interrupted=True), INTERRUPTED),
    ],
)
@pytest.mark.parametrize("void", [False, True])
def test_attempt_of_another(tmp_path: Path, void: bool, before: EndReport | None, code: int) -> None:
    """It runs nothing, and lets nothing begin that is to come after a success that has not been."""
    job = shell(tmp_path, f"touch {tmp_path}/ran")
    assert take(Path(job.claim), Claim(at=1.0, void=void, node="elsewhere"))
    if before is not None:
        write_ended(Path(job.ended), before)
    assert lead(written(tmp_path, job), 0) == code
    assert not (tmp_path / "ran").exists()
    assert read_ended(Path(job.ended)) == before
    claim = read_claim(Path(job.claim))
    assert claim is not None and claim.node == "elsewhere"


def test_a_leader_loads_little(tmp_path: Path) -> None:
    """It begins once for each attempt: what is slow to load and of no use to most stays away, from begin to end."""
    job = shell(tmp_path, "exit 0")
    program = (
        "import sys; before = set(sys.modules)\n"
        "from gpuherd.jobs.remote.agent import main\n"
        "code = main(sys.argv[1:]); print(*set(sys.modules) - before); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, written(tmp_path, job), "0"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "gpuherd.jobs.remote.agent" in loaded
    heavy = {"tempfile", "random", "shutil", "socket", "logging", "asyncio", "sqlite3", "importlib.metadata"}
    assert not loaded & (heavy | {"gpuherd.engines.base", "gpuherd.gpus.query", "gpuherd.jobs.queue.store"})


def test_wrong_order(tmp_path: Path) -> None:
    """What can't be led is not claimed: somebody who can may still do it."""
    job = shell(tmp_path, "exit 0", nodes=2)
    manifest = written(tmp_path, job)
    with pytest.raises(UsageError, match="ray has given one node to an attempt that spans 2"):
        lead(manifest, 0)
    with pytest.raises(UsageError, match="holds 1 orders, and none with the index 1"):
        lead(manifest, 1)
    assert not Path(job.claim).exists()
    assert subprocess.run([*NODE, manifest], capture_output=True).returncode == 2
    assert subprocess.run([*NODE, manifest, "1"], capture_output=True).returncode == 2


# --- its environment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "own", "seen"),
    [(2, "3,5", "3,5"), (None, "3,5", "3,5"), (0, "3,5", ""), (None, None, "unset"), (0, None, "")],
)
def test_gpus_are_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int | None, own: str | None, seen: str
) -> None:
    if own is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    job = shell(
        tmp_path,
        'echo "${CUDA_VISIBLE_DEVICES-unset} $CUDA_DEVICE_ORDER"',
        gpus=gpus,
        env={"CUDA_VISIBLE_DEVICES": "7"},
    )
    assert lead(written(tmp_path, job, environment={"CUDA_VISIBLE_DEVICES": "6"}), 0) == 0
    assert Path(job.log).read_text() == f"{seen} PCI_BUS_ID\n"
    claim = read_claim(Path(job.claim))
    assert claim is not None and claim.gpus == (("3", "5") if seen == "3,5" else ())


@pytest.mark.parametrize(("engine", "path"), [("slurm", "/module/bin:/bin"), ("ray", "/venv/bin:/bin")])
def test_lines_of_setup_hold(tmp_path: Path, engine: str, path: str) -> None:
    """SLURM's node has the follower's environment already, and what the user's lines made of it."""
    told = Manifest(batch="b", engine=engine, environment={"PATH": "/venv/bin:/bin", "A": "1"}, orders=())
    found = environment({"PATH": "/module/bin:/bin", "B": "2"}, told, shell(tmp_path, ""))
    assert found == {"PATH": path, "A": "1", "B": "2", **visible.environment(())}


def test_slurms_word_for_it(tmp_path: Path) -> None:
    job, other = shell(tmp_path, "exit 0"), shell(tmp_path, "exit 0", 2)
    manifest = written(tmp_path, job, other, engine="slurm")
    variables = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "4", "SLURMD_NODENAME": "n7"}
    with leader(manifest, 0, **variables) as child:
        assert child.wait() == 0
    claim = read_claim(Path(job.claim))
    assert claim is not None and (claim.handle, claim.node) == ("11_4", "n7")
    with leader(manifest, 1, SLURM_JOB_ID="12") as child:
        assert child.wait() == 0
    claim = read_claim(Path(other.claim))
    assert claim is not None and claim.handle == "12"


# --- its end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_make_room(tmp_path: Path, number: signal.Signals) -> None:
    """The job gets SIGTERM and its time to save; that it then ended is nobody's fault."""
    ready = tmp_path / "ready"
    script = f"trap 'echo saved; exit 9' TERM; touch {ready}; while :; do sleep 0.02; done"
    job = shell(tmp_path, script, grace_s=60.0)
    with leader(written(tmp_path, job)) as child:
        wait_until(ready.exists)
        child.send_signal(number)
        assert child.wait() == INTERRUPTED
    assert end(job).interrupted and end(job).code == 9
    assert Path(job.log).read_text().endswith("saved\n")  # the shell tells of its sleep before


@pytest.mark.parametrize("notice_s", [None, 5.1, 60.0])
def test_notice(tmp_path: Path, notice_s: float | None) -> None:
    """A job whose time is nearly up has its notice to save; and no more than the grace when somebody asks again."""
    ready, saved, gate = tmp_path / "ready", tmp_path / "saved", Gate(tmp_path / "gate")
    script = f"trap '{gate.wait}; touch {saved}; exit 9' TERM; touch {ready}; while :; do sleep 0.02; done"
    job = shell(tmp_path, script, grace_s=0.1, notice_s=notice_s)
    with leader(written(tmp_path, job)) as child:
        wait_until(ready.exists)
        child.send_signal(signal.SIGUSR1)
        if notice_s == 60.0:
            with suppress(subprocess.TimeoutExpired):
                child.wait(0.5)
            assert child.poll() is None
            child.send_signal(signal.SIGTERM)
        assert child.wait() == INTERRUPTED
    assert end(job).signal == signal.SIGKILL and not saved.exists()


def test_notice_is_enough(tmp_path: Path) -> None:
    ready, told, gate = tmp_path / "ready", tmp_path / "told", Gate(tmp_path / "gate")
    script = f"trap 'touch {told}; {gate.wait}; exit 9' TERM; touch {ready}; while :; do sleep 0.02; done"
    job = shell(tmp_path, script, grace_s=0.01, notice_s=60.0)
    with leader(written(tmp_path, job)) as child:
        wait_until(ready.exists)
        child.send_signal(signal.SIGUSR1)
        wait_until(told.exists)
        gate.open()
        assert child.wait() == INTERRUPTED
    assert end(job).code == 9 and end(job).interrupted


def test_work_that_was_done_counts(tmp_path: Path) -> None:
    """It was asked to make room, and ended its work all the same."""
    ready = tmp_path / "ready"
    job = shell(tmp_path, f"trap 'exit 0' TERM; touch {ready}; while :; do sleep 0.02; done")
    with leader(written(tmp_path, job)) as child:
        wait_until(ready.exists)
        child.terminate()
        assert child.wait() == 0
    assert end(job).well and end(job).interrupted


def test_what_does_not_obey_is_killed(tmp_path: Path) -> None:
    """Also what has forked twice, has a session of its own and ignores SIGTERM."""
    ready = tmp_path / "ready"
    stubborn = f'trap "" TERM; touch {ready}; while :; do sleep 0.02; done'
    job = shell(tmp_path, f"trap '' TERM; (setsid sh -c '{stubborn}' &); while :; do sleep 0.02; done", grace_s=0.2)
    with leader(written(tmp_path, job)) as child:
        wait_until(ready.exists)
        child.terminate()
        assert child.wait() == INTERRUPTED
    assert end(job).signal == signal.SIGKILL
    assert not alive(job)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """A job that ends well takes with it what it left running."""
    ready = tmp_path / "ready"
    gate = Gate(ready)
    job = shell(tmp_path, f"(setsid sh -c 'touch {ready}; sleep 1000' &); {gate.wait}")
    assert lead(written(tmp_path, job), 0) == 0
    assert not alive(job)


@pytest.mark.parametrize(
    ("limits", "kind", "stage"),
    [
        ({"timeout_s": 0.2}, "timeout", None),
        ({"stage_timeout_s": 0.2}, "stage_timeout", "load"),
        ({"heartbeat_s": 0.2}, "heartbeat", "load"),
    ],
)
def test_limits(tmp_path: Path, limits: dict[str, Any], kind: str, stage: str | None) -> None:
    tell = """printf '{"done": 1, "stage": "load"}' >"$GPUHERD_PROGRESS.tmp"; mv "$GPUHERD_PROGRESS.tmp" """
    job = shell(tmp_path, f'{tell} "$GPUHERD_PROGRESS"; sleep 1000', **limits)
    assert lead(written(tmp_path, job), 0) == 1
    told = end(job)
    assert (told.limit, told.limit_s, told.signal, told.interrupted) == (kind, 0.2, signal.SIGTERM, False)
    assert told.stage in (stage, None)  # the limit may pass before it has told


def test_in_a_thread_of_a_process_that_lives_on(tmp_path: Path) -> None:
    """As in a worker of Ray's: no handler of ours is installed, and another thread asks it to stop."""
    ready, codes = tmp_path / "ready", []
    job = shell(tmp_path, f"touch {ready}; exec sleep 1000")
    manifest = written(tmp_path, job)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    with Stop() as stop:
        thread = threading.Thread(target=lambda: codes.append(lead(manifest, 0, stop, handle="task-1")))
        thread.start()
        wait_until(ready.exists)
        stop.ask()
        thread.join()
    assert codes == [INTERRUPTED] and end(job).interrupted
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    claim = read_claim(Path(job.claim))
    assert claim is not None and claim.handle == "task-1"


def test_who_asks_for_room_may_end_the_job_as_well_and_first(tmp_path: Path) -> None:
    """As Ray's job server, which signals the leader and all that it has started."""
    job = shell(tmp_path, "kill -TERM $$")
    with Stop() as stop:
        stop.asked = True  # what tells of it comes after the job's end
        assert lead(written(tmp_path, job), 0, stop) == INTERRUPTED
    assert end(job).interrupted and end(job).signal == signal.SIGTERM


class _ThrownError(Exception):
    """What a host process throws into its own main thread."""


def test_exception_thrown_into_it(tmp_path: Path) -> None:
    """As KeyboardInterrupt in a task that Ray cancels: the job is ended and told of first."""
    ready = tmp_path / "ready"
    job = shell(tmp_path, f"trap 'exit 4' TERM; touch {ready}; kill -ALRM {os.getpid()}; while :; do sleep 0.02; done")

    def throw(_number: int, _frame: FrameType | None) -> None:
        raise _ThrownError

    former = signal.signal(signal.SIGALRM, throw)
    try:
        with pytest.raises(_ThrownError):
            lead(written(tmp_path, job), 0)
    finally:
        signal.signal(signal.SIGALRM, former)
    assert end(job).interrupted and end(job).code == 4


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"argv": ("no-such-program",)}, "no such program: 'no-such-program' is in no folder of PATH"),
        ({"log": "/no-such-folder/log"}, "can't start 'true': No such file or directory: '/no-such-folder/log'"),
        ({"cwd": "/no-such-folder"}, "No such file or directory: '/no-such-folder'"),
    ],
)
def test_cannot_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, object], problem: str
) -> None:
    job = order(tmp_path, **{"argv": ("true",), **changes})  # type: ignore[arg-type]
    assert lead(written(tmp_path, job), 0, patience_s=0.0) == 1
    told = end(job)
    assert not told.started and told.problem is not None and problem in told.problem
    assert problem in capfd.readouterr().err


def test_end_that_can_not_be_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It says on the engine's file what nobody will read elsewhere. That is no success."""
    job = shell(tmp_path, f"mv {tmp_path}/told {tmp_path}/away; exit 3", ended=f"{tmp_path}/told/00000001.ended")
    (tmp_path / "told").mkdir()
    with pytest.raises(FileNotFoundError):
        lead(written(tmp_path, job), 0, patience_s=0.2)
    said = capfd.readouterr().err
    assert f"can't write {job.ended}" in said and "code=3" in said and "trying again for 0.2 s" in said


def test_success_that_can_not_be_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As over a quota. The work is done: the engine tells it by the exit code (``meaning``)."""
    job = shell(tmp_path, f"mv {tmp_path}/told {tmp_path}/away", ended=f"{tmp_path}/told/00000001.ended")
    (tmp_path / "told").mkdir()
    assert lead(written(tmp_path, job), 0, patience_s=0.2) == 0
    assert "the exit code tells that it has succeeded" in capfd.readouterr().err


def test_full_disk_for_a_while(tmp_path: Path) -> None:
    """A report that can't be written is written as soon as it can."""
    job = shell(tmp_path, f"mv {tmp_path}/told {tmp_path}/away", ended=str(tmp_path / "told" / "00000001.ended"))
    (tmp_path / "told").mkdir()
    with leader(written(tmp_path, job)) as child:
        assert child.stderr is not None
        assert "trying again" in child.stderr.readline()
        (tmp_path / "told").mkdir()
        assert child.wait() == 0
    assert end(job).well


def test_claim_that_can_not_be_made(tmp_path: Path) -> None:
    job = shell(tmp_path, f"touch {tmp_path}/ran", claim=str(tmp_path / "batch.json" / "claim"))
    with leader(written(tmp_path, job)) as child:
        _, said = child.communicate()
    assert child.returncode == 73 and "Not a directory" in said
    assert not (tmp_path / "ran").exists()


# --- memory -----------------------------------------------------------------------------------------------------------

_PROCESSES = st.lists(st.builds(GpuProcess, st.integers(1, 5), st.none(), st.none(), st.none() | st.integers(0, 99)))


@given(st.lists(_PROCESSES, max_size=3), st.frozensets(st.integers(1, 5)), st.none() | st.integers(0, 200))
def test_peak(on_gpus: list[list[GpuProcess]], ours: frozenset[int], before: int | None) -> None:
    """The most of what ours hold together on one GPU; nothing where the driver tells of none of them."""
    gpus = [Gpu(0, f"GPU-{i}", "g", 80, 0, 80, processes=tuple(each)) for i, each in enumerate(on_gpus)]
    told = [[p.memory_mb for p in each if p.pid in ours and p.memory_mb is not None] for each in on_gpus]
    sums = [sum(each) for each in told if each]
    expected = None if before is None and not sums else max([*sums, before or 0])
    assert most(gpus, ours, before) == expected


def test_a_claim_that_comes_when_all_is_over_begins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second leader has read the manifest; then the first one's report is read, and all files of the batch go."""
    job = shell(tmp_path, f"touch {tmp_path}/ran")
    manifest = Path(written(tmp_path, job))

    def late(path: Path, claim: Claim) -> bool:
        manifest.unlink()
        return take(path, claim)

    monkeypatch.setattr(agent, "take", late)
    assert lead(str(manifest), 0) == INTERRUPTED
    assert not (tmp_path / "ran").exists() and not Path(job.ended).exists()


# --- what it follows --------------------------------------------------------------------------------------------------


def test_it_begins_once_all_that_it_follows_tell_of_a_success(tmp_path: Path) -> None:
    """A report that comes late over the network is waited for, and read as soon as it is there."""
    first, second = tmp_path / "first.ended", tmp_path / "second.ended"
    write_ended(first, EndReport(at=1.0, ran_s=1.0, code=0))
    job = shell(tmp_path, f"cp {second} {tmp_path}/seen", after=(str(first), str(second)), delay_s=60.0)
    with leader(written(tmp_path, job)) as child:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
        assert not Path(job.claim).exists()
        write_ended(second, EndReport(at=1.0, ran_s=1.0, code=0))
        assert child.wait(30) == 0
    assert (tmp_path / "seen").exists() and end(job).well


@pytest.mark.parametrize(
    "before", [None, EndReport(at=1.0, ran_s=1.0, code=1), EndReport(at=1.0, ran_s=1.0, code=0, has_result=False)]
)
def test_it_never_begins_where_what_it_follows_has_not_succeeded(tmp_path: Path, before: EndReport | None) -> None:
    """Whatever the engine says. Its own claim keeps others from beginning it, and says why."""
    first = tmp_path / "first.ended"
    if before is not None:
        write_ended(first, before)
    job = shell(tmp_path, f"touch {tmp_path}/ran", after=(str(first),), delay_s=0.3)
    manifest = written(tmp_path, job)
    assert lead(manifest, 0) == INTERRUPTED
    claim = read_claim(Path(job.claim))
    assert claim is not None and claim.void and claim.node == os.uname().nodename
    assert NoFault[claim.why] is NoFault.TOO_EARLY
    write_ended(first, EndReport(at=1.0, ran_s=1.0, code=0))
    assert lead(manifest, 0) == INTERRUPTED  # it is not to run any more
    assert not (tmp_path / "ran").exists() and read_ended(Path(job.ended)) is None


def test_who_is_asked_to_make_room_waits_for_no_report(tmp_path: Path) -> None:
    job = shell(tmp_path, f"touch {tmp_path}/ran", after=(str(tmp_path / "first.ended"),), delay_s=60.0)
    with Stop() as stop:
        asking = threading.Timer(0.3, stop.ask)
        asking.start()
        assert lead(written(tmp_path, job), 0, stop) == INTERRUPTED
        asking.join()
    assert not (tmp_path / "ran").exists()
