"""The policy in training: loaded with what is trained, perhaps with a value head; its reference; and its files, which
are written as a whole or not at all.

Imports torch: imported only where a model is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpuherd import atomic
from gpuherd.errors import BadModel, UsageError, naming_extras, printable
from gpuherd.posttrain.config.typed import nearest_or_all
from gpuherd.posttrain.engine import strategies
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.fit import save_model
from gpuherd.posttrain.engine.options import Lora, Sharding, StepOptions
from gpuherd.posttrain.engine.train_engine import TrainEngine, pieces_needed
from gpuherd.posttrain.policy_gradient.algorithm import MODEL
from gpuherd.posttrain.policy_gradient.forward import score_rollouts
from gpuherd.posttrain.rollout.loading import LoadedModel, load_anew, load_frozen
from gpuherd.posttrain.types import Policy, Precision, Rollout, Training

logger = logging.getLogger(__name__)

CRITIC = "critic"  # the folder of the value head, next to the model's
_FILE = "value_head.safetensors"


class ValuedPolicy(nn.Module):
    """A causal model (transformers' or PEFT's) and a linear value head over its last hidden states, in float32.

    The head begins at 0: every value is 0, and the first advantages are the rewards themselves.
    """

    def __init__(self, policy: Any):
        super().__init__()
        self.policy = policy
        inner = policy.get_base_model() if hasattr(policy, "peft_type") else policy
        width = inner.config.get_text_config(decoder=True).hidden_size
        self.value_head = nn.Linear(width, 1, device=inner.get_input_embeddings().weight.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def config(self) -> Any:
        """The policy's."""
        return self.policy.config

    def forward(self, **words: Any) -> tuple[Tensor, Tensor]:
        """Logits as the policy makes them, and the value at every token read, (rows, tokens): of what is to come
        behind it."""
        last: list[Tensor] = []
        inner = self.policy.get_base_model() if hasattr(self.policy, "peft_type") else self.policy
        # The body's own output, since output_hidden_states would keep those of all layers.
        hook = inner.base_model.register_forward_hook(lambda _module, _given, made: last.append(made[0]))
        try:
            made = self.policy(**words)
        finally:
            hook.remove()
        states = last[-1]
        with torch.autocast(states.device.type, enabled=False):
            # Its weight is float32, unless FSDP computes in another dtype.
            return made.logits, self.value_head(states.to(self.value_head.weight.dtype))[..., 0]


def save_value_head(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Writes the head, of the weights of a ``ValuedPolicy``, into a folder."""
    from safetensors.torch import save_file

    prefix = "value_head."
    save_file(
        {name.removeprefix(prefix): each for name, each in state.items() if name.startswith(prefix)}, folder / _FILE
    )


def load_value_head(module: ValuedPolicy, folder: Path) -> None:
    """Gives the module the head that was saved in a folder. Raises BadModel for one of another width."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        module.value_head.load_state_dict(load_file(folder / _FILE))
    except (RuntimeError, OSError, SafetensorError) as problem:
        raise BadModel(f"{folder / _FILE} is no value head of this model: {problem}") from None


def load_for_training(
    policy: Policy, precision: Precision, device: str, lora: Lora | None, *, sharded: bool = False
) -> LoadedModel:
    """The policy with what is trained requiring gradients: its adapter, a new adapter, or all weights.

    A new adapter has random numbers of torch's generator; where the policy has an adapter already, training continues
    with that one. The weights under an adapter are loaded frozen, quantised where ``lora`` says so. The model's own
    dropout is switched off. Raises UsageError for a guided policy (its classifier is not trained here), and for
    quantised weights that FSDP would have to divide; MissingExtra without bitsandbytes.

    Args:
        sharded: FSDP will divide it: each process reads its own rows alone.
    """
    if policy.guide is not None:
        raise UsageError("a guided policy can't be trained by policy gradients; start from its model without the guide")
    if policy.adapter is not None or lora is not None:
        quantization = None if lora is None else lora.quantization
        if quantization is not None and sharded:
            raise UsageError(f"lora.quantization={quantization} with strategy fsdp: codes can't be divided; use ddp")
        held = precision if quantization is None else replace(precision, dtype=str(quantization))
        loaded = load_frozen(policy.model, held, device, sharded=sharded)
        _keep_codes(loaded.module)
    else:
        loaded = load_anew(policy.model, precision, device, sharded=sharded)
    strategies.without_dropout(loaded.module)
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


def _keep_codes(module: Any) -> None:
    """Has bitsandbytes leave codes of 4 bits as they are. On processors with AVX512-BF16 it repacks them for its faster
    kernel at the first pass in evaluation mode, and that kernel has no gradients: what learns behind an answer would
    learn nothing below the last layer."""
    for each in module.modules():
        if hasattr(each, "support_avx512bf16_for_cpu"):
            each.support_avx512bf16_for_cpu = False


def _with_trainable(module: Any, adapter: str) -> Any:
    with naming_extras({"peft": "posttrain"}, "training adapters takes"):
        from peft import PeftModel
    from gpuherd.models.load.options import LoadRequest
    from gpuherd.models.load.prepare import located

    path, _ = located(LoadRequest(adapter)) if not Path(adapter).is_dir() else (Path(adapter), None)
    return PeftModel.from_pretrained(module, str(path), is_trainable=True, torch_device="cpu", local_files_only=True)


def _with_new(module: Any, lora: Lora) -> Any:
    targets = None if lora.target_modules is None else list(lora.target_modules)
    for target in targets or ():
        _refuse_unknown(module, target)
    with naming_extras({"peft": "posttrain"}, "training adapters takes"):
        from peft import LoraConfig, get_peft_model
    return get_peft_model(
        module,
        LoraConfig(
            task_type="CAUSAL_LM", r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets
        ),
    )


def _refuse_unknown(module: nn.Module, target: str) -> None:
    """Raises UsageError for a module to be adapted that the model hasn't; peft overlooks it where others are there."""
    named = dict(module.named_modules())
    if any(name == target or name.endswith(f".{target}") for name in named):
        return
    matrices = {
        name.rpartition(".")[2]
        for name, each in named.items()
        if getattr(getattr(each, "weight", None), "ndim", 0) == 2 and not isinstance(each, nn.Embedding)
    }
    hint = nearest_or_all(target, sorted(matrices))
    raise UsageError(f"lora.target_modules: the model has no module {printable(target)!r}{hint}")


@dataclass(eq=False, slots=True)
class Reference:
    """The policy that everything began with, frozen: a model of its own, or the trained one without its adapter.

    Attributes:
        module: whole in each process, or divided by FSDP.
        shared: it is the trained one; its adapter is switched off while it computes.
        divided: it is a model of its own, of which each process holds its rows.
    """

    module: Any
    shared: bool
    world: DistEnv
    divided: bool = False

    @contextmanager
    def frozen(self) -> Iterator[Any]:
        """The module for passes without gradients, in evaluation mode. Of a divided one, all processes do as many."""
        with torch.no_grad(), self.module.disable_adapter() if self.shared else nullcontext(), evaluating(self.module):
            yield self.module
        if self.divided:  # torch before 2.8 keeps what is around the layers whole
            strategies.reshard(self.module)

    def log_probs(self, rollouts: Sequence[Rollout], temperature: float, rows: int) -> list[list[float]]:
        """Of all tokens behind the prompts of this process's rollouts, at the sampling temperature, ``rows`` rollouts a
        pass. Of a divided reference all processes call it together."""
        passes = pieces_needed(len(rollouts), rows)
        passes = max(self.world.gather(passes)) if self.divided else passes
        with self.frozen() as module:
            return score_rollouts(module, rollouts, temperature, self.world.device, rows, passes)[0]


def reference_of(work: Training, trained: Any, world: DistEnv) -> Reference:
    """The reference of a training; no second model where only an adapter on the reference itself is trained.

    With FSDP each process reads and holds its rows alone, in the type that passes compute in: FSDP gathers each layer
    in that type, so that rows in a wider one would take memory and change nothing.

    Args:
        trained: the policy's module, before it is wrapped or divided.
    """
    reference, steps, precision = work.reference, work.steps or StepOptions(), work.precision
    if hasattr(trained, "peft_type") and reference.adapter is None and reference.model == work.policy.model:
        return Reference(trained, True, world)
    if not steps.shards:
        module = load_frozen(reference.model, precision, world.device, adapter=reference.adapter).module
        return Reference(module.requires_grad_(False), False, world)  # autocast keeps copies of what wants gradients
    held = replace(precision, dtype=precision.amp_dtype or precision.dtype)
    module = load_frozen(reference.model, held, world.device, adapter=reference.adapter, sharded=True).module
    # No backward pass gives layers up that a forward pass has left whole.
    apart = replace(steps, fsdp_sharding_strategy=Sharding.FULL_SHARD)
    amp = None if precision.amp_dtype is None else getattr(torch, precision.amp_dtype)
    strategies.distributed(module.requires_grad_(False), apart, world, amp, None, all_used=True)
    return Reference(module, False, world, divided=True)


@contextmanager
def evaluating(module: Any) -> Iterator[None]:
    """The module in evaluation mode (no dropout) for the while."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def critic_before(policy: Policy) -> Path | None:
    """The folder of the value head that was trained with a policy; None where there is none."""
    folder = Path(policy.adapter or policy.model)
    critic = folder.parent / CRITIC
    return critic if folder.name == MODEL and critic.is_dir() else None


def save_policy(folder: Path, trainee: TrainEngine, tokenizer: Any) -> None:
    """Writes ``folder/model`` (as transformers or PEFT save it, with the tokenizer), and ``folder/critic`` before it
    where a value head was trained. All processes call it together. Raises CannotWrite."""
    valued = isinstance(trainee.plain, ValuedPolicy)
    if valued:
        state = trainee.full_state(lambda name: name.startswith("value_head."))
        if trainee.world.is_main:
            with atomic.atomic_folder(folder / CRITIC) as critic:
                save_value_head(critic, state)
    save_model(trainee, folder / MODEL, tokenizer, part="policy" if valued else "")
