"""An adapter on quantised weights (QLoRA): every algorithm that trains adapters trains one, and it fits the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain.algos.training_work import curves, same, weights, work
from tests.posttrain.preference.vowels import comparisons, episodes

from gpuherd.errors import UsageError
from gpuherd.models.memory.weights import Precision as Stored
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.engine.checkpoints import differing
from gpuherd.posttrain.engine.options import Lora, Quantization, StepOptions, Stopped, Strategy
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.policy_gradient.policy import load_for_training
from gpuherd.posttrain.rollout.loading import load_anew
from gpuherd.posttrain.runs.blocks import ModelPair
from gpuherd.posttrain.runs.memory import TrainingTask
from gpuherd.posttrain.runs.settings import algorithm_configs
from gpuherd.posttrain.types import Policy, Precision

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
TARGETS = ("q_proj", "up_proj")
NF4 = Lora(r=4, target_modules=TARGETS, quantization="nf4")  # type: ignore[arg-type]
FROM_ROWS = {"lr": 1e-2, "batch_size": 4, "epochs": 2, "max_steps": 3}
SAMPLED = {"lr": 1e-2, "samples_per_prompt": 4, "batch_size": 4, "epochs": 2, "max_steps": 3}
# Those that learn from rows, from comparisons, and from answers of their own, with and without values.
ALGORITHMS: dict[str, tuple[dict[str, Any], Any]] = {
    "SFT": (FROM_ROWS, episodes),
    "DPO": (FROM_ROWS, comparisons),
    "GRPO": ({**SAMPLED, "kl_coef": 0.1}, None),
    "PPO": ({**SAMPLED, "samples_per_prompt": 1, "kl_coef": 0.1}, None),
}


def trained(name: str, model: Path, folder: Path, hooks: Hooks | None = None) -> Policy:
    kind, (words, rows) = algorithm_class(name), ALGORITHMS[name]
    made = work(model, folder, hooks=hooks, rows=() if rows is None else (rows(),))
    found: Policy = kind(kind.Options(**words, lora=NF4)).train(made)
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_adapter_is_trained_that_fits_the_model(name: str, policy_model: Path, tmp_path: Path) -> None:
    policy = trained(name, policy_model, tmp_path)
    assert len(curves(tmp_path)) == 3
    saved = weights(tmp_path / "model")
    assert saved and all("lora_" in each for each in saved)
    assert any(each.abs().max() > 0 for each_name, each in saved.items() if "lora_B" in each_name)
    # Loaded on the weights as they are, and merged into them.
    assert policy == Policy(str(policy_model), adapter=str(tmp_path / "model"))
    ids = torch.arange(4, 24).reshape(2, 10)
    whole = load_anew(policy.model, Precision(), "cpu").module
    loaded = load_anew(policy.model, Precision(), "cpu", adapter=policy.adapter).module
    with torch.no_grad():
        before, after = (each(input_ids=ids).logits for each in (whole, loaded))
        merged = loaded.merge_and_unload()(input_ids=ids).logits
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(merged, after, rtol=1e-3, atol=1e-3)


def test_a_resumed_one_is_as_a_straight_one(policy_model: Path, tmp_path: Path) -> None:
    trained("SFT", policy_model, tmp_path / "straight")
    left = iter([False, True])
    with pytest.raises(Stopped):
        trained("SFT", policy_model, tmp_path / "halted", Hooks(stopping=left.__next__))
    trained("SFT", policy_model, tmp_path / "halted")
    assert same(tmp_path / "straight" / "model", tmp_path / "halted" / "model")


@pytest.mark.parametrize(
    ("quantization", "kind", "size"),
    [("nf4", "Params4bit", 0.5), ("nf4-dq", "Params4bit", 0.5), ("int8", "Int8Params", 1)],
)
def test_the_weights_under_it_are_codes(quantization: Any, kind: str, size: float, policy_model: Path) -> None:
    lora = Lora(r=4, target_modules=TARGETS, quantization=quantization)
    module = load_for_training(Policy(str(policy_model)), Precision("float32", "bfloat16"), "cpu", lora).module
    base = module.get_submodule("base_model.model.model.layers.0.mlp.up_proj.base_layer")
    assert type(base.weight).__name__ == kind
    assert base.weight.nbytes == size * base.in_features * base.out_features
    assert {weight.dtype for weight in module.parameters() if weight.requires_grad} == {torch.float32}


def test_gradients_are_there_after_an_answer(policy_model: Path) -> None:
    """bitsandbytes repacks 4-bit codes in evaluation mode on some processors; gradients would end there."""
    module = load_for_training(Policy(str(policy_model)), Precision(), "cpu", NF4).module
    ids = torch.arange(4, 24).reshape(2, 10)
    gradients = []
    for _ in range(2):
        module.train()
        module(input_ids=ids).logits.float().logsumexp(-1).sum().backward()
        gradients.append({name: each.grad.clone() for name, each in module.named_parameters() if each.requires_grad})
        module.zero_grad()
        with torch.no_grad():
            module.eval()(input_ids=ids)
    first, second = gradients
    assert all(torch.equal(each, second[name]) for name, each in first.items())
    assert all(each.abs().max() > 0 for name, each in first.items() if "lora_B" in name)


def test_the_plan_counts_codes() -> None:
    def job(lora: Lora, strategy: Strategy = Strategy.DDP) -> Any:
        (choice,) = algorithm_configs({"SFT": {"lora": {"quantization": lora.quantization}, "gpus": 2}}, {})
        task = TrainingTask(
            name="x", choice=choice, family=ModelPair("gpt2"), loaded=Precision(), steps=StepOptions(strategy=strategy),
            cards=(), gpus=2, prompt_tokens=8, new_tokens=8, sampled=1, pairs=1,
        )  # fmt: skip
        return task.job(Stored.BF16, Stored.BF16, chunked=False)

    assert job(NF4).base is Stored.NF4 and job(Lora()).base is Stored.BF16
    with pytest.raises(UsageError, match=r"lora.quantization=nf4 with strategy fsdp"):
        job(NF4, Strategy.FSDP)


def test_what_can_not_be_is_refused(policy_model: Path) -> None:
    with pytest.raises(UsageError, match="quantization='fp4'; it is one of int8, nf4, nf4-dq"):
        Lora(quantization="fp4")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"lora.quantization=nf4 with strategy fsdp"):
        load_for_training(Policy(str(policy_model)), Precision(), "cpu", NF4, sharded=True)


def test_settings_name_it() -> None:
    options = read(algorithm_class("GRPO").Options, {"lora": {"quantization": "nf4-dq"}}, "algos.GRPO")
    assert options.lora.quantization is Quantization.NF4_DQ
    with pytest.raises(UsageError, match=r"algos.GRPO.lora.quantization"):
        read(algorithm_class("GRPO").Options, {"lora": {"quantization": "fp4"}}, "algos.GRPO")


def test_trainings_of_versions_without_it_go_on() -> None:
    before = {"options": {"lr": 0.1, "lora": {"r": 8}}}
    assert differing({"options": {"lr": 0.1, "lora": {"r": 8, "quantization": None}}}, before) == []
    assert differing({"options": {"lr": 0.1, "lora": {"r": 8, "quantization": "nf4"}}}, before) == ["options"]
