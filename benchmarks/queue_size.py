"""A long queue: 100,000 jobs put in, decided on, waited with, and added to from the shell; 50,000 ended ones looked at.

Everything is measured in processes of its own. The GPUs are those of the stand-in driver, all in somebody else's use,
so that the dispatcher has every reason to wait. The driver is all that is simulated: the processes get it through their
environment, as they would get a real one. Waiting is measured in the background (``gpuherd up``), and in the foreground
with its output in a file, as under systemd. Looking is measured as CPU seconds, of this gpuherd and, where
$GPUHERD_BENCH_BEFORE names the ``src`` folder of another, of that one too.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpuherd.standin.machine import SimulatedMachine

GPUHERD = [sys.executable, "-m", "gpuherd"]
# An installed program has its byte code.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

_FILL = """\
import json, resource, sys, time
from gpuherd.jobs import Job, Queue
count = int(sys.argv[2])
queue = Queue(sys.argv[1])
started = time.perf_counter()
queue.add([Job(name=f"job-{n}", argv=("true", str(n)), gpus=1 + (n % 16 == 0), memory_mb=8000) for n in range(count)])
spent = time.perf_counter() - started
queue.close()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": round(spent, 2), "max_rss_mb": round(peak / 1024, 1)}))
"""

# What a dispatcher does when something has happened: the head of the queue, and the decision.
_DECIDE = """\
import json, statistics, sys, time
from gpuherd.gpus.choose import choose
from gpuherd.jobs import Queue
from gpuherd.jobs.scheduler.policy import GpuView, Limits, WaitingJob, decide
from gpuherd.simulate import machine
queue, times = Queue(sys.argv[1]), []
(gpus,) = machine("8x80GB")
views = [GpuView(gpu, None if gpu.index == 3 else "someone uses it") for gpu in gpus]
def pick(candidates, count, memory_mb):
    return choose(candidates, count, memory_mb=memory_mb)
for order in ("age", "longest") * int(sys.argv[2]):
    started = time.perf_counter()
    head = queue.head(8 + 1, time.time(), order)
    jobs = [WaitingJob(q.id, q.job.gpus, q.job.memory_mb, q.job.priority, q.avoid) for q in head]
    decision = decide(jobs, views, Limits(8, 1), pick)
    times.append((time.perf_counter() - started) * 1000)
    assert len(decision.starts) == 1
times.sort()
print(json.dumps({"p50_ms": round(statistics.median(times), 3), "p95_ms": round(times[int(len(times) * 0.95)], 3)}))
"""

# Rows as a long run leaves them, each job after one attempt.
_END = """\
import sqlite3, sys, time
queue, now = sqlite3.connect(sys.argv[1]), time.time()
queue.execute("INSERT INTO runs (pid, boot, started_at, started_mono, ended_at) VALUES (1, 'b', ?, 0, ?)", (now, now))
queue.execute("UPDATE jobs SET state = 'done', attempts = 1")
queue.execute(
    "INSERT INTO attempts (job, number, run, state, gpus, labels, pid, start_ticks, boot, log, wait_s, started_at,"
    " started_mono, ended_at, ended_mono, exit_code, peak_mb)"
    " SELECT id, 1, 1, 'done', '[]', '[]', id, 1, 'b', 'logs/' || name || '.1.log', 0.5, ?, 10, ?, 14, 0, 7000"
    " FROM jobs",
    (now - 100, now - 96),
)
queue.commit()
"""

# The peak of memory is that of this program alone, which rusage's would not be.
_LOOK = """\
import json, sys, time
from gpuherd.cli.main import run
assert run(sys.argv[1:]) == 0
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
sys.stdout.flush()
print(json.dumps({"cpu_s": round(time.process_time(), 2), "max_rss_mb": round(int(peak.split()[1]) / 1024, 1)}))
"""


def run(*, quick: bool) -> dict[str, Any]:
    """Figures by what was done; see docs/jobs.md for what they should be."""
    count = 2_000 if quick else 100_000
    with tempfile.TemporaryDirectory(prefix="gpuherd-queue-size-") as name:
        folder = Path(name)
        place = folder / "queue"
        machine = SimulatedMachine.create(folder / "machine", "8x80GB")
        for gpu in range(8):
            machine.occupy(gpu, 40_000)
        places = {"GPUHERD_QUEUE": str(place), "GPUHERD_LEASE_DIR": str(folder / "leases"), "XDG_CONFIG_HOME": name}
        environment = {**os.environ, **machine.environment(), **places}
        # The first one makes the folder, as for any user.
        first = _submit(environment)
        figures = {
            "jobs": count,
            "queued": _child(_FILL, str(place / "queue.sqlite"), str(count)),
            "decision": _child(_DECIDE, str(place / "queue.sqlite"), "20" if quick else "200"),
            "waiting": {
                "background": _waiting_in_background(environment, 3.0 if quick else 60.0),
                "foreground": _waiting_in_foreground(environment, 3.0 if quick else 60.0),
            },
        }
        times = sorted(_submit(environment) for _ in range(3 if quick else 20))
        figures["submit_ms"] = {"first": first, "median": statistics.median(times), "least": times[0]}
        figures["looking"] = _looking(folder / "ended", 2_000 if quick else 50_000, 3.0 if quick else 30.0)
        return figures


def _looking(folder: Path, count: int, seconds: float) -> dict[str, Any]:
    """What it costs to look at so many jobs that have ended."""
    folder.mkdir()
    _child(_FILL, str(folder / "queue.sqlite"), str(count))
    subprocess.run([sys.executable, "-c", _END, str(folder / "queue.sqlite")], check=True)
    sources = {"this": str(Path(__file__).parent.parent / "src"), "before": os.environ.get("GPUHERD_BENCH_BEFORE")}
    return {"jobs": count} | {
        name: {
            "status_json": _look(source, "status", str(folder), "--json"),
            "status_all": _look(source, "status", str(folder), "--all"),
            "top": _top(source, folder, seconds),
        }
        for name, source in sources.items()
        if source is not None
    }


def _look(source: str, *words: str) -> dict[str, float]:
    """CPU seconds of a command, in all and until its first 500 lines were there, and its peak of memory."""
    environment = {**os.environ, "PYTHONPATH": source}
    with subprocess.Popen([sys.executable, "-c", _LOOK, *words], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(500):
            process.stdout.readline()
        page = _cpu_seconds(process.pid)
        *_, last = process.stdout
    return {"first_500_lines_s": round(page, 2), **json.loads(last)}


def _top(source: str, folder: Path, seconds: float) -> dict[str, float]:
    """What ``gpuherd top`` costs on a terminal of 45 lines."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 45, 140, 0, 0))
    environment = {**os.environ, "PYTHONPATH": source, "TERM": "xterm-256color"}
    words = [*GPUHERD, "top", str(folder)]
    view = subprocess.Popen(words, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    threading.Thread(target=_read_on, args=(ours,), daemon=True).start()
    try:
        return _cost(view.pid, seconds)
    finally:
        os.killpg(view.pid, signal.SIGTERM)
        view.wait(timeout=30)


def _read_on(terminal: int) -> None:
    with suppress(OSError):  # the other end was closed
        while os.read(terminal, 65_536):
            pass


def _child(program: str, *words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _submit(environment: dict[str, str]) -> float:
    """Milliseconds of ``gpuherd submit`` from the shell, from start to exit."""
    started = time.perf_counter()
    words = [*GPUHERD, "submit", "--json", "--", "true"]
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return round((time.perf_counter() - started) * 1000, 1)


def _waiting_in_background(environment: dict[str, str], seconds: float) -> dict[str, float]:
    """What ``gpuherd up`` costs: its dispatcher is nobody's child, so it tells its pid."""
    words = [*GPUHERD, "up", "--json"]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    try:
        return _cost(int(json.loads(done.stdout)["pid"]), seconds)
    finally:
        subprocess.run([*GPUHERD, "down", "--now"], env=environment, stdout=subprocess.DEVNULL, check=True)


def _waiting_in_foreground(environment: dict[str, str], seconds: float) -> dict[str, float]:
    words = [*GPUHERD, "up", "--foreground"]
    dispatcher = subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return _cost(dispatcher.pid, seconds)
    finally:
        os.killpg(dispatcher.pid, signal.SIGTERM)
        dispatcher.wait(timeout=30)


def _cost(pid: int, seconds: float) -> dict[str, float]:
    """What a dispatcher costs that waits for GPUs: share of a core and wake-ups, of all its threads, and its memory."""
    time.sleep(5.0)
    before, began = _cpu_seconds(pid), time.monotonic()
    woken = _wakeups(pid)
    time.sleep(seconds)
    spent, took = _cpu_seconds(pid) - before, time.monotonic() - began
    wakeups = _wakeups(pid) - woken
    rss_mb, pss_mb = _memory_mb(pid)
    return {
        "seconds": round(took, 1),
        "percent_of_a_core": round(100 * spent / took, 3),
        "wakeups_a_second": round(wakeups / took, 2),
        "rss_mb": rss_mb,
        "pss_mb": pss_mb,
    }


def _cpu_seconds(pid: int) -> float:
    """By the scheduler's own account, in nanoseconds: a clock tick would be too coarse."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _wakeups(pid: int) -> int:
    """How often its threads have gone to sleep by themselves."""
    lines = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status"))
    return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in lines)


def _memory_mb(pid: int) -> tuple[float, float]:
    """Resident memory, and the part of it that is its own, shared pages by their share."""
    rolled = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    )
    rss, pss = (round(int(rolled[name].split()[0]) / 1024, 1) for name in ("Rss", "Pss"))
    return rss, pss
