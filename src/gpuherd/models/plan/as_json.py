"""A plan as plain data for ``gpuherd plan --json``. The schema is in docs/plan.md; scripts rely on it. Pure.

``training_as_json`` does it for trainings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.next_steps import Asked, alternative_words
from gpuherd.models.plan.result import Alternative, GpuLoad, MemoryPlan, Refusal
from gpuherd.models.plan.sizing import MOST_SEQUENCES
from gpuherd.models.plan.telling import weights_bytes
from gpuherd.models.plan.usual import OnUsual
from gpuherd.models.plan.workload import Reserve


def plan_as_json(told: MemoryPlan | Refusal, asked: Asked) -> dict[str, Any]:
    """A plan, or a refusal."""
    architecture = told.architecture
    common = {
        "model": model_as_json(architecture),
        "fits": isinstance(told, MemoryPlan),
        "dtype": str(told.precision),
        "batch": told.workload.batch,
        "prompt_tokens": told.workload.prompt_tokens,
        "new_tokens": told.workload.new_tokens,
        "reserve": reserve_as_json(told.reserve),
        "weights_bytes": weights_bytes(architecture, told.precision),
        "gpus": [_load(architecture, load) for load in told.loads],
    }
    if isinstance(told, Refusal):
        return {
            **common,
            "reason": told.reason,
            "needed_bytes": told.needed,
            "missing_bytes": told.missing,
            "alternatives": alternatives_as_json(told.alternatives, asked),
        }
    return {
        **common,
        "parallel": told.parallel,
        "replicas": told.replicas,
        "replica_gpus": [[card.label for card in cards] for cards in told.replica_cards],
        "largest_batch": None if told.largest_batch >= MOST_SEQUENCES else told.largest_batch,
        "request": {"gpus": told.gpus, "memory_mb": told.memory_mb},
        "device_map": None if told.parallel == "tensor" else told.device_map,
        "warnings": list(told.warnings),
    }


def model_as_json(architecture: Architecture) -> dict[str, Any]:
    """What was planned."""
    return {
        "name": architecture.model,
        "model_type": architecture.model_type,
        "class_name": architecture.class_name,
        "parameters": architecture.parameters,
        "layers": architecture.layers,
        "stored": architecture.stored,
        "source": architecture.source,
        "assumptions": list(architecture.assumptions),
    }


def reserve_as_json(reserve: Reserve) -> dict[str, Any]:
    """What is kept free on each GPU."""
    return {"context_bytes": reserve.context, "fixed_bytes": reserve.fixed, "share": reserve.share}


def card_as_json(card: Card) -> dict[str, Any]:
    """A GPU."""
    return {
        "label": card.label,
        "name": card.name,
        "uuid": card.uuid,
        "total_bytes": card.total,
        "free_bytes": card.free,
        "capability": None if card.capability is None else "{}.{}".format(*card.capability),
    }


def _load(architecture: Architecture, load: GpuLoad) -> dict[str, Any]:
    sizes = {f"{name}_bytes": size for name, size in asdict(load.usage).items()}
    return {
        **card_as_json(load.card),
        **sizes,
        "used_bytes": load.usage.total,
        "left_bytes": load.left,
        "blocks": [block.name for block in architecture.blocks[load.first : load.after_last]],
    }


def alternatives_as_json(alternatives: Sequence[Alternative], asked: Asked) -> list[dict[str, Any]]:
    """What would fit, each with its command."""
    return [
        {"sentence": each.sentence, "options": list(each.words), "command": alternative_words(asked, each)}
        for each in alternatives
    ]


def usual_as_json(rows: Sequence[OnUsual]) -> list[dict[str, Any]]:
    """One model on usual GPUs."""
    return [
        {
            "name": row.kind.name,
            "memory_bytes": row.kind.memory,
            "gpus": {str(each): None if plan is None else plan.gpus for each, plan in row.plans.items()},
            "largest_batch": {
                str(each): None if plan is None or plan.largest_batch >= MOST_SEQUENCES else plan.largest_batch
                for each, plan in row.plans.items()
            },
        }
        for row in rows
    ]
