"""What the algorithms on TRL's trainers share: the model in training, the reference, the policy that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpuherd.errors import UsageError
from gpuherd.posttrain.preference.fitting import model_folder
from gpuherd.posttrain.preference.options import FittingOptions
from gpuherd.posttrain.types import Comparison, Policy, Row, Training

if TYPE_CHECKING:
    from gpuherd.posttrain.rollout.loading import LoadedModel

Kind = TypeVar("Kind", bound=Row)


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


def trained_module(work: Training, options: FittingOptions, rows: Sequence[dict[str, Any]], device: str) -> LoadedModel:
    """The policy on this process's device, with what is trained requiring gradients.

    Raises UsageError for rows with more tokens than it has places for.
    """
    import torch

    from gpuherd.posttrain.policy_gradient.policy import load_for_training

    torch.manual_seed(work.seed)  # of a new adapter's weights
    sharded = work.steps is not None and work.steps.shards
    loaded = load_for_training(work.policy, work.precision, device, options.lora, sharded=sharded)
    most = getattr(loaded.module.config.get_text_config(), "max_position_embeddings", None)
    longest = max((tokens_of(each) for each in rows), default=0)
    if most is not None and longest > most:
        raise UsageError(
            f"a row has {longest} tokens, prompt and completion together, and {work.policy.model} has places for "
            f"{most}; leave such rows out, or lower generation.max_new_tokens"
        )
    return loaded


def tokens_of(row: dict[str, Any]) -> int:
    """The tokens of the longest sequence of a row."""
    before = len(row.get("prompt_ids", ()))
    return max(before + len(row[name]) for name in ("input_ids", "chosen_ids", "rejected_ids") if name in row)


def reference_module(work: Training, module: Any, device: str) -> Any:
    """The reference's model; None where it is the trained one (``module``) without its adapter."""
    from gpuherd.posttrain.rollout.loading import load_frozen

    reference = work.reference
    if hasattr(module, "peft_type") and reference.adapter is None and reference.model == work.policy.model:
        return None
    sharded = work.steps is not None and work.steps.shards  # TRL divides the reference too
    loaded = load_frozen(reference.model, work.precision, device, adapter=reference.adapter, sharded=sharded)
    return loaded.module.requires_grad_(False)  # autocast keeps copies of weights that want gradients


def without_copied_adapter(trainer: Any) -> Any:
    """TRL takes the adapter as it is at the beginning for the reference, in a copy named ``ref``; ours is the model
    without any, so that the copy goes."""
    if "ref" in getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {}):
        trainer.accelerator.unwrap_model(trainer.model).delete_adapter("ref")
    return trainer


def policy_in(work: Training, options: FittingOptions) -> Policy:
    """What a finished training of ``work`` stands for."""
    trained = str(model_folder(work.folder))
    if options.lora is not None or work.policy.adapter is not None:
        return Policy(work.policy.model, adapter=trained)
    return Policy(trained)
