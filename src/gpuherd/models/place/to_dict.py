"""Plans as plain data for ``gpuherd plan --json``. The schema is in docs/plan.md; scripts rely on it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gpuherd.models.place.commands import PlanRequest, command_words
from gpuherd.models.place.gpus import GpuKind, GpuSpec
from gpuherd.models.place.planner import CommonGpuPlans
from gpuherd.models.place.result import (
    AnswerRefusal,
    GpuLoad,
    MemoryPlan,
    Refusal,
    TrainingPlan,
    TrainingRefusal,
    weights_bytes,
)
from gpuherd.models.place.split import MOST_SEQUENCES
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.result import Usage
from gpuherd.models.plan.training_result import TrainingUsage

_MODEL_KEYS = ("model_type", "class_name", "parameters", "layers", "stored", "source")


def plan_to_dict(
    result: MemoryPlan | TrainingPlan | AnswerRefusal | TrainingRefusal, request: PlanRequest
) -> dict[str, Any]:
    """A plan, or a refusal."""
    if isinstance(result, (TrainingPlan, TrainingRefusal)):
        common = _training_to_dict(result)
    else:
        common = _answers_to_dict(result)
    content = {
        "model": model_to_dict(result.architecture),
        "fits": not isinstance(result, Refusal),
        **common,
    }
    if isinstance(result, Refusal):
        content |= {
            "reason": result.reason,
            **({"needed_bytes": result.needed} if isinstance(result, AnswerRefusal) else {}),
            "missing_bytes": result.missing,
            "alternatives": [
                {
                    "sentence": each.sentence,
                    "options": list(each.words),
                    "command": command_words(request, each.words),
                }
                for each in result.alternatives
            ],
        }
        return content
    needs = {"request": {"gpus": result.gpus, "memory_mb": result.memory_mb}}
    if isinstance(result, TrainingPlan):
        return content | {"largest_batch": result.largest_batch, "on_all": _on_all_to_dict(result), **needs}
    return content | {
        "parallel": result.parallel,
        "replicas": result.replicas,
        "replica_gpus": [[gpu.label for gpu in gpus] for gpus in result.replica_gpus],
        "largest_batch": _batch_or_any(result),
        **needs,
        "device_map": None if result.parallel == "tensor" else result.device_map,
        "warnings": list(result.warnings),
    }


def _answers_to_dict(result: MemoryPlan | AnswerRefusal) -> dict[str, Any]:
    """What plans and refusals of answers have in common."""
    return {
        "dtype": str(result.precision),
        **asdict(result.workload),
        "reserve": _reserve_to_dict(result),
        "weights_bytes": weights_bytes(result.architecture, result.precision),
        "gpus": [_load_to_dict(result.architecture, load) for load in result.loads],
    }


def _training_to_dict(result: TrainingPlan | TrainingRefusal) -> dict[str, Any]:
    """What plans and refusals of trainings have in common."""
    job = result.job
    return {
        "training": {**asdict(job), "base": str(job.base_precision), "reference": job.keeps_reference},
        "trained_parameters": result.trained,
        "reserve": _reserve_to_dict(result),
        "gpus": [_training_load_to_dict(load) for load in result.loads],
        "with_checkpointing_bytes": result.checkpointed.total,
        "without_checkpointing_bytes": result.plain.total,
        "warnings": list(result.warnings),
    }


def _on_all_to_dict(plan: TrainingPlan) -> dict[str, Any] | None:
    if plan.on_all is None:
        return None
    used = plan.on_all.usage.total
    return {"gpus": plan.on_all.gpus, "used_bytes": used, "largest_batch": plan.on_all.largest_batch}


def _batch_or_any(plan: MemoryPlan | None) -> int | None:
    """None for any number, and for no plan."""
    return None if plan is None or plan.largest_batch >= MOST_SEQUENCES else plan.largest_batch


def _sizes(figures: Mapping[str, int]) -> dict[str, int]:
    """Bytes by what they are for, under keys that say so."""
    return {f"{name}_bytes": size for name, size in figures.items()}


def model_to_dict(architecture: Architecture) -> dict[str, Any]:
    """What was planned."""
    facts = {name: getattr(architecture, name) for name in _MODEL_KEYS}
    return {"name": architecture.model, **facts, "assumptions": list(architecture.assumptions)}


def _reserve_to_dict(result: MemoryPlan | TrainingPlan | AnswerRefusal | TrainingRefusal) -> dict[str, Any]:
    """What is kept free on each GPU."""
    reserve = result.reserve
    return {**_sizes({"context": reserve.context, "fixed": reserve.fixed}), "share": reserve.share}


def gpu_to_dict(gpu: GpuSpec) -> dict[str, Any]:
    """A GPU."""
    return {
        "label": gpu.label,
        "name": gpu.name,
        "uuid": gpu.uuid,
        **_sizes({"total": gpu.total, "free": gpu.free}),
        "capability": None if gpu.capability is None else "{}.{}".format(*gpu.capability),
    }


def _load_to_dict(architecture: Architecture, load: GpuLoad[Usage]) -> dict[str, Any]:
    return {
        **gpu_to_dict(load.gpu),
        **_sizes({**asdict(load.usage), "used": load.usage.total, "left": load.left}),
        "blocks": [block.name for block in architecture.blocks[load.first : load.after_last]],
    }


def _training_load_to_dict(load: GpuLoad[TrainingUsage]) -> dict[str, Any]:
    usage = load.usage
    return {
        **gpu_to_dict(load.gpu),
        **_sizes({"context": usage.context, "reserve": usage.reserve, "used": usage.total, "left": load.left}),
        "fullest_moment": usage.fullest.name,
        "moments": [
            {"name": moment.name, **_sizes({**moment.parts(), "total": moment.total})} for moment in usage.moments
        ],
    }


def common_gpus_to_dict(rows: Sequence[CommonGpuPlans]) -> list[dict[str, Any]]:
    """One model on common GPUs."""
    return [
        {
            "name": row.kind.name,
            "memory_bytes": row.kind.memory,
            "gpus": {str(each): None if plan is None else plan.gpus for each, plan in row.plans.items()},
            "largest_batch": {str(each): _batch_or_any(plan) for each, plan in row.plans.items()},
        }
        for row in rows
    ]


def training_on_common_gpus_to_dict(rows: Sequence[tuple[GpuKind, TrainingPlan | None]]) -> list[dict[str, Any]]:
    """A training on common GPUs."""
    return [
        {
            "name": kind.name,
            "memory_bytes": kind.memory,
            "gpus": None if plan is None else plan.gpus,
            "largest_batch": None if plan is None else plan.largest_batch,
        }
        for kind, plan in rows
    ]
