"""A training plan as plain data for ``gpuherd plan --train --json``. The schema is in docs/plan.md. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gpuherd.models.plan.as_json import alternatives_as_json, card_as_json, model_as_json, reserve_as_json
from gpuherd.models.plan.kinds import Kind
from gpuherd.models.plan.next_steps import Asked
from gpuherd.models.plan.training_result import TrainingLoad, TrainingPlan, TrainingRefusal
from gpuherd.models.plan.workload import MIB


def training_as_json(told: TrainingPlan | TrainingRefusal, asked: Asked) -> dict[str, Any]:
    """A training plan, or a refusal."""
    job = asdict(told.job)
    common = {
        "model": model_as_json(told.architecture),
        "fits": isinstance(told, TrainingPlan),
        "training": {**job, "base": str(told.job.base_precision), "reference": told.job.keeps_reference},
        "trained_parameters": told.trained,
        "reserve": reserve_as_json(told.reserve),
        "gpus": [_training_load(load) for load in told.loads],
        "with_checkpointing_bytes": told.checkpointed.total,
        "without_checkpointing_bytes": told.plain.total,
        "warnings": list(told.warnings),
    }
    if isinstance(told, TrainingRefusal):
        return {
            **common,
            "reason": told.reason,
            "missing_bytes": told.missing,
            "alternatives": alternatives_as_json(told.alternatives, asked),
        }
    needed = max(-(-load.usage.total // MIB) for load in told.loads)
    return {
        **common,
        "largest_batch": told.largest_batch,
        "on_all": None
        if told.on_all is None
        else {
            "gpus": told.on_all.gpus,
            "used_bytes": told.on_all.usage.total,
            "largest_batch": told.on_all.largest_batch,
        },
        "request": {"gpus": told.gpus, "memory_mb": needed},
    }


def _training_load(load: TrainingLoad) -> dict[str, Any]:
    moments = [
        {
            "name": moment.name,
            **{f"{part}_bytes": size for part, size in moment.parts().items()},
            "total_bytes": moment.total,
        }
        for moment in load.usage.moments
    ]
    return {
        **card_as_json(load.card),
        "context_bytes": load.usage.context,
        "reserve_bytes": load.usage.reserve,
        "used_bytes": load.usage.total,
        "left_bytes": load.left,
        "fullest_moment": load.usage.fullest.name,
        "moments": moments,
    }


def training_usual_as_json(rows: Sequence[tuple[Kind, TrainingPlan | None]]) -> list[dict[str, Any]]:
    """A training on usual GPUs."""
    return [
        {
            "name": kind.name,
            "memory_bytes": kind.memory,
            "gpus": None if plan is None else plan.gpus,
            "largest_batch": None if plan is None else plan.largest_batch,
        }
        for kind, plan in rows
    ]
