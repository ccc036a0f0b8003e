"""What no step changes is held as its checkpoint has it, and gives the same numbers as in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.memory.training_groups import lonely_group
from tests.posttrain.algos.training_work import SAMPLING, curves, same, work
from tests.posttrain.letters import Letters
from tests.posttrain.preference.vowels import comparisons

from gpuherd.posttrain.algos import dpo, grpo, grpo_hf
from gpuherd.posttrain.engine import strategies
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import Lora, StepOptions, Strategy
from gpuherd.posttrain.policy_gradient import policy as training_policy
from gpuherd.posttrain.rollout import loading as sampling_loading
from gpuherd.posttrain.rollout.sampler import Sampler
from gpuherd.posttrain.types import Policy, Precision, Rollout, Split

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
    world = DistEnv.single()
    held = training_policy.reference_of(work(half_model, Path("nowhere"), precision=MIXED), None, world)
    wide = training_policy.Reference(sampling_loading.load_anew(str(half_model), MIXED, "cpu").module, False, world)
    assert dtypes(held.module) == {torch.bfloat16}
    assert dtypes(wide.module) == {torch.float32}
    rollouts = drawn(half_model)
    with torch.autocast("cpu", torch.bfloat16):
        assert held.log_probs(rollouts, 1.0, 4) == wide.log_probs(rollouts, 1.0, 4)
    # Without autocast the weights are what they are computed in.
    given = work(half_model, Path("nowhere"), precision=Precision("float32"))
    exact = training_policy.reference_of(given, None, world)
    assert dtypes(exact.module) == {torch.float32}


def test_under_an_adapter_the_base_is_as_its_checkpoint_is(half_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = Lora(target_modules=("q_proj",))
    loaded = training_policy.load_for_training(Policy(str(half_model)), MIXED, "cpu", lora)
    assert dtypes(loaded.module) == {torch.bfloat16}
    assert dtypes(loaded.module, adapter=True) == {torch.float32}
    whole = training_policy.load_for_training(Policy(str(half_model)), MIXED, "cpu", None)
    assert dtypes(whole.module) == {torch.float32}  # what is trained itself keeps small changes
    wide(monkeypatch)
    widened = training_policy.load_for_training(Policy(str(half_model)), MIXED, "cpu", lora)
    with torch.no_grad():
        for (name, one), (_, other) in zip(
            loaded.module.named_parameters(), widened.module.named_parameters(), strict=True
        ):
            if "lora_" in name:
                one.normal_(0, 0.1)
                other.copy_(one)
    gradients = []
    for module in (loaded.module, widened.module):
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(input_ids=torch.arange(5, 25).reshape(2, 10)).logits.float().logsumexp(-1).sum()
        loss.backward()
        gradients.append([loss.detach(), *(each.grad for each in module.parameters() if each.requires_grad)])
    assert len(gradients[0]) > 1
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_fsdp_divides_what_lies_under_an_adapter_as_its_checkpoint_is(
    half_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP wants one type of the weights that are trained alone; it computes in bfloat16, so the numbers are the same
    to the bit."""
    lora = Lora(target_modules=("q_proj",))
    steps, world = StepOptions(strategy=Strategy.FSDP), DistEnv(0, 1, 0, "cpu", "gloo")

    def found(wanted: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(3)
        with lonely_group():
            policy = Policy(str(half_model))
            module = training_policy.load_for_training(policy, MIXED, "cpu", lora, sharded=True).module
            assert dtypes(module, adapter=True) == {torch.float32} and dtypes(module) == {wanted}
            strategies.distributed(module, steps, world, torch.bfloat16, None, all_used=True)
            assert dtypes(module) == {wanted}
            with torch.autocast("cpu", torch.bfloat16):
                made = module(input_ids=torch.arange(5, 25).reshape(2, 10)).logits.float().logsumexp(-1)
            made.sum().backward()
            return [made.detach(), *(one.grad.full_tensor() for one in module.parameters() if one.requires_grad)]

    held = found(torch.bfloat16)
    wide(monkeypatch)
    assert all(torch.equal(one, other) for one, other in zip(held, found(torch.float32), strict=True))


@pytest.mark.parametrize("precision", [MIXED, Precision("float32")])
def test_a_divided_reference_lies_in_what_passes_compute_in(policy_model: Path, precision: Precision) -> None:
    """Of a checkpoint in float32: FSDP gathers each layer in bfloat16 under autocast. See test_reference."""
    steps, world = StepOptions(strategy=Strategy.FSDP), DistEnv(0, 1, 0, "cpu", "gloo")
    with lonely_group():
        given = work(policy_model, Path("nowhere"), precision=precision, steps=steps)
        found = training_policy.reference_of(given, None, world)
        assert found.divided and not any(each.requires_grad for each in found.module.parameters())
        assert dtypes(found.module) == {torch.bfloat16 if precision == MIXED else torch.float32}


def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before: everything in float32."""

    def widened(*args: Any, sharded: bool = False, **words: Any) -> Any:
        return sampling_loading.load_anew(*args, **words)

    monkeypatch.setattr(training_policy, "load_frozen", widened)
    monkeypatch.setattr(sampling_loading, "load_frozen", widened)


@pytest.mark.slow
def test_trainings_are_the_same_to_the_bit(half_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grpo_in(folder: Path) -> None:
        options = grpo.GRPOOptions(lr=5e-3, samples_per_prompt=4, batch_size=4, max_steps=2)
        grpo.GRPO(options).train(work(half_model, folder, precision=MIXED))

    def dpo_in(folder: Path) -> None:
        rows = comparisons(8)
        options = dpo.Options(lr=1e-3, batch_size=4, max_steps=2)
        dpo.DPO(options).train(work(half_model, folder, precision=MIXED, rows=(rows,)))

    def grpo_hf_in(folder: Path) -> None:
        options = grpo_hf.Options(lr=1e-3, batch_size=4, max_steps=2, kl_coef=0.5)
        grpo_hf.GRPOFromHumanFeedback(options).train(work(half_model, folder, precision=MIXED, rows=(comparisons(8),)))

    kinds: dict[str, Callable[[Path], None]] = {"grpo": grpo_in, "dpo": dpo_in, "grpo_hf": grpo_hf_in}
    for name, train in kinds.items():
        train(tmp_path / name / "held")
    wide(monkeypatch)
    for name, train in kinds.items():
        train(tmp_path / name / "wide")
        held = tmp_path / name / "held"
        assert curves(held) == curves(tmp_path / name / "wide")
        assert same(held / "model", tmp_path / name / "wide" / "model"), name
