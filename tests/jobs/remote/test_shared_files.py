"""The rule of the shared file system: the queue is opened by one host, and by nobody on a node."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.jobs.remote.orders import end, shell, written
from tests.patience import wait_until

from gpuherd.jobs.job import Job
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.run_dir import RunDirectory

# Python runs this at the start of every interpreter that finds it: of the leader, its guardian and all that they start.
_SPY = """
import atexit, os, sys
told = os.open(os.environ["SPY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.link", "os.rename", "os.remove", "sqlite3.connect"):
        for name in arguments[: 2 if event in ("os.link", "os.rename") else 1]:
            os.write(told, f"{event} {os.fsdecode(name) if isinstance(name, (str, bytes)) else name}\\n".encode())
sys.addaudithook(hook)
atexit.register(lambda: os.write(told, b"ended %d %r\\n" % ("sqlite3" in sys.modules, sys.argv)))
"""


@pytest.fixture
def spied(tmp_path: Path) -> dict[str, str]:
    """An environment in which every Python tells which files it opens."""
    (tmp_path / "spy").mkdir()
    (tmp_path / "spy" / "sitecustomize.py").write_text(_SPY)
    path = os.pathsep.join([str(tmp_path / "spy"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "SPY": str(tmp_path / "told")}


def _queue(run: RunDirectory) -> dict[str, bytes]:
    run.create()
    run.handover.mkdir()
    with closing(Queue(run.queue)) as queue:
        queue.submit([Job(name="a", argv=("true",))])
    return _files(run)


def _files(run: RunDirectory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.root.iterdir() if path.name.startswith("queue.")}


@pytest.mark.parametrize("killed", [False, True])
def test_nobody_on_a_node_opens_the_queue(tmp_path: Path, spied: dict[str, str], killed: bool) -> None:
    """Leader and guardian, in an attempt that ends by itself and in one whose leader is killed: of the run's folder
    they touch what lies in ``handover``, and the log; and they have not even loaded what reads a queue.
    """
    run = RunDirectory(tmp_path / "out")
    before = _queue(run)
    ready = tmp_path / "ready"
    work = f"touch {ready}; exec sleep 1000" if killed else "exit 0"
    job = shell(run.handover, work, log=str(run.attempt_log("a", 1)), progress=str(run.handover / "p"), timeout_s=500.0)
    manifest = written(run.handover, job)
    words = [sys.executable, "-m", "gpuherd.jobs.remote.agent", manifest, "0"]
    with subprocess.Popen(words, env=spied) as child:
        if killed:
            wait_until(ready.exists)
            child.kill()
        else:
            assert child.wait() == 0
    wait_until(lambda: Path(job.ended).exists() and not job.status.exists())
    told = tmp_path / "told"
    wait_until(lambda: "ended" in told.read_text())
    lines = told.read_text().splitlines()
    assert end(job).interrupted == killed
    assert any(job.claim in line for line in lines) and any(job.ended in line for line in lines)
    ended = [line.split(maxsplit=2) for line in lines if line.startswith("ended ")]
    assert [(word, "guardian" in who) for _, word, who in ended] == [("0", killed)]
    elsewhere = [line for line in lines if str(run.root) in line and str(run.handover) not in line]
    assert {line.split(maxsplit=1)[1] for line in elsewhere} == {job.log}
    assert not [line for line in lines if "queue" in line or "sqlite" in line]
    assert _files(run) == before
