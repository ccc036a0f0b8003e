"""What SFT and DPO share, which learn from rows that were collected: options, plan, the model in training, and the
policy that comes of it. Imports torch inside functions only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import at_least
from gpuherd.posttrain.engine.checkpoints import DIGESTS
from gpuherd.posttrain.engine.fit import TrainPlan, model_folder, save_every_for, steps_for
from gpuherd.posttrain.engine.options import Lora, Optimised, StepOptions, Watching, hooks_of
from gpuherd.posttrain.types import Comparison, Policy, Row, Training

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.dist_env import DistEnv
    from gpuherd.posttrain.rollout.loading import LoadedModel

Kind = TypeVar("Kind", bound=Row)


@dataclass(frozen=True, kw_only=True)
class FittingOptions(Optimised):
    """In addition to ``Optimised``. Raises UsageError.

    Attributes:
        epochs: how often each row is learnt from.
        batch_size: rows of an optimiser step, over all processes.
        max_steps: no more optimiser steps than these; None: as many as the epochs have.
        num_workers: processes that make batches.
        save_every: steps between checkpoints; None: twenty in all, at least 25 steps apart.
        lora: an adapter is trained; None: all weights (or the adapter that the policy has already).
    """

    epochs: int = 1
    batch_size: int = 16
    max_steps: int | None = None
    lr: float = 1e-5
    num_workers: int = 0
    save_every: int | None = None
    lora: Lora | None = None

    def __post_init__(self) -> None:
        at_least(self, epochs=1, batch_size=1, max_steps=1, save_every=1, num_workers=0)
        _ = self.optimiser  # refuses what is out of range

    def identity(self) -> dict[str, Any]:
        """All of them that change what is learnt, as JSON values."""
        left_out = ("num_workers", "save_every")
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def identity_of(work: Training, options: FittingOptions, algorithm: str, data: str) -> dict[str, Any]:
    """All that decides what ``work`` learns, as JSON values. ``data``: the digest of its rows."""
    return {
        "algorithm": algorithm,
        "policy": work.named(work.policy),
        "reference": work.named(work.reference),
        DIGESTS: dict(work.digests),
        "data": data,
        "seed": work.seed,
        "precision": [work.precision.dtype, work.precision.amp_dtype],
        "options": options.identity(),
    }


def plan_of(work: Training, options: FittingOptions, *, algorithm: str, rows: int, data: str) -> TrainPlan:
    """The training of ``work`` on so many rows; ``data``: their digest."""
    total = steps_for(rows, options.epochs, options.batch_size, options.max_steps)
    return TrainPlan(
        folder=work.folder,
        stage=f"{algorithm} training",
        optimiser=options.optimiser,
        steps=work.steps or StepOptions(),
        batch_size=options.batch_size,
        total_steps=total,
        amp_dtype=work.precision.amp_dtype,
        device=work.device,
        seed=work.seed,
        num_workers=options.num_workers,
        watching=hooks_of(work, Watching(save_every_for(total, options.save_every))),
        identity=identity_of(work, options, algorithm, data),
    )


def rows_of_kind(work: Training, kind: type[Kind], algorithm: str, *, all_rounds: bool = False) -> list[Kind]:
    """This round's rows (or those of all rounds). Raises UsageError where there are none, or rows of another kind."""
    rounds = work.rows if all_rounds else work.rows[-1:]
    rows = [each for rows in rounds for each in rows]
    if not rows:
        said = f"{algorithm}: nothing was collected that could be learnt from"
        if kind is Comparison:
            said += (
                ": no problem has two answers of which one is better; collect more samples of each, draw at a higher "
                "temperature, or take other problems"
            )
        raise UsageError(said)
    for each in rows:
        if not isinstance(each, kind):
            raise UsageError(f"{algorithm} learns from rows of {kind.__name__}, and was given a {type(each).__name__}")
    return rows  # type: ignore[return-value]


def trained_module(work: Training, lora: Lora | None, longest: int, world: DistEnv) -> LoadedModel:
    """The policy with what is trained requiring gradients, on this process's device, or of what FSDP divides this
    process's part.

    Args:
        longest: tokens of the longest sequence that is learnt from.

    Raises UsageError where that is more than the policy has places for.
    """
    import torch

    from gpuherd.posttrain.policy_gradient.policy import load_for_training

    torch.manual_seed(work.seed)  # of a new adapter's weights
    loaded = load_for_training(
        work.policy, work.precision, world.device, lora, sharded=(work.steps or StepOptions()).shards
    )
    most = getattr(loaded.module.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and longest > most:
        raise UsageError(
            f"a row has {longest} tokens, prompt and completion together, and {work.policy.model} has places for "
            f"{most}; leave such rows out, or lower generation.max_new_tokens"
        )
    return loaded


def policy_in(work: Training, lora: Lora | None) -> Policy:
    """What a finished training of ``work`` stands for."""
    trained = str(model_folder(work.folder))
    if lora is not None or work.policy.adapter is not None:
        return Policy(work.policy.model, adapter=trained)
    return Policy(trained)
