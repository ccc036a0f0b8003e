"""What a training takes on the GPUs that clusters and clouds usually have. Pure; ``usual`` does it for answers."""

from __future__ import annotations

from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.kinds import Kind
from gpuherd.models.plan.training import make_training_plan
from gpuherd.models.plan.training_job import Strategy, TrainingJob
from gpuherd.models.plan.training_result import TrainingPlan
from gpuherd.models.plan.usual import MOST_GPUS, usual_cards, usual_kinds
from gpuherd.models.plan.workload import Reserve


def training_on_usual_cards(
    architecture: Architecture,
    job: TrainingJob,
    reserve: Reserve,
    reward: Architecture | None = None,
    *,
    gpus: int | None = None,
) -> list[tuple[Kind, TrainingPlan | None]]:
    """A training on the fewest of each usual kind; None where it doesn't fit. Only what is divided needs several."""
    count = gpus or (MOST_GPUS if job.strategy is Strategy.FSDP else 1)
    rows: list[tuple[Kind, TrainingPlan | None]] = []
    for kind in usual_kinds():
        told = make_training_plan(architecture, usual_cards(kind, count), job, reserve, gpus=gpus, reward=reward)
        rows.append((kind, told if isinstance(told, TrainingPlan) else None))
    return rows
