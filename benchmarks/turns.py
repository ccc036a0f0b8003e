"""Turns between users: what 2 to 50 gpuherds that wait cost the machine, and how the shares come out.

*Waiting*: gpuherds of as many users wait for eight stand-in GPUs that are in use, each with a ticket. Figures are their
CPU time by the kernel's account, beside the same number of waiting gpuherds with turns switched off by the policy, and
with everybody being one user (nobody to take turns with). *Deciding*: the time of one look at all tickets, and of one
decision by them, in one process. *Shares*: three users with weights 2, 1 and 1 and many short jobs on four GPUs: GPU
time by the account of the jobs. The users have uids of their own where root runs this.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpuherd.standin.driver import library_folder
from gpuherd.standin.machine import SimulatedMachine

GPUS = 8
_FIRST_UID = 52_000
_WEIGHTS = {_FIRST_UID: 2, _FIRST_UID + 1: 1, _FIRST_UID + 2: 1}

# A waiting ``gpuherd run``: argv is the uid or "", and seconds. Prints CPU seconds of the second half of that time.
_WAITER = """
import ctypes, difflib, encodings.ascii, encodings.utf_8, getpass, hashlib, importlib, os, pkgutil, psutil, pwd
import resource, statistics, sys, tempfile, threading, time, tomllib
for package in ("gpuherd.gpus", "gpuherd.jobs", "gpuherd.jobs.gpu", "gpuherd.jobs.scheduler", "gpuherd.ledger"):
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
from gpuherd.batch.options import RunOptions
from gpuherd.batch.run import NoGpuFree, Waiter
from gpuherd.jobs.settings import load
from gpuherd.standin import driver
driver.load()
if sys.argv[1]:
    uid = int(sys.argv[1])
    os.setgroups([]), os.setgid(uid), os.setuid(uid)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
waits_s, cpu_s = float(sys.argv[2]), []
def used():
    got = resource.getrusage(resource.RUSAGE_SELF)
    return got.ru_utime + got.ru_stime
def half():
    cpu_s.append(used())
timer = threading.Timer(waits_s / 2, half)
timer.start()
try:
    Waiter(RunOptions(num_gpus=1, wait=waits_s), lambda text: None, load()).take()
except NoGpuFree:
    print((used() - cpu_s[0]) / (waits_s / 2))
"""

# argv: user, file, seconds.
_JOB = (
    'echo "start $1 $CUDA_VISIBLE_DEVICES $(date +%s.%N)" >>"$2"; sleep "$3";'
    ' echo "end $1 $CUDA_VISIBLE_DEVICES $(date +%s.%N)" >>"$2"'
)
_DISPATCHER = """
import ctypes, difflib, encodings.ascii, encodings.utf_8, getpass, hashlib, importlib, json, os, pkgutil, psutil, pwd
import statistics, sys, tempfile, tomllib
from pathlib import Path
for package in ("gpuherd.gpus", "gpuherd.engines", "gpuherd.jobs", "gpuherd.ledger"):
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
from gpuherd.jobs import GpuOptions, Job, RunDirectory, run_jobs
from gpuherd.standin import driver
driver.load()
plan = json.loads(Path(sys.argv[1]).read_text())
if os.getuid() == 0:
    os.setgroups([]), os.setgid(plan["uid"]), os.setuid(plan["uid"])
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
    os.environ["HOME"] = plan["root"]
jobs = [Job(name=f"j{i}", argv=tuple(plan["argv"])) for i in range(plan["jobs"])]
sys.exit(run_jobs(jobs, GpuOptions(max_checks=2, check_interval=0.05), RunDirectory(plan["root"])).exit_code)
"""


def run(*, quick: bool) -> dict[str, Any]:
    """All figures."""
    sizes = (2, 5) if quick else (2, 5, 10, 20, 50)
    waits_s = 6.0 if quick else 40.0
    return {
        "waiting": [_waiting(count, waits_s) for count in sizes],
        "deciding": [_deciding(count, 20 if quick else 500) for count in (2, 10, 50)],
        "shares": _shares(10 if quick else 60, 0.5 if quick else 1.0),
    }


# --- waiting ----------------------------------------------------------------------------------------------------------


def _waiting(count: int, waits_s: float) -> dict[str, Any]:
    """CPU of ``count`` waiting gpuherds, each, in thousandths of a core: with turns, without, and of one user."""
    figures = {
        "turns": _cpu_shares(count, waits_s, "", own_uids=True),
        "turns_off": _cpu_shares(count, waits_s, "[turns]\nenabled = false\n", own_uids=True),
        "one_user": _cpu_shares(count, waits_s, "", own_uids=False),
    }
    return {"gpuherds": count} | {
        f"{name}_cpu_each_permille": round(1000 * statistics.mean(found), 3) for name, found in figures.items()
    }


def _cpu_shares(count: int, waits_s: float, policy: str, *, own_uids: bool) -> list[float]:
    with _Place(policy) as place:
        machine = place.machine(f"{GPUS}x40GB")
        for gpu in range(GPUS):
            machine.occupy(gpu, 30_000)
        uids = [str(_FIRST_UID + number) if own_uids and os.getuid() == 0 else "" for number in range(count)]
        words = [[sys.executable, "-c", _WAITER, uid, str(waits_s)] for uid in uids]
        running = [subprocess.Popen(each, env=place.environment, stdout=subprocess.PIPE, text=True) for each in words]
        return [float(process.communicate(timeout=waits_s + 300)[0]) for process in running]


# --- deciding ---------------------------------------------------------------------------------------------------------


def _deciding(count: int, times: int) -> dict[str, Any]:
    """Milliseconds of one look at the tickets of so many users, and of one decision by them: medians."""
    from gpuherd.gpus.tickets import TicketReader
    from gpuherd.gpus.turns import Load, assign
    from gpuherd.jobs import clock

    with _Place("") as place, ExitStack() as held:
        folder = place.path / "lock"
        uuids = [f"GPU-{number:036d}" for number in range(GPUS)]
        for number in range(count):
            uid = _FIRST_UID + number if os.getuid() == 0 else os.getuid()
            path = folder / f"{uid}.{number + 1}.0.ticket"
            path.write_text(json.dumps({"gpus": 4, "smallest": 1 + number % 4, "since": 1.0, "usable": uuids}))
            os.chown(path, uid, uid)
            file = held.enter_context(path.open("rb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        reader, looks, decisions = TicketReader(), [], []
        for _ in range(times):
            began = time.perf_counter()
            tickets = reader.read(folder, clock.mono())
            looks.append(time.perf_counter() - began)
            loads = {ticket.uid: Load(used_s=float(ticket.uid % 7)) for ticket in tickets}
            began = time.perf_counter()
            assign(dict.fromkeys(uuids, clock.mono()), tickets, loads, now=clock.mono(), me=tickets[-1].key)
            decisions.append(time.perf_counter() - began)
        return {
            "tickets": len(tickets),
            "look_ms": round(1000 * statistics.median(looks), 3),
            "decision_ms": round(1000 * statistics.median(decisions), 3),
        }


# --- shares -----------------------------------------------------------------------------------------------------------


def _shares(jobs: int, seconds: float) -> dict[str, Any]:
    """The share of GPU time of each of three users, while all of them have jobs that wait."""
    users = "".join(f'[users."uid {uid}"]\nweight = {weight}\n' for uid, weight in _WEIGHTS.items())
    with _Place(f'[turns]\ngrace = "3s"\nslice = "500ms"\n{users}') as place:
        place.machine("4x40GB")
        events = place.path / "events"
        events.touch()
        events.chmod(0o666)
        running = []
        for uid, weight in _WEIGHTS.items():
            root = place.path / str(uid)
            root.mkdir()
            if os.getuid() == 0:
                os.chown(root, uid, uid)
            argv = ["/bin/sh", "-c", _JOB, "job", str(uid), str(events), str(seconds)]
            plan = {"uid": uid, "argv": argv, "jobs": jobs * weight, "root": str(root / "run")}
            file = place.path / f"{uid}.json"
            file.write_text(json.dumps(plan))
            words = [sys.executable, "-c", _DISPATCHER, str(file)]
            running.append(subprocess.Popen(words, env=place.environment, stdout=subprocess.DEVNULL))
        codes = [process.wait(timeout=600) for process in running]
        return {"users": len(_WEIGHTS), "jobs": jobs * 4, "job_s": seconds, "exit_codes": codes} | _by_user(events)


def _by_user(events: Path) -> dict[str, Any]:
    began: dict[tuple[str, str], float] = {}
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in events.read_text(encoding="ascii").splitlines():
        kind, user, gpu, at = line.split()
        if kind == "start":
            began[user, gpu] = float(at)
        else:
            spans[user].append((began.pop((user, gpu)), float(at)))
    begin = max(min(since for since, _ in mine) for mine in spans.values())
    end = min(max(since for since, _ in mine) for mine in spans.values())
    used = {
        user: sum(max(0.0, min(until, end) - max(since, begin)) for since, until in mine)
        for user, mine in spans.items()
    }
    total, weights = sum(used.values()), sum(_WEIGHTS.values())
    shares = {user: round(seconds / total, 4) for user, seconds in sorted(used.items())}
    off = max(abs(shares[str(uid)] - weight / weights) for uid, weight in _WEIGHTS.items())
    return {"shares": shares, "largest_difference": round(off, 4), "gpus_in_use": round(total / (end - begin), 3)}


class _Place:
    """A folder that all users can get at, with leases, policy and machine of its own."""

    def __init__(self, policy: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="gpuherd-turns-"))
        self.path.chmod(0o755)
        for name in ("lock", "shared"):
            (self.path / name).mkdir()
            (self.path / name).chmod(0o1777)
        (self.path / "policy.toml").write_text(policy)
        self.environment = dict(os.environ) | {
            "GPUHERD_LEASE_DIR": str(self.path / "lock"),
            "GPUHERD_MACHINE_DIR": str(self.path / "shared"),
            "GPUHERD_POLICY": str(self.path / "policy.toml"),
            "XDG_CONFIG_HOME": str(self.path / "config"),
        }

    def machine(self, spec: str) -> SimulatedMachine:
        """Stand-in GPUs that all processes with this environment see."""
        machine = SimulatedMachine.create(self.path / "machine", spec)
        machine.path.chmod(0o666)
        library_folder()  # built by us, before users come who can't
        self.environment |= machine.environment()
        return machine

    def __enter__(self) -> _Place:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
