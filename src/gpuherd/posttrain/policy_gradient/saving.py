"""A trained policy's folder: there as a whole or not at all. Imports torch inside functions only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuherd import atomic
from gpuherd.posttrain.engine.saving import save_model
from gpuherd.posttrain.engine.trainee import Trainee
from gpuherd.posttrain.policy_gradient.algorithm import MODEL
from gpuherd.posttrain.types import Policy

CRITIC = "critic"


def critic_before(policy: Policy) -> Path | None:
    """The folder of the value head that was trained with a policy; None where there is none."""
    folder = Path(policy.adapter or policy.model)
    critic = folder.parent / CRITIC
    return critic if folder.name == MODEL and critic.is_dir() else None


def save_policy(folder: Path, trainee: Trainee, tokenizer: Any) -> None:
    """Writes ``folder/model`` (as transformers or PEFT save it, with the tokenizer), and ``folder/critic`` before it
    where a value head was trained. All processes call it together. Raises CannotWrite."""
    from gpuherd.posttrain.policy_gradient.value_head import ValuedPolicy, save_value_head

    valued = isinstance(trainee.plain, ValuedPolicy)
    if valued:
        state = trainee.full_state()
        if trainee.world.is_main:
            with atomic.atomic_folder(folder / CRITIC) as critic:
                save_value_head(critic, state)
    save_model(trainee, folder / MODEL, tokenizer, part="policy" if valued else "")
