"""What no step changes is held as its checkpoint has it, and gives the same numbers as in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain.algos.training_work import SAMPLING, curves, same, work
from tests.posttrain.letters import Letters

from gpuherd.posttrain.algorithm import Precision
from gpuherd.posttrain.algos import dpo, grpo
from gpuherd.posttrain.policy import Policy
from gpuherd.posttrain.policy_gradient import loading
from gpuherd.posttrain.problem import Split
from gpuherd.posttrain.rollout import Rollout
from gpuherd.posttrain.sampling import loading as sampling_loading
from gpuherd.posttrain.sampling.sampler import Sampler
from gpuherd.posttrain.training.options import Lora

# PEFT asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
MIXED = Precision("float32", "bfloat16")


@pytest.fixture(scope="module")
def half_model(policy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy in bfloat16, as models of some size are. Read only."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("half")
    AutoModelForCausalLM.from_pretrained(policy_model, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy_model).save_pretrained(folder)
    return folder


def drawn(model: Path) -> list[Rollout]:
    task = Letters()
    sampler = Sampler(Policy(str(model)), Precision(), "cpu", SAMPLING)
    return list(sampler.rollouts(task, task.problems(Split.TRAIN, 4, 0), 2))


def dtypes(module: Any, *, adapter: bool = False) -> set[torch.dtype]:
    return {weight.dtype for name, weight in module.named_parameters() if ("lora_" in name) == adapter}


def test_a_reference_is_as_its_checkpoint_is_and_says_the_same(half_model: Path) -> None:
    policy, other = Policy(str(half_model)), Policy("another")
    held = loading.reference_of(policy, other, None, MIXED, "cpu")
    wide = loading.Reference(sampling_loading.load_anew(str(half_model), MIXED, "cpu").module, False, "cpu")
    assert dtypes(held.module) == {torch.bfloat16}
    assert dtypes(wide.module) == {torch.float32}
    rollouts = drawn(half_model)
    with torch.autocast("cpu", torch.bfloat16):
        assert held.log_probs(rollouts, 1.0, 4) == wide.log_probs(rollouts, 1.0, 4)
    # Without autocast the weights are what they are computed in.
    exact = loading.reference_of(policy, other, None, Precision("float32"), "cpu")
    assert dtypes(exact.module) == {torch.float32}


def test_under_an_adapter_the_base_is_as_its_checkpoint_is(half_model: Path) -> None:
    lora = Lora(target_modules=("q_proj",))
    loaded = loading.load_for_training(Policy(str(half_model)), MIXED, "cpu", lora)
    assert dtypes(loaded.module) == {torch.bfloat16}
    assert dtypes(loaded.module, adapter=True) == {torch.float32}
    divided = loading.load_for_training(Policy(str(half_model)), MIXED, "cpu", lora, sharded=True)
    with torch.no_grad():
        for (name, one), (_, other) in zip(
            loaded.module.named_parameters(), divided.module.named_parameters(), strict=True
        ):
            if "lora_" in name:
                one.normal_(0, 0.1)
                other.copy_(one)
    gradients = []
    for module in (loaded.module, divided.module):
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(input_ids=torch.arange(5, 25).reshape(2, 10)).logits.float().logsumexp(-1).sum()
        loss.backward()
        gradients.append([loss.detach(), *(each.grad for each in module.parameters() if each.requires_grad)])
    assert len(gradients[0]) > 1
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    # What is trained itself keeps small changes, and FSDP wants one type of all.
    whole = loading.load_for_training(Policy(str(half_model)), MIXED, "cpu", None)
    assert dtypes(whole.module) == dtypes(divided.module) == {torch.float32}


def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before: everything in float32."""
    monkeypatch.setattr(loading, "load_frozen", sampling_loading.load_anew)
    monkeypatch.setattr(sampling_loading, "load_frozen", sampling_loading.load_anew)


@pytest.mark.slow
def test_trainings_are_the_same_to_the_bit(half_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grpo_in(folder: Path) -> None:
        options = grpo.GRPOOptions(lr=5e-3, samples_per_prompt=4, batch_size=4, max_steps=2)
        grpo.GRPO(options).train(work(half_model, folder, precision=MIXED))

    def dpo_in(folder: Path) -> None:
        from tests.posttrain.preference.vowels import comparisons

        rows = comparisons(8)
        options = dpo.Options(lr=1e-3, batch_size=4, max_steps=2)
        dpo.DPO(options).train(work(half_model, folder, precision=MIXED, rows=(rows,)))

    kinds: dict[str, Callable[[Path], None]] = {"grpo": grpo_in, "dpo": dpo_in}
    for name, train in kinds.items():
        train(tmp_path / name / "held")
    wide(monkeypatch)
    for name, train in kinds.items():
        train(tmp_path / name / "wide")
        held = tmp_path / name / "held"
        assert curves(held) == curves(tmp_path / name / "wide")
        assert same(held / "model", tmp_path / name / "wide" / "model"), name
