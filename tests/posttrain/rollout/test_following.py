"""vLLM's copy of a policy in training, with a stand-in for vLLM in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lm.vllm_stand_in import processes, python_with_vllm
from tests.posttrain.letters import Letters

from gpuherd.errors import UsageError
from gpuherd.lm.vllm import PYTHON, VllmFailed
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import Lora
from gpuherd.posttrain.policy_gradient.policy import load_for_training
from gpuherd.posttrain.rollout import following, vllm
from gpuherd.posttrain.rollout.following import FollowingSampler, merged_weights
from gpuherd.posttrain.rollout.sampler import Continuation, Prefix
from gpuherd.posttrain.types import Policy, Precision, Problem, Sampling, Split

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks
HOW = Sampling(max_new_tokens=4, seed=3, temperature=0.7)
PROMPT = (5, 6, 7)
FP32 = Precision("float32")


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM is found in another Python; no process of it is left, and no file in memory."""
    monkeypatch.setenv(PYTHON, str(python_with_vllm(tmp_path)))
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(following, "_MEMORY", tmp_path / "memory")
    yield
    assert not processes(os.getpid())
    assert not list((tmp_path / "memory").iterdir())


def trained(model: Path, lora: Lora | None = None) -> Any:
    return load_for_training(Policy(str(model)), FP32, "cpu", lora).module


def following_of(model: Path, module: Any, folder: Path) -> FollowingSampler:
    problems: list[Problem] = list(Letters().problems(Split.TRAIN, 4, 0))
    return FollowingSampler(Policy(str(model)), module, FP32, DistEnv.single(), HOW, problems, folder)


def moved(module: Any) -> None:
    """Changes all that is trained, as an optimiser step does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in module.parameters():
            if each.requires_grad:
                each += 0.1 * torch.randn(each.shape, generator=generator)


def gap(module: Any, answers: tuple[Continuation, ...], prompt: tuple[int, ...] = PROMPT) -> float:
    """How far recorded log-probs are from a module's."""
    found = []
    module.eval()
    for each in answers:
        with torch.no_grad():
            logits = module(torch.tensor([[*prompt, *each.ids]])).logits[0, len(prompt) - 1 : -1]
        law = (logits / HOW.temperature).log_softmax(-1)
        found.append((law.gather(1, torch.tensor(each.ids)[:, None])[:, 0] - torch.tensor(each.log_probs)).abs().max())
    return float(max(found))


@pytest.mark.parametrize("lora", [None, pytest.param(Lora(r=4), marks=pytest.mark.slow)])
def test_vllm_answers_as_the_policy_is(policy_model: Path, tmp_path: Path, lora: Lora | None) -> None:
    module = trained(policy_model, lora)
    sampler = following_of(policy_model, module, tmp_path)
    first = []
    for version in range(3):
        sampler.follow(version)
        (answers,) = sampler.continuations([Prefix("a", PROMPT)], 3)
        assert gap(module, answers) < 1e-4
        first.append(answers)
        (child,) = processes(os.getpid())  # it starts once
        moved(module)
        assert gap(module, answers) > 1e-3
    assert len({each[0].log_probs for each in first}) == 3
    sampler.follow(2)  # it has these weights, of the module before it was moved
    assert sampler.continuations([Prefix("a", PROMPT)], 3) == [first[-1]]
    assert processes(os.getpid()) == [child]
    sampler.release()


@pytest.mark.slow
def test_vllm_sleeps_while_the_policy_learns_on_the_gpu_that_they_share(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is told to be a GPU; all lies on the CPU."""
    monkeypatch.setattr(vllm, "planned_share", lambda *_: 0.5)
    module, problems = trained(policy_model), list(Letters().problems(Split.TRAIN, 4, 0))
    world = DistEnv.single("cuda:0")
    sampler = FollowingSampler(Policy(str(policy_model)), module, FP32, world, HOW, problems, tmp_path)
    sampler.sleep()  # it has not begun
    sampler.follow(0)
    (child,) = processes(os.getpid())
    before = sampler.continuations([Prefix("a", PROMPT)], 3)
    sampler.sleep()
    with pytest.raises(VllmFailed, match="vLLM sleeps"):
        sampler.continuations([Prefix("a", PROMPT)], 3)
    sampler.follow(0)  # weights that it had are handed over again
    assert sampler.continuations([Prefix("a", PROMPT)], 3) == before
    sampler.sleep()
    moved(module)
    sampler.follow(1)
    (answers,) = sampler.continuations([Prefix("a", PROMPT)], 3)
    assert gap(module, answers) < 1e-4
    assert processes(os.getpid()) == [child]
    sampler.release()


@pytest.mark.slow
def test_on_a_gpu_that_it_can_not_leave_it_is_told(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "planned_share", lambda *_: 0.5)
    monkeypatch.setenv("STAND_IN_AWAKE", "1")
    world, module = DistEnv.single("cuda:0"), trained(policy_model)
    sampler = FollowingSampler(Policy(str(policy_model)), module, FP32, world, HOW, (), tmp_path)
    sampler.follow(0)
    assert "vLLM can't sleep on this platform" in caplog.text
    before = sampler.continuations([Prefix("a", PROMPT)], 3)
    sampler.sleep()
    assert sampler.continuations([Prefix("a", PROMPT)], 3) == before
    sampler.release()


@pytest.mark.slow
def test_a_conversation_that_grows_is_answered_by_the_same_weights(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_STEP", 8)
    module = trained(policy_model)
    moved(module)
    sampler = following_of(policy_model, module, tmp_path)
    sampler.follow(0)
    (child,) = processes(os.getpid())
    long = PROMPT * 5
    (answers,) = sampler.continuations([Prefix("a", long)], 3)
    assert processes(os.getpid()) != [child]
    assert gap(module, answers, long) < 1e-4
    sampler.release()


@pytest.mark.slow
def test_files_that_find_no_room_in_memory_go_beside_the_training(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(following, "_SPARE", 1e18)
    module = trained(policy_model)
    moved(module)
    sampler = following_of(policy_model, module, tmp_path / "training")
    (tmp_path / "training").mkdir()
    sampler.follow(0)
    assert "has no room for the policy's weights" in caplog.text
    (answers,) = sampler.continuations([Prefix("a", PROMPT)], 3)
    assert gap(module, answers) < 1e-4
    assert not list((tmp_path / "training").iterdir())
    sampler.release()


def test_what_somebody_else_put_in_the_way_is_neither_used_nor_removed(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, planted, training = trained(policy_model), tmp_path / "elsewhere", tmp_path / "training"
    planted.mkdir()
    monkeypatch.setattr(following, "_MEMORY", tmp_path)
    with following._in_memory(training, 0, module) as folder:
        assert folder.parent == tmp_path
    folder.symlink_to(planted)
    with following._in_memory(training, 0, module) as other:
        assert other.parent == training
    assert "somebody else's" in caplog.text and folder.is_symlink() and planted.is_dir()


@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj", "embed_tokens", "lm_head")])
def test_an_adapter_is_merged_into_a_copy_alone(policy_model: Path, targets: tuple[str, ...] | None) -> None:
    module = trained(policy_model, Lora(r=4, target_modules=targets))
    moved(module)
    before = {name: each.clone() for name, each in module.state_dict().items()}
    found = merged_weights(module.get_base_model(), "float32")
    after = module.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(each, after[name]) for name, each in before.items())
    wanted = module.merge_and_unload().state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(each, wanted[name]) for name, each in found.items())


def test_numbers_are_written_in_vllms_dtype(policy_model: Path, tmp_path: Path) -> None:
    module = trained(policy_model)
    for precision, dtype in (
        (Precision(), "float32"),  # the checkpoint's
        (Precision("float32", "bfloat16"), "bfloat16"),  # passes compute in it
        (Precision("bfloat16"), "bfloat16"),
    ):
        made = FollowingSampler(Policy(str(policy_model)), module, precision, DistEnv.single(), HOW, (), tmp_path)
        assert made._dtype == dtype
    assert {each.dtype for each in merged_weights(module, "bfloat16").values()} == {torch.bfloat16}


def test_quantised_weights_are_refused(policy_model: Path, tmp_path: Path) -> None:
    module = trained(policy_model)
    module.is_quantized = True
    with pytest.raises(UsageError, match="are quantised, and can't be handed over"):
        following_of(policy_model, module, tmp_path)
