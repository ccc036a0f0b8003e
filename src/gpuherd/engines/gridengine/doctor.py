"""Checks of a Grid Engine site: programs, sge_qmaster, queues, GPUs, parallel environments, accounting."""

from __future__ import annotations

from gpuherd.checks import CheckResult, Status
from gpuherd.engines.base import EngineAway, EngineMissing
from gpuherd.engines.gridengine import parse
from gpuherd.engines.gridengine.commands import Programs, missing_programs
from gpuherd.engines.gridengine.options import GridEngineOptions

_MOST_NAMES = 12


def find_grid_engine(options: GridEngineOptions) -> list[CheckResult]:
    """Grid Engine in as many lines as there is something to say."""
    name, programs, missing = "Grid Engine", Programs(), missing_programs()
    try:
        queues = programs.show("-sql").split()
        resources = parse.complexes(programs.show("-sc"))
        environments = programs.show("-spl").split()
    except EngineMissing as problem:
        what = f"not here: {', '.join(missing)}" if missing else "the commands know no cluster"
        return [CheckResult(name, Status.FAIL, what, str(problem))]
    except EngineAway as problem:
        remedy = "wait, or ask its administrator; submitted jobs go on meanwhile"
        return [CheckResult(name, Status.FAIL, f"Grid Engine does not answer: {problem}", remedy)]
    if missing:
        remedy = "install all of Grid Engine's commands here, or submit jobs where they are"
        return [CheckResult(name, Status.FAIL, f"not here: {', '.join(missing)}", remedy)]
    shown = ", ".join(queues[:_MOST_NAMES]) + (" and more" if len(queues) > _MOST_NAMES else "")
    if queues:
        found = [CheckResult(name, Status.OK, f"sge_qmaster answers; queues: {shown}")]
    else:
        found = [CheckResult(name, Status.FAIL, "it has no queue", "its administrator makes them with qconf -aq")]
    return [*found, _gpus(resources.get(options.sge_gpu), options.sge_gpu), _environments(environments), _accounts()]


def _gpus(found: parse.Complex | None, name: str) -> CheckResult:
    title = "Grid Engine GPUs"
    if found is None:
        remedy = "name the resource that `qconf -sc` lists by --sge-gpu; without one only jobs without GPUs can run"
        return CheckResult(title, Status.WARN, f"there is no resource {name}", remedy)
    counted = {"YES": "by slot", "JOB": "once for a job"}.get(found.consumable)
    if counted is None:
        remedy = "its administrator can make it consumable (qconf -mc), so that no two jobs get one GPU"
        return CheckResult(title, Status.WARN, f"the resource {name} is not counted (consumable NO)", remedy)
    return CheckResult(title, Status.OK, f"jobs request them by -l {name}=N, counted {counted}")


def _environments(names: list[str]) -> CheckResult:
    title = "Grid Engine parallel environments"
    if names:
        return CheckResult(title, Status.OK, ", ".join(names[:_MOST_NAMES]))
    remedy = "jobs with several CPU cores or nodes can't be submitted; its administrator makes them with qconf -ap"
    return CheckResult(title, Status.WARN, "there are none", remedy)


def _accounts() -> CheckResult:
    title = "Grid Engine accounting"
    try:
        readable = Programs().qacct("gpuherd-doctor") is not None
    except (EngineAway, EngineMissing):
        readable = False
    if readable:
        return CheckResult(title, Status.OK, "qacct says how jobs have ended")
    remedy = "jobs run all the same and report their own ends; only its administrator can share common/accounting"
    return CheckResult(title, Status.WARN, "qacct can't read it here: who deleted a job is not known", remedy)
