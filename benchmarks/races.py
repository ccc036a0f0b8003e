"""Many who choose GPUs at once: how often is a GPU given to two?

Two races, both on stand-in GPUs. *Choosers*: eight processes begin together on eight free GPUs, each with one job that
takes 50 of 80 GB only a second later, as real programs do; whoever looks at memory alone puts them all on one GPU.
*Dispatchers*: sixteen users, each a dispatcher with a queue of its own, share eight GPUs over many short jobs, while
dispatchers are killed at random and started again. The users have uids of their own where root runs this.

A double is seen without gpuherd: each job takes a kernel lock of its own on every GPU that it was given.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from gpuherd.standin.driver import compiler, library_folder
from gpuherd.standin.machine import SimulatedMachine

GPUS = 8
USERS = 16
_FIRST_UID = 52_000

# argv: folder of the locks, common file, seconds. Writes "double <GPU>" when another job has a GPU of ours, "ran" else.
_RACER = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>
int main(int argc, char **argv) {
    if (argc < 4) return 64;
    char path[4096], line[80] = "ran\n", *gpus = strdup(getenv("CUDA_VISIBLE_DEVICES"));
    for (char *gpu = strtok(gpus, ","); gpu; gpu = strtok(NULL, ",")) {
        snprintf(path, sizeof path, "%s/%s", argv[1], gpu);
        int lock = open(path, O_RDWR);
        if (lock < 0) return 73;
        if (flock(lock, LOCK_EX | LOCK_NB)) snprintf(line, sizeof line, "double %.40s\n", gpu);
    }
    double seconds = atof(argv[3]);
    struct timespec wait = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&wait, NULL);
    int file = open(argv[2], O_WRONLY | O_APPEND);
    return file < 0 || write(file, line, strlen(line)) < 0 ? 74 : 0;
}
"""

# Another user may not be let into our folder of Python: all that is imported late must be in before.
_DISPATCHER = """
import ctypes, importlib, json, os, pkgutil, sys
from pathlib import Path
import difflib, encodings.ascii, encodings.utf_8, getpass, hashlib, psutil, pwd, statistics, tempfile
for package in ("gpuherd.gpus", "gpuherd.engines", "gpuherd.jobs"):
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
from gpuherd.jobs import Job, RunDirectory, run_jobs
from gpuherd.jobs.options import DispatchOptions
from gpuherd.standin import driver
driver.load()
plan = json.loads(Path(sys.argv[1]).read_text())
if plan["uid"] is not None:
    os.setgroups([]), os.setgid(plan["uid"]), os.setuid(plan["uid"])
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, which a change of user takes away and exec gives back
    os.environ["HOME"] = plan["root"]
jobs = [Job(name=f"job-{i}", argv=tuple(plan["argv"]), gpus=1, retries=20) for i in range(plan["jobs"])]
sys.exit(run_jobs(jobs, DispatchOptions(**plan["options"]), RunDirectory(plan["root"])).exit_code)
"""


def run(*, quick: bool) -> dict[str, Any]:
    """Both races."""
    return {
        "choosers": choosers(rounds=1 if quick else 10),
        "dispatchers": dispatchers(jobs=1_600 if quick else 100_000, seed=1),
    }


def choosers(*, rounds: int) -> dict[str, Any]:
    """Eight processes at once, one job each, eight free GPUs: all should run, none out of memory."""
    codes: Counter[int] = Counter()
    again = 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="gpuherd-races-") as name:
            folder = Path(name)
            machine = SimulatedMachine.create(folder / "machine", f"{GPUS}x80GB")
            environment = _environment(machine, folder / "leases")
            job = [sys.executable, "-m", "gpuherd.standin.job", "--memory-mb", "50000", "--ramp", "1", "--hold", "1"]
            options = {"max_checks": 2, "check_interval": 0.05, "max_gpus": 1}
            running = []
            for number in range(GPUS):
                plan = {"uid": None, "jobs": 1, "argv": job, "options": options, "root": str(folder / str(number))}
                (folder / f"{number}.json").write_text(json.dumps(plan))
                words = [sys.executable, "-c", _DISPATCHER, str(folder / f"{number}.json")]
                running.append(subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL))
            codes.update(process.wait(timeout=120) for process in running)
            # A second log of a job is that of a second try: its first was out of memory.
            again += sum(path.name.endswith(".2.log") for path in folder.glob("*/logs/*"))
    return {"rounds": rounds, "choosers": GPUS, "ended_well": codes[0] - again, "out_of_memory": again}


def dispatchers(*, jobs: int, seed: int) -> dict[str, Any]:
    """Sixteen dispatchers over ``jobs`` jobs of up to 4 ms in all, killed at random and started again."""
    place = Path(tempfile.mkdtemp(prefix="gpuherd-races-"))
    try:
        return _Race(place, jobs, random.Random(seed)).run()
    finally:
        shutil.rmtree(place)


class _Race:
    """The sixteen users and the machine that they share."""

    def __init__(self, place: Path, jobs: int, chance: random.Random):
        self._place = place
        self._chance = chance
        self._each = jobs // USERS
        self._kills = 0
        self._failed: list[str] = []
        place.chmod(0o755)
        self._locks, self._events = place / "locks", place / "events"
        for folder, mode in ((self._locks, 0o755), (place / "lock", 0o1777)):
            folder.mkdir()
            folder.chmod(mode)
        for file in (self._events, *(self._locks / str(gpu) for gpu in range(GPUS))):
            file.touch()
            file.chmod(0o666)
        machine = SimulatedMachine.create(place / "machine", f"{GPUS}x40GB")
        machine.path.chmod(0o666)
        for index, uuid in enumerate(machine.uuids):
            os.link(self._locks / str(index), self._locks / uuid)  # one lock by both names that a job may be told
        self._environment = _environment(machine, place / "lock" / "gpuherd")
        self._program = _compile(place)

    def run(self) -> dict[str, Any]:
        """All of them until every queue is worked off."""
        began = time.monotonic()
        seeds = [self._chance.random() for _ in range(USERS)]
        users = [threading.Thread(target=self._user, args=(number, seed)) for number, seed in enumerate(seeds)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        lines = Counter(line.split()[0] for line in self._events.read_text().splitlines())
        return {
            "dispatchers": USERS,
            "users": USERS if os.getuid() == 0 else 1,
            "jobs": self._each * USERS,
            "ran": lines["ran"] + lines["double"],
            "doubles": lines["double"],
            "dispatchers_killed": self._kills,
            "problems": self._failed,
            "seconds": time.monotonic() - began,
        }

    def _user(self, number: int, seed: float) -> None:
        chance = random.Random(seed)
        root = self._place / f"user{number}"
        root.mkdir()
        uid = _FIRST_UID + number if os.getuid() == 0 else None
        if uid is not None:
            os.chown(root, uid, uid)
        plan = self._place / f"{number}.json"
        options = {"max_checks": 1, "check_interval": 0.02, "max_gpus": 4, "min_disk": 0}
        argv = [self._program, str(self._locks), str(self._events), f"{chance.uniform(0, 0.004):.4f}"]
        plan.write_text(
            json.dumps({"uid": uid, "jobs": self._each, "argv": argv, "options": options, "root": str(root / "run")})
        )
        plan.chmod(0o644)
        # To the end of its queue: what is done stays done, so that also those with much to do come to theirs.
        while True:
            code = self._dispatcher(plan, root, chance.choice((0.5, 1.0, 3.0, 10.0, 30.0, 60.0)))
            if code == 0:
                return
            if code != -9:
                self._failed.append(f"user {number}: exit code {code}; {(root / 'told').read_text()[-300:]}")
                return

    def _dispatcher(self, plan: Path, root: Path, lives_s: float) -> int:
        with (root / "told").open("ab") as told:
            words = [sys.executable, "-c", _DISPATCHER, str(plan)]
            process = subprocess.Popen(words, env=self._environment, stdout=told, stderr=told)
        try:
            return process.wait(lives_s)
        except subprocess.TimeoutExpired:
            process.kill()
            self._kills += 1
            return process.wait()


def _environment(machine: SimulatedMachine, leases: Path) -> dict[str, str]:
    return {**os.environ, **machine.environment(), "GPUHERD_LEASE_DIR": str(leases)}


def _compile(folder: Path) -> str:
    words = compiler()
    if words is None:
        raise SystemExit("this benchmark needs a C compiler (cc, gcc, clang or the ziglang wheel)")
    library_folder()  # built by us, before users come who can't
    (folder / "racer.c").write_text(_RACER)
    subprocess.run([*words, "-O2", "-o", str(folder / "racer"), str(folder / "racer.c")], check=True)
    return str(folder / "racer")
