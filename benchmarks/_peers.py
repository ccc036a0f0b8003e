"""The peers of the dispatch benchmark: each runs the same commands in eight places, by its own usual means.

A peer is a function of a ``Task`` that returns when all commands have ended, with the CPU seconds that it cost (jobs
included), or raises ``Absent`` with a sentence when it is not installed. Peers from PyPI are looked for in a folder of
their own (``pip install --target FOLDER/<name> <name>``) and are no dependency of gpuherd.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PLACES = 8
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
FOLDER = Path(os.environ.get("GPUHERD_BENCH_PEERS", _CACHE / "gpuherd-bench-peers"))


class Absent(Exception):
    """This peer can't be run here; the text says why."""


@dataclass(frozen=True)
class Task:
    """``commands`` to run, and an empty folder to do it in."""

    commands: list[list[str]]
    folder: Path


def package(name: str) -> dict[str, str]:
    """The environment in which a peer's package can be imported."""
    place = FOLDER / name
    if not place.is_dir():
        raise Absent(f"not installed: pip install --target {place} {name}")
    return {**os.environ, "PYTHONPATH": str(place)}


def children_cpu(work: Callable[[], object]) -> float:
    """CPU seconds of all child processes that are started and waited for by ``work``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def script(code: str, task: Task, environment: Mapping[str, str] | None = None, limit_s: float = 300) -> float:
    """Runs a Python program that finds the commands in ``sys.argv[1]`` and the folder in ``sys.argv[2]``."""
    plan = task.folder / "plan.json"
    plan.write_text(json.dumps(task.commands))
    words = [sys.executable, "-c", code, str(plan), str(task.folder)]

    def work() -> None:
        done = subprocess.run(words, env=environment, cwd=task.folder, capture_output=True, text=True, timeout=limit_s)
        if done.returncode:
            raise Absent(f"it does not run here: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]}")

    return children_cpu(work)


def shell_words(command: list[str]) -> str:
    """A command of this benchmark as a line for a shell; its words hold nothing that a shell would read."""
    return " ".join(command)


# --- the plain loops: what a dispatcher can be at best ------------------------------------------------------------


def popen_threads(task: Task) -> float:
    """A thread for each GPU takes the next command and waits for it: no queue file, no lease, no look at the GPU."""
    waiting = iter(task.commands)
    lock = threading.Lock()

    def place(number: int) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(number)}
        while True:
            with lock:
                command = next(waiting, None)
            if command is None:
                return
            subprocess.Popen(command, env=environment).wait()

    threads = [threading.Thread(target=place, args=(number,)) for number in range(PLACES)]

    def work() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return _with_own(work)


def posix_spawn(task: Task) -> float:
    """One thread, ``posix_spawn``, and waiting for any child."""

    def work() -> None:
        places: dict[int, int] = {}
        free = list(range(PLACES))
        for command in task.commands:
            if not free:
                pid, _ = os.wait()
                free.append(places.pop(pid))
            place = free.pop()
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(place)}
            places[os.posix_spawn(command[0], command, environment)] = place
        while places:
            places.pop(os.wait()[0])

    return _with_own(work)


def _with_own(work: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF)
    children = children_cpu(work)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return children + after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# --- the peers ----------------------------------------------------------------------------------------------------


def simple_gpu_scheduler(task: Task) -> float:
    """It reads command lines and runs each by a shell on the next GPU."""
    environment = package("simple-gpu-scheduler")
    lines = "\n".join(map(shell_words, task.commands)) + "\n"
    code = "from simple_gpu_scheduler.scheduler import main; main()"
    words = [sys.executable, "-c", code, "--gpus", ",".join(map(str, range(PLACES)))]

    def work() -> None:
        subprocess.run(words, input=lines, text=True, env=environment, check=True, stdout=subprocess.DEVNULL)

    return children_cpu(work)


def gnu_parallel(task: Task) -> float:
    """Eight slots; the slot's number names the GPU."""
    if shutil.which("parallel") is None:
        raise Absent("not installed: apt-get install parallel")
    lines = "\n".join(map(shell_words, task.commands)) + "\n"
    words = ["parallel", "--will-cite", f"-j{PLACES}", "CUDA_VISIBLE_DEVICES=$(({%} - 1)) {}"]

    def work() -> None:
        # {} would quote the line as one word; --colsep takes it apart again.
        subprocess.run(
            [*words[:-1], "--colsep", " ", words[-1].replace("{}", "{1} {2} {3}")], input=lines, text=True, check=True
        )

    return children_cpu(work)


def task_spooler(task: Task) -> float:
    """The ``tsp`` of Debian (places, no GPUs): one call for each job, a server in the background."""
    program = shutil.which("tsp") or shutil.which("ts")
    if program is None or b"task" not in subprocess.run([program, "-h"], capture_output=True).stdout.lower():
        raise Absent("not installed: apt-get install task-spooler")
    environment = {**os.environ, "TS_SOCKET": str(task.folder / "socket"), "TS_MAXFINISHED": "5", "TMPDIR": "/tmp"}

    def call(*words: str) -> None:
        subprocess.run([program, *words], env=environment, check=True, stdout=subprocess.DEVNULL)

    def work() -> None:
        call("-S", str(PLACES))
        for command in task.commands:
            call("-n", *command)
        # It has no "wait for all": the last is waited for, then those that are still at work.
        while b"running" in subprocess.run([program], env=environment, capture_output=True).stdout:
            call("-w")

    cpu_s = children_cpu(work)
    server_s = _server_cpu(str(task.folder / "socket"))
    call("-K")
    return cpu_s + server_s


def _server_cpu(socket: str) -> float:
    """CPU seconds of the process that was started with this TS_SOCKET, and of its children."""
    wanted = f"TS_SOCKET={socket}".encode()
    total = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                total += sum(map(int, (path / "stat").read_text().rpartition(")")[2].split()[11:15]))
        except OSError:
            continue
    return total / os.sysconf("SC_CLK_TCK")


_HYPERQUEUE = """
import json, sys
from hyperqueue import Job
from hyperqueue.cluster import LocalCluster, WorkerConfig
commands = json.load(open(sys.argv[1]))
with LocalCluster() as cluster:
    cluster.start_worker(WorkerConfig(cores=8))
    client = cluster.client()
    job = Job()
    for command in commands:
        job.program(command, stdout=None, stderr=None)
    client.wait_for_jobs([client.submit(job)])
"""


def hyperqueue(task: Task) -> float:
    """Its Python interface with a local server and worker of eight cores (the wheel has no ``hq`` command)."""
    return script(_HYPERQUEUE, task, package("hyperqueue"), limit_s=120)


_RAY = """
import json, subprocess, sys
import ray
commands = json.load(open(sys.argv[1]))
ray.init(num_cpus=8, num_gpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
@ray.remote(num_gpus=1, num_cpus=1, max_calls=0)
def run(command):
    subprocess.run(command, check=True)
for _ in range(2):
    ray.get([run.remote(["/bin/sleep", "2"]) for _ in range(8)])  # its workers are there before the clock runs
ray.get([run.remote(command) for command in commands])
"""


def ray(task: Task) -> float:
    """Tasks with one GPU each that run the command, in workers that are used again (its fastest way)."""
    environment = {**package("ray"), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # its sockets' names have to be short
        return script(_RAY.replace("num_gpus=8,", f"num_gpus=8, _temp_dir={short!r},"), task, environment)


PEERS: dict[str, Callable[[Task], float]] = {
    "popen_threads": popen_threads,
    "posix_spawn": posix_spawn,
    "simple_gpu_scheduler": simple_gpu_scheduler,
    "gnu_parallel": gnu_parallel,
    "task_spooler": task_spooler,
    "hyperqueue": hyperqueue,
    "ray": ray,
}
