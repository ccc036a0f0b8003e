"""Parameters, gradients and optimiser states: to the byte, against real models, optimisers and torch's FSDP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpuherd.errors import UsageError
from gpuherd.models.describe.description import Architecture, Role, Tensor
from gpuherd.models.memory.training_job import (
    LoraShape,
    Optimiser,
    StepMemory,
    Strategy,
    TrainingJob,
    TrainingPrecision,
)
from gpuherd.models.memory.training_states import part_of, states_of, training_model, with_lora
from gpuherd.models.memory.weights import Precision

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.models.memory.training_groups import divided, silent_group  # noqa: E402
from tests.models.memory.training_models import config_of, model_of, unmeasured  # noqa: E402

SMALL = {"layers": 2, "vocab": 1001, "hidden_size": 128, "intermediate_size": 200, "num_attention_heads": 4}


def expected(config: Any, job: TrainingJob, shards: int = 1) -> StepMemory:
    model = training_model(unmeasured(config))
    return states_of(model if job.lora is None else with_lora(model, job.lora), job, shards)


def storages(tensors: Iterator[Any]) -> int:
    """Bytes of distinct storages on a device."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def state_tensors(optimiser: Any) -> Iterator[Any]:
    for state in optimiser.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def trained_once(model: Any, optimiser: Any) -> None:
    ids = torch.arange(16)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimiser.step()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("precision", [TrainingPrecision.FP32, TrainingPrecision.BF16])
@pytest.mark.parametrize("kind", [Optimiser.ADAMW, Optimiser.SGD, Optimiser.ADAFACTOR])
def test_states_are_those_of_a_real_step(kind: Optimiser, precision: TrainingPrecision, tied: bool) -> None:
    from transformers.optimization import Adafactor

    config = config_of("llama", **SMALL, tie_word_embeddings=tied)
    model = model_of(config, torch.float32 if precision is TrainingPrecision.FP32 else torch.bfloat16)
    makers: dict[Optimiser, Any] = {
        Optimiser.ADAMW: lambda: torch.optim.AdamW(model.parameters(), lr=1e-3),
        Optimiser.SGD: lambda: torch.optim.SGD(model.parameters(), lr=1e-3),
        Optimiser.ADAFACTOR: lambda: Adafactor(model.parameters(), lr=1e-3, relative_step=False),
    }
    optimiser = makers[kind]()
    trained_once(model, optimiser)
    ours = expected(config, TrainingJob(precision=precision, optimiser=kind))
    assert ours.parameters == storages(model.parameters())
    assert ours.gradients == storages(parameter.grad for parameter in model.parameters())
    assert ours.optimiser == storages(state_tensors(optimiser))


def test_eight_bit_states_are_those_of_bitsandbytes() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    from torch import nn

    config = config_of("llama", **SMALL)
    model = model_of(config, torch.float32)
    manager = bnb.optim.GlobalOptimManager.get_instance()
    optimiser = bnb.optim.AdamW8bit(model.parameters(), lr=1e-3)
    for module in model.modules():  # as transformers' Trainer does
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    trained_once(model, optimiser)
    job = TrainingJob(precision=TrainingPrecision.FP32, optimiser=Optimiser.ADAMW_8BIT)
    assert expected(config, job).optimiser == storages(state_tensors(optimiser))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT 0.21 asks for it
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("all-linear",)], ids=["attention", "all"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_is_pefts(family: str, targets: tuple[str, ...]) -> None:
    peft = pytest.importorskip("peft")
    if family == "gpt2":
        config = config_of("gpt2", layers=2, vocab=1001, n_embd=128, n_head=4)
        targets = tuple({"q_proj": "c_attn", "v_proj": "c_proj"}.get(target, target) for target in targets)
    else:
        config = config_of("llama", **SMALL)
    wanted = "all-linear" if targets == ("all-linear",) else list(targets)
    shape = peft.LoraConfig(r=8, target_modules=wanted, task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2")
    model = peft.get_peft_model(model_of(config, torch.bfloat16), shape)
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(own, lr=1e-3)
    trained_once(model, optimiser)
    ours = expected(config, TrainingJob(lora=LoraShape(8, targets)))
    assert ours.parameters == storages(model.parameters())
    assert ours.gradients == storages(parameter.grad for parameter in own)
    assert ours.optimiser == storages(state_tensors(optimiser))


def test_a_target_that_is_not_there_is_named_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"called q_prj; did you mean q_proj\?"):
        with_lora(training_model(unmeasured(config_of("llama", **SMALL))), LoraShape(8, ("q_prj",)))


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_fsdp_divides_as_torch_does(shards: int) -> None:
    """``fully_shard`` in a process group that sends nothing: every rank pads its part alike."""
    config = config_of("llama", **SMALL)
    with silent_group(shards) as mesh:
        model = divided(model_of(config, torch.float32), mesh)
        real = [part._local_tensor for part in model.parameters()]
    job = TrainingJob(precision=TrainingPrecision.FP32, strategy=Strategy.FSDP)
    ours = expected(config, job, shards)
    assert ours.parameters == storages(iter(real))
    assert ours.gradients == ours.parameters


def test_a_buffer_is_not_trained() -> None:
    """Such as the correction of DeepSeek-V3's router: it lies there, without a gradient and without moments."""
    from gpuherd.models.describe.description import Block

    weight, bias = Tensor("h.w", (8, 8), Role.LINEAR), Tensor("h.b", (8,), keeps_fp32=True, buffer=True)
    model = training_model(Architecture("m", "t", None, (Block("h", "layer", (weight, bias)),), 8, 8, 9, 1))
    states = states_of(model, TrainingJob(precision=TrainingPrecision.FP32))
    assert (states.parameters, states.gradients, states.optimiser) == (4 * 72, 4 * 64, 8 * 64 + 4)


def test_a_part_is_rounded_up_along_the_first_dimension() -> None:
    assert part_of((1001, 64), 8) == (126, 64)
    assert part_of((3,), 8) == (1,)
    assert part_of((1001, 64), 1) == (1001, 64)


def test_quantised_weights_take_what_they_take_for_inference() -> None:
    from gpuherd.models.memory.kv_cache import Reserve, Workload
    from gpuherd.models.memory.usage import CostTable

    read: Architecture = unmeasured(config_of("llama", **SMALL))
    for base in (Precision.INT8, Precision.NF4, Precision.NF4_DQ):
        states = states_of(training_model(read), TrainingJob(lora=LoraShape(), base=base))
        table = CostTable(read, base, Workload(), Reserve())
        assert (states.parameters, states.quantisation) == table.weights(0, len(read.blocks))


def test_small_tensors_and_embeddings_keep_float32_moments() -> None:
    from gpuherd.models.memory.training_states import optimiser_bytes

    norm, table = Tensor("norm.weight", (128,)), Tensor("embed.weight", (1000, 128), Role.EMBEDDING)
    assert optimiser_bytes(norm, norm.shape, 2, Optimiser.ADAMW_8BIT) == 8 * 128
    assert optimiser_bytes(table, table.shape, 2, Optimiser.ADAMW_8BIT) == 8 * 128_000
