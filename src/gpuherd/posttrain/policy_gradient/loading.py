"""The policy in training mode, and the reference that it must not go far from. Imports torch inside functions only."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError, naming_extras
from gpuherd.posttrain.engine.options import Lora
from gpuherd.posttrain.engine.strategies import without_dropout
from gpuherd.posttrain.policy_gradient.forward import weighed
from gpuherd.posttrain.rollout.loading import LoadedModel, load_anew, load_frozen
from gpuherd.posttrain.types import Policy, Precision, Rollout

logger = logging.getLogger(__name__)


def load_for_training(
    policy: Policy, precision: Precision, device: str, lora: Lora | None, *, sharded: bool = False
) -> LoadedModel:
    """The policy with what is trained requiring gradients: its adapter, a new adapter, or all weights.

    A new adapter has random numbers of torch's generator; where the policy has an adapter already, training continues
    with that one. The weights under an adapter are loaded frozen. The model's own dropout is switched off. Raises
    UsageError for a guided policy: its classifier is not trained here.

    Args:
        sharded: FSDP will divide it.
    """
    if policy.guide is not None:
        raise UsageError("a guided policy can't be trained by policy gradients; start from its model without the guide")
    if policy.adapter is not None or lora is not None:
        loaded = load_frozen(policy.model, precision, device, sharded=sharded)
    else:
        loaded = load_anew(policy.model, precision, device)
    without_dropout(loaded.module)
    if policy.adapter is not None:
        loaded.module = _with_trainable(loaded.module, policy.adapter)
    elif lora is not None:
        loaded.module = _with_new(loaded.module, lora)
    else:
        loaded.module.requires_grad_(True)
        if precision.dtype in ("bfloat16", "float16") and precision.amp_dtype is None:
            logger.warning(
                "weights in %s: changes of less than 1/256 (bfloat16) of a weight are rounded away; dtype float32 with "
                "amp_dtype bfloat16 keeps them",
                precision.dtype,
            )
    return loaded


def _with_trainable(module: Any, adapter: str) -> Any:
    with naming_extras({"peft": "posttrain"}, "training adapters takes"):
        from peft import PeftModel
    from gpuherd.models.load.options import LoadRequest
    from gpuherd.models.load.prepare import located

    path, _ = located(LoadRequest(adapter)) if not Path(adapter).is_dir() else (Path(adapter), None)
    return PeftModel.from_pretrained(module, str(path), is_trainable=True, torch_device="cpu", local_files_only=True)


def _with_new(module: Any, lora: Lora) -> Any:
    with naming_extras({"peft": "posttrain"}, "training adapters takes"):
        from peft import LoraConfig, get_peft_model
    targets = None if lora.target_modules is None else list(lora.target_modules)
    return get_peft_model(
        module,
        LoraConfig(
            task_type="CAUSAL_LM", r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets
        ),
    )


@dataclass(eq=False, slots=True)
class Reference:
    """The policy that everything began with: a model of its own, or the trained one without its adapter.

    Attributes:
        module: in evaluation mode.
        shared: it is the trained one; its adapter is switched off while it is asked.
    """

    module: Any
    shared: bool
    device: str

    def log_probs(self, rollouts: Sequence[Rollout], temperature: float, rows: int) -> list[list[float]]:
        """Of all tokens behind the prompts, at the sampling temperature."""
        with self.module.disable_adapter() if self.shared else nullcontext(), evaluating(self.module):
            return weighed(self.module, rollouts, temperature, self.device, rows)[0]


def reference_of(reference: Policy, policy: Policy, trained: Any, precision: Precision, device: str) -> Reference:
    """The reference; no second model where only an adapter on the reference itself is trained."""
    if hasattr(trained, "peft_type") and reference.adapter is None and reference.model == policy.model:
        return Reference(trained, True, device)
    loaded = load_frozen(reference.model, precision, device, adapter=reference.adapter)
    loaded.module.requires_grad_(False)
    return Reference(loaded.module, False, device)


@contextmanager
def evaluating(module: Any) -> Iterator[None]:
    """The module in evaluation mode (no dropout) for the while."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
