"""Looks at the engines beyond this machine: SLURM's programs, controller, accounting, partitions; Ray and its cluster;
and whether other nodes can see the folder that one stands in. Judging is pure; the ``find_`` functions look.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuherd.doctor.checks import CheckResult, Status, installed
from gpuherd.doctor.child import ask
from gpuherd.engines.base import EngineAway, EngineMissing
from gpuherd.engines.slurm import site
from gpuherd.engines.slurm.commands import Programs
from gpuherd.errors import GpuherdError
from gpuherd.jobs.one_host import kind_of, may_be_shared

PROGRAMS = ("sbatch", "squeue", "scontrol", "sinfo", "scancel")
_GET_RAY = "pip install 'gpuherd[ray]'"
_RAY_WITHIN_S = 60.0
_MOST_PARTITIONS = 12


def find_engines() -> CheckResult:
    """What of them is installed, in one line: for whoever has not asked for more."""
    slurm = all(shutil.which(name) is not None for name in PROGRAMS)
    ray = installed(["ray"])["ray"]
    there = [*(["SLURM's programs"] if slurm else []), *([f"Ray {ray}"] if ray else [])]
    if not there:
        return CheckResult("clusters", Status.SKIP, "neither SLURM nor Ray is here", "needed for --engine only")
    names = " --engine ".join([*(["slurm"] if slurm else []), *(["ray"] if ray else [])])
    remedy = f"gpuherd doctor --engine {names.partition(' ')[0]} looks at it"
    return CheckResult("clusters", Status.SKIP, f"{' and '.join(there)}: not looked at", remedy)


def find_slurm(programs: Programs) -> list[CheckResult]:
    """SLURM in as many lines as there is something to say."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    try:
        config = programs.config()
    except EngineMissing as problem:
        what = f"not here: {', '.join(missing)}" if missing else "the commands know no cluster"
        return [CheckResult("SLURM", Status.FAIL, what, str(problem))]
    except EngineAway as problem:
        remedy = "wait, or ask its administrator; what was handed over goes on meanwhile"
        return [CheckResult("SLURM", Status.FAIL, f"SLURM does not answer: {problem}", remedy)]
    if missing:
        remedy = "install all of SLURM's commands here, or hand jobs over where they are"
        return [CheckResult("SLURM", Status.FAIL, f"not here: {', '.join(missing)}", remedy)]
    results = [controller(config), accounting(config)]
    try:
        results.append(partitions(site.partitions(programs.nodes(), programs.partitions())))
    except GpuherdError as problem:
        results.append(CheckResult("SLURM partitions", Status.FAIL, str(problem), "see sinfo"))
    return results


def controller(config: str) -> CheckResult:
    """Judges that the controller has answered with this."""
    pairs = [line.partition("=") for line in config.splitlines()]
    values = {key.strip(): value.strip() for key, _, value in pairs}
    name, version = values.get("ClusterName", "?"), values.get("SLURM_VERSION", "?")
    return CheckResult("SLURM", Status.OK, f"cluster {name}, SLURM {version}; its controller answers")


def accounting(config: str) -> CheckResult:
    """Judges whether jobs are remembered after their end."""
    if site.settings(config).accounting:
        return CheckResult("SLURM accounting", Status.OK, "sacct tells how jobs have ended")
    detail = "switched off: who ended a job, and how, is forgotten some minutes after its end (MinJobAge)"
    remedy = "jobs run all the same, and tell their own ends; accounting (slurmdbd) is the administrator's to switch on"
    return CheckResult("SLURM accounting", Status.WARN, detail, remedy)


def partitions(found: Mapping[str, site.Partition]) -> CheckResult:
    """Judges whether there are GPUs to be had, and tells where."""
    name = "SLURM partitions"
    if not found:
        return CheckResult(name, Status.FAIL, "this user sees none", "ask its administrator for one")
    told = [_partition(each) for each in found.values()]
    more = f" and {len(told) - _MOST_PARTITIONS} more" if len(told) > _MOST_PARTITIONS else ""
    detail = "; ".join(told[:_MOST_PARTITIONS]) + more
    if not any(node.count(None) for each in found.values() for node in each.nodes):
        remedy = "jobs on GPUs can't be handed over; GresTypes=gpu and Gres= of the nodes are the administrator's"
        return CheckResult(name, Status.WARN, f"{detail}; no node has a GPU that SLURM knows", remedy)
    if not any(each.default for each in found.values()):
        return CheckResult(name, Status.WARN, f"{detail}; none is the default", "name one with --partition")
    return CheckResult(name, Status.OK, detail)


def _partition(found: site.Partition) -> str:
    counts: dict[str, int] = {}
    for node in found.nodes:
        for kind, number in node.gpus.items():
            counts[kind or "GPU"] = counts.get(kind or "GPU", 0) + number
    gpus = " + ".join(f"{number} {kind}" for kind, number in counts.items()) or "no GPUs"
    nodes = f"{len(found.nodes)} node{'s' if len(found.nodes) != 1 else ''}"
    marks = ", ".join([*(["default"] if found.default else []), *([found.state] if found.state != "up" else [])])
    return f"{found.name}{f' ({marks})' if marks else ''}: {nodes}, {gpus}"


def find_folder(folder: Path, engine: str) -> CheckResult:
    """Judges whether the nodes can see this folder. On one machine, as in a test, any folder will do."""
    return folder_on(folder, kind_of(folder), engine)


def folder_on(folder: Path, kind: str, engine: str) -> CheckResult:
    """The same, by the kind of its file system."""
    name = "shared folder"
    if kind and not may_be_shared(kind):
        remedy = f"--engine {engine} wants its --output-dir on a file system that all nodes have at the same place"
        return CheckResult(name, Status.WARN, f"{folder} is on {kind}, which only this machine sees", remedy)
    if not kind:
        return CheckResult(name, Status.WARN, f"what {folder} lies on is not known", "see findmnt")
    detail = f"{folder} is on {kind}; its queue is opened on one machine at a time"
    return CheckResult(name, Status.OK, detail)


def queues_on(folder: Path, kind: str) -> list[CheckResult]:
    """A word on the queues of runs here where other machines may see them; none where they don't."""
    if not kind or not may_be_shared(kind):
        return []
    detail = f"{folder} is on {kind}, which other machines may see: a queue here is opened on one machine at a time"
    remedy = "look at a run on the machine that works on it; or give it an --output-dir on a disk of its own"
    return [CheckResult("queues", Status.WARN, detail, remedy)]


def find_ray(word: str | None) -> list[CheckResult]:
    """Ray and the cluster that is meant by this --ray-address."""
    version = installed(["ray"])["ray"]
    if version is None:
        return [CheckResult("Ray", Status.FAIL, "not installed", _GET_RAY)]
    from gpuherd.engines.ray.messages import Kind, answers, resolve

    here = CheckResult("Ray", Status.OK, f"Ray {version}")
    try:
        address = resolve(word, os.environ)
    except GpuherdError as problem:
        return [here, CheckResult("Ray cluster", Status.FAIL, str(problem), "give --ray-address as it says")]
    if address.kind is Kind.OWN:
        detail = "none runs here; gpuherd starts one on this machine for as long as it works"
        return [here, CheckResult("Ray cluster", Status.SKIP, detail, "ray start --head, or --ray-address of another")]
    place = address.text.partition("://")[2].partition("/")[0] if address.kind is Kind.SERVER else address.text
    if address.kind is Kind.SERVER and ":" not in place:
        place += ":443" if address.text.startswith("https") else ":80"
    if not answers(place):
        remedy = "ray start --head starts one; a remote one is reached by its job server, http://HOST:8265"
        return [here, CheckResult("Ray cluster", Status.FAIL, f"nobody answers at {address.text}", remedy)]
    if address.kind is Kind.SERVER:
        return [here, CheckResult("Ray cluster", Status.OK, f"a job server answers at {address.text}")]
    answer = ask("gpuherd.doctor.ray_cluster", [address.text], environment={}, timeout_s=_RAY_WITHIN_S)
    return [here, ray_cluster(address.text, answer.values, answer.error)]


def ray_cluster(address: str, told: Mapping[str, Any], error: str | None) -> CheckResult:
    """Judges what a process found that has joined the cluster (``gpuherd.doctor.ray_cluster``)."""
    problem = error or told.get("error")
    if problem is not None:
        remedy = "both need the same versions of Ray and Python; see ray status on the cluster"
        return CheckResult("Ray cluster", Status.FAIL, f"{address}: {problem}", remedy)
    nodes = f"{told['nodes']} node{'s' if told['nodes'] != 1 else ''}"
    detail = f"{address}: {nodes}, {told['gpus']:g} GPUs, {told['cpus']:g} cores"
    if not told["gpus"]:
        remedy = "ray start --num-gpus N on the nodes that have some, if jobs want GPUs"
        return CheckResult("Ray cluster", Status.WARN, detail, remedy)
    return CheckResult("Ray cluster", Status.OK, detail)
