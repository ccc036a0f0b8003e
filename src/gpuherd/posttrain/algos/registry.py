"""Which algorithms there are, by the names that configs use, and where: a module is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.options import did_you_mean

ALGORITHMS: Mapping[str, str] = {
    "SFT": "sft:SFT",
    "DPO": "dpo:DPO",
    "GRPO": "grpo:GRPO",
    "PPO": "ppo:PPO",
    "REINFORCE": "reinforce:Reinforce",
    "GRPO-HF": "grpo_hf:GRPOFromHumanFeedback",
    "QSharp": "qsharp:QSharp",
    "QSharp-HF": "qsharp_hf:QSharpFromHumanFeedback",
    "PITA": "pita:PITA",
    "CD": "cd:ControlledDecoding",
}

# The two kinds that there are: a classifier guides the reference, or the policy's own weights change.
ValueGuidedAlgorithms: tuple[str, ...] = ("QSharp", "QSharp-HF", "PITA", "CD")
PostTrainingAlgorithms: tuple[str, ...] = tuple(name for name in ALGORITHMS if name not in ValueGuidedAlgorithms)

_SPELLINGS = {"q#": "QSharp", "qsharp": "QSharp", "q#-hf": "QSharp-HF"}


def canonical(name: str) -> str:
    """The registered spelling of a name. Raises UsageError, which says the nearest.

    >>> canonical("Q#"), canonical("grpo_hf")
    ('QSharp', 'GRPO-HF')
    """
    plain = name.lower().replace("_", "-")
    found = {each.lower(): each for each in ALGORITHMS} | _SPELLINGS
    if plain in found:
        return found[plain]
    if plain == "rpo":  # under that name alone it would be DPO, and nobody would see it
        raise UsageError(f"algorithm {name!r} is DPO with rpo_weight above 0: algorithm=DPO, rpo_weight=1")
    hint = did_you_mean(plain, found, show=found.__getitem__)
    raise UsageError(f"algorithm {name!r} is none of {', '.join(ALGORITHMS)}{hint}")


def algorithm_class(name: str) -> Any:
    """The class of an algorithm; its ``Options`` is an attribute. Raises UsageError."""
    module, _, attribute = ALGORITHMS[canonical(name)].partition(":")
    return getattr(importlib.import_module(f"gpuherd.posttrain.algos.{module}"), attribute)
