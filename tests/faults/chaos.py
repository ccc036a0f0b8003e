"""One run of a queue under faults that a seed chooses, and what must hold at its end.

The faults come at random instants while a dispatcher works: it is killed, a job's process is killed, a stranger takes a
GPU, the driver fails, a GPU is lost, the disk is full, the clock is set, the machine is "restarted". After as many as
the seed wants, the queue is worked off in peace. Then the queue, the jobs' own account and the machine must agree.

The jobs' own account is kept without gpuherd: each takes a kernel lock of its own on every GPU that it was given, and
writes its start and its end into one common file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import ExitCode
from gpuherd.standin.machine import SimulatedMachine

_LAUNCHER = Path(__file__).with_name("launcher.py")
_PATIENCE_S = 90.0
_NVML_UNKNOWN = 999

# flock says 1 when another has the lock; killed by a fault before it could try, it says something else.
# "$1" name, "$2" common file, "$3" result, "$4" seconds, "$5" folder of the locks. Lines are short single writes.
_JOB = """
gpus=$CUDA_VISIBLE_DEVICES
if [ -n "$gpus" ]; then
    exec 8>"$5/${gpus%%,*}"
    flock -n 8; [ $? -ne 1 ] || echo "double $1 $gpus" >>"$2"
    exec 9>"$5/${gpus##*,}-second"
    case $gpus in *,*) exec 9>"$5/${gpus##*,}"; flock -n 9; [ $? -ne 1 ] || echo "double $1 $gpus" >>"$2" ;; esac
fi
echo "start $1 $gpus" >>"$2"
sleep "$4"
: >"$3"
echo "end $1 $gpus" >>"$2"
"""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run went. ``problems`` is empty when all held."""

    seed: int
    seconds: float
    dispatchers: int
    faults: Counter[str]
    problems: tuple[str, ...]


def one_run(seed: int, folder: Path, *, jobs: int = 50, small_disk: bool = True) -> Result:
    """Works a queue of ``jobs`` off in ``folder``, under the faults of ``seed``. Leaves nothing there but on problems.

    ``small_disk``: with the run folder on a small file system of its own, which can be filled. Only root can make one.
    """
    folder.mkdir(parents=True)
    began = time.monotonic()
    with _disk(folder / "disk", wanted=small_disk) as full:
        run = _Run(random.Random(seed), folder, jobs, can_fill=full)
        try:
            run.suffer()
            problems = run.problems()
        finally:
            run.end()
        if problems and full:
            shutil.copytree(run.root, folder / "kept", ignore=shutil.ignore_patterns("*.fifo"))
    if not problems:
        shutil.rmtree(folder)
    return Result(
        seed=seed,
        seconds=time.monotonic() - began,
        dispatchers=run.dispatchers,
        faults=run.faults,
        problems=tuple(problems),
    )


@contextlib.contextmanager
def _disk(folder: Path, *, wanted: bool) -> Iterator[bool]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "gpuherd-chaos", str(folder)]
    mounted = wanted and os.getuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


class _Run:
    """One queue, its machine, and the one who does harm to them."""

    def __init__(self, chance: random.Random, folder: Path, jobs: int, *, can_fill: bool):
        self.chance = chance
        self.folder = folder
        self.root = folder / "disk" / "run"
        self.events = folder / "events"
        self.locks = folder / "locks"
        self.locks.mkdir()
        (folder / "results").mkdir()
        self.machine = SimulatedMachine.create(folder / "machine", f"{chance.choice((2, 4, 8))}x40GB")
        for index, uuid in enumerate(self.machine.uuids):
            # Behind a broken GPU a job is told the UUID in place of the index: one file, one lock, two names.
            (self.locks / str(index)).touch()
            os.link(self.locks / str(index), self.locks / uuid)
        self.clock = folder / "clock"
        self.clock.write_bytes(struct.pack("d", 0.0))
        self.mark = f"GPUHERD_CHAOS={folder}"
        self.can_fill = can_fill
        self.faults: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.dispatchers = 0
        self.jobs = [self._job(number) for number in range(jobs)]
        self.plan = folder / "plan.json"
        self.plan.write_text(json.dumps(self._plan()))
        self.dispatcher: subprocess.Popen[bytes] | None = None
        self.told = folder / "told"

    def _job(self, number: int) -> dict[str, object]:
        chance, name = self.chance, f"j{number}"
        seconds = chance.choice((0, 0.01, 0.05, 0.15))
        words = [str(self.events), str(self._result(name)), str(seconds), str(self.locks)]
        return {
            "name": name,
            "argv": ["/bin/sh", "-c", _JOB, "job", name, *words],
            "gpus": chance.choice((0, 1, 1, 1, 1, 1, 1, 2)),
            "needs": [f"j{chance.randrange(number)}"] if number and chance.random() < 0.15 else [],
            "priority": chance.choice((0, 0, 0, 1)),
            "result": str(self._result(name)),
            "retries": 30,
        }

    def _plan(self) -> dict[str, object]:
        options = {"max_checks": 2, "check_interval": 0.02, "min_disk": 1}
        plan = {"jobs": self.jobs, "options": options, "root": str(self.root), "grace_s": 0.5}
        return {**plan, "clock": str(self.clock)}

    def _result(self, name: str) -> Path:
        return self.folder / "results" / name

    # --- the harm ---------------------------------------------------------------------------------------------

    def suffer(self) -> None:
        """Starts dispatchers and does harm, then lets the last one end in peace."""
        harms = {
            self._kill_dispatcher: 6,
            self._kill_worker: 3,
            self._stranger: 4,
            self._driver_error: 2,
            self._lose_gpu: 1,
            self._set_clock: 2,
            self._restart_machine: 1,
            self._fill_disk: 2 if self.can_fill else 0,
        }
        for _ in range(self.chance.randint(8, 16)):
            if not self._is_running():
                self._start()
            # The first tenths of a second are Python's own start.
            time.sleep(self.chance.uniform(0.05, 0.35))
            harm = self.chance.choices(list(harms), weights=list(harms.values()))[0]
            self.faults[harm.__name__.strip("_")] += 1
            harm()
        deadline = time.monotonic() + _PATIENCE_S
        code = None
        while code != 0 and time.monotonic() < deadline:
            if self.dispatcher is None:
                self._start()
            code = self._wait(deadline)
        if code != 0:
            self.wrong.append(f"the queue is not worked off after {_PATIENCE_S:g} s in peace (last exit code {code})")

    def _start(self) -> None:
        self.dispatchers += 1
        name, _, value = self.mark.partition("=")
        environment = {**os.environ, **self.machine.environment(), name: value}
        environment["GPUHERD_LEASE_DIR"] = str(self.folder / "leases")
        with self.told.open("ab") as told:
            self.dispatcher = subprocess.Popen(
                [sys.executable, str(_LAUNCHER), str(self.plan)], stdout=told, stderr=told, env=environment
            )

    def _is_running(self) -> bool:
        if self.dispatcher is None:
            return False
        if self.dispatcher.poll() is not None:
            self._note_code(self.dispatcher.returncode)
            self.dispatcher = None
        return self.dispatcher is not None

    def _wait(self, deadline: float) -> int | None:
        """The exit code of the dispatcher; None when it does not end."""
        assert self.dispatcher is not None
        try:
            code = self.dispatcher.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        self._note_code(code)
        self.dispatcher = None
        return code

    def _note_code(self, code: int) -> None:
        last = self.told.read_text(errors="replace").splitlines()[-1:]
        # On a full disk it may be that nothing can be done but to say so.
        said_so = self.faults["fill_disk"] and last and ("disk is full" in last[0] or "No space left" in last[0])
        if code not in (ExitCode.OK, -signal.SIGKILL) and not said_so:
            self.wrong.append(f"a dispatcher ended with exit code {code}: {last}")

    def _kill_dispatcher(self) -> None:
        if self._is_running():
            assert self.dispatcher is not None
            self.dispatcher.kill()
            self.dispatcher.wait()
            self.dispatcher = None

    def _kill_worker(self) -> None:
        if workers := self._workers():
            pid = self.chance.choice(workers)
            with contextlib.suppress(ProcessLookupError):
                if self.chance.random() < 0.5:
                    os.kill(pid, signal.SIGKILL)
                elif os.getpgid(pid) != os.getpgid(0):
                    os.killpg(os.getpgid(pid), signal.SIGKILL)

    def _stranger(self) -> None:
        gpu = self.chance.randrange(len(self.machine.uuids))
        with contextlib.suppress(Exception):  # somebody is there already, in memory: then there is no stranger
            self.machine.occupy(gpu, 20_000, until_s=self.chance.uniform(0.02, 0.4))

    def _driver_error(self) -> None:
        self.machine.fail(_NVML_UNKNOWN)
        time.sleep(self.chance.uniform(0.01, 0.6))
        self.machine.fail(None)

    def _lose_gpu(self) -> None:
        gpu = self.chance.randrange(len(self.machine.uuids))
        self.machine.lose(gpu)
        time.sleep(self.chance.uniform(0.02, 0.2))
        self.machine.restore(gpu)

    def _set_clock(self) -> None:
        with self.clock.open("r+b", buffering=0) as clock:  # in place: a reader may come at any instant
            clock.write(struct.pack("d", self.chance.choice((-86_400.0, -30.0, 0.0, 30.0, 86_400.0))))

    def _restart_machine(self) -> None:
        """All processes are gone, and the boot has another name than in the queue's rows."""
        self._kill_dispatcher()
        while workers := self._workers():
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        queue = self.root / "queue.sqlite"
        if queue.exists():
            with contextlib.closing(sqlite3.connect(queue)) as rows, contextlib.suppress(sqlite3.OperationalError):
                # (Killed so early that there are no tables yet.)
                rows.execute("UPDATE attempts SET boot = 'an earlier boot', pid = 1 WHERE state = 'running'")
                rows.commit()

    def _fill_disk(self) -> None:
        filler = self.folder / "disk" / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
        time.sleep(self.chance.uniform(0.02, 0.4))
        filler.unlink()

    # --- what must hold ---------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """What does not hold, now that all is over."""
        found = [*self.wrong]
        lines = [line.split() for line in self.events.read_text().splitlines()]
        found += [f"GPU held twice: {' '.join(line)}" for line in lines if line[0] == "double"]
        found += self._wrong_in_queue(lines)
        found += [f"no result of {job['name']}" for job in self.jobs if not self._result(str(job["name"])).exists()]
        deadline = time.monotonic() + 2
        while (left := self._workers()) and time.monotonic() < deadline:
            time.sleep(0.02)
        found += [f"process {pid} is left" for pid in left]
        found += [f"the lease {path.name} is held" for path in (self.folder / "leases").glob("*.lock") if _held(path)]
        if "Traceback" in self.told.read_text(errors="replace"):
            found.append("a dispatcher ended with a traceback")
        return found

    def _wrong_in_queue(self, lines: list[list[str]]) -> list[str]:
        starts = Counter(line[1] for line in lines if line[0] == "start")
        ends = Counter(line[1] for line in lines if line[0] == "end")
        found = []
        with contextlib.closing(sqlite3.connect(self.root / "queue.sqlite")) as rows:
            if rows.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
                found.append("the queue is damaged")
            states = dict(rows.execute("SELECT name, state FROM jobs"))
            attempts = Counter[tuple[str, bool]]()
            for name, state in rows.execute("SELECT j.name, a.state FROM attempts a JOIN jobs j ON j.id = a.job"):
                attempts[name, state == "done"] += 1
        for name in (str(job["name"]) for job in self.jobs):
            if states.get(name) != "done":
                found.append(f"{name} is {states.get(name, 'lost')}")
            if attempts[name, True] != 1:
                found.append(f"{name} succeeded {attempts[name, True]} times")
            # An attempt that was killed (or whose machine was restarted) may have come to its end before that.
            if not 1 <= ends[name] <= 1 + attempts[name, False]:
                found.append(f"{name} came to its end {ends[name]} times, {attempts[name, False]} attempts went wrong")
            if starts[name] > attempts[name, True] + attempts[name, False]:
                found.append(f"{name} was started {starts[name]} times, more often than the queue knows")
        return found

    def _workers(self) -> list[int]:
        """Every live process that our dispatchers started, also indirectly."""
        found = []
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit() or (self.dispatcher is not None and entry.name == str(self.dispatcher.pid)):
                continue
            with contextlib.suppress(OSError, IndexError):
                inherited = Path(entry.path, "environ").read_bytes().split(b"\0")
                if self.mark.encode() in inherited and _state(entry.path) not in "ZX":
                    found.append(int(entry.name))
        return found

    def end(self) -> None:
        """Leaves no process behind, whatever happened."""
        self._kill_dispatcher()
        for pid in self._workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _state(process: str) -> str:
    return Path(process, "stat").read_text().rpartition(")")[2].split()[0]


def _held(lock: Path) -> bool:
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
