"""Checks of a SLURM site: programs, controller, accounting, partitions. Pure but for ``find_slurm``."""

from __future__ import annotations

from collections.abc import Mapping

from gpuherd.checks import CheckResult, Status
from gpuherd.engines.base import EngineAway, EngineMissing
from gpuherd.engines.slurm import site
from gpuherd.engines.slurm.commands import Programs, missing_programs
from gpuherd.errors import GpuherdError

_MOST_PARTITIONS = 12


def find_slurm(programs: Programs) -> list[CheckResult]:
    """SLURM in as many lines as there is something to say."""
    missing = missing_programs()
    try:
        config = programs.config()
    except EngineMissing as problem:
        what = f"not here: {', '.join(missing)}" if missing else "the commands know no cluster"
        return [CheckResult("SLURM", Status.FAIL, what, str(problem))]
    except EngineAway as problem:
        remedy = "wait, or ask its administrator; submitted jobs go on meanwhile"
        return [CheckResult("SLURM", Status.FAIL, f"SLURM does not answer: {problem}", remedy)]
    if missing:
        remedy = "install all of SLURM's commands here, or submit jobs where they are"
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
        remedy = "jobs on GPUs can't be submitted; GresTypes=gpu and Gres= of the nodes are the administrator's"
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
