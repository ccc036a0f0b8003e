"""Steps of an experiment become jobs of a queue."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuherd.jobs.job import Job
from gpuherd.models.load.jobs import HEARTBEAT_S
from gpuherd.posttrain.eval.results import RESULT
from gpuherd.posttrain.runs.folder import RoundsDirectory
from gpuherd.posttrain.runs.memory import Asked
from gpuherd.posttrain.runs.plan import Phase, Step
from gpuherd.posttrain.runs.priority import Priority, description_of

WORKER = "gpuherd.posttrain.runs.worker"


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step with what its job asks for."""

    step: Step
    asked: Asked
    priority: int


def planned(steps: Sequence[Step], asked: Sequence[Asked], priority: Priority, rounds: int) -> list[PlannedStep]:
    """The steps with their priorities. Raises what the priority function raises."""
    return [
        PlannedStep(step, each, priority(description_of(step, rounds))) for step, each in zip(steps, asked, strict=True)
    ]


def result_of(step: Step, folder: RoundsDirectory) -> Path:
    """The file that is there when a step is done."""
    number = -1 if step.round is None else step.round
    if step.phase is Phase.COLLECT:
        return folder.rows_done(folder.data(step.algorithm, step.dataset, step.family, number), step.shard)
    if step.phase is Phase.TRAIN:
        return folder.policy(folder.model(step.algorithm, step.dataset, step.family, number))
    return (
        folder.result(step.algorithm, step.family, step.dataset, step.round, step.evaluated_on or step.dataset) / RESULT
    )


def make_jobs(
    plan: Sequence[PlannedStep],
    folder: RoundsDirectory,
    *,
    identity: str,
    cwd: str,
    retries: int = 1,
    heartbeat_s: float | None = None,
    share: bool = False,
    simulate: bool = False,
) -> list[Job]:
    """A job for each step. Jobs that a killed run has finished stay done while their results are there."""
    return [
        Job(
            name=each.step.name,
            argv=(
                *(sys.executable, "-P", "-m", WORKER, "--folder", str(folder.root), "--job", each.step.name),
                *(["--simulate"] if simulate else []),
            ),
            gpus=each.asked.gpus,
            memory_mb=each.asked.memory_mb,
            share=share,
            priority=each.priority,
            needs=each.step.needs,
            family=f"{each.step.algorithm} {each.step.dataset} {each.step.family} {each.step.phase}",
            heartbeat_s=heartbeat_s or HEARTBEAT_S,
            retries=retries,
            cwd=cwd,
            result=str(result_of(each.step, folder)),
            identity=json.dumps([identity, each.step.name, each.step.shards]),
        )
        for each in plan
    ]
