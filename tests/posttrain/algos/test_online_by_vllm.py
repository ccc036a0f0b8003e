"""Policies that vLLM answers for while they train, with a stand-in for vLLM in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.lm.vllm_stand_in import processes, python_with_vllm
from tests.posttrain.algos.training_work import SAMPLING, curves, same, work

from gpuherd.errors import UsageError
from gpuherd.lm.vllm import PYTHON, VllmFailed
from gpuherd.posttrain.algos.distill import Distill
from gpuherd.posttrain.algos.grpo import GRPO
from gpuherd.posttrain.algos.ppo import PPO
from gpuherd.posttrain.algos.reinforce import Reinforce
from gpuherd.posttrain.algos.rloo import RLOO
from gpuherd.posttrain.engine.options import Lora, Stopped
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.types import BackendName

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks
FIGURES = {"sampler_weight", "sampler_weight_max", "sampler_kl"}
VLLM: dict[str, Any] = {"backend": BackendName.VLLM, "sampling": replace(SAMPLING, temperature=0.8)}


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM is found in another Python; no process of it is left."""
    monkeypatch.setenv(PYTHON, str(python_with_vllm(tmp_path)))
    yield
    assert not processes(os.getpid())


def options(kind: Any, **more: Any) -> Any:
    given = {"lr": 5e-3, "batch_size": 4, "samples_per_prompt": 2, "max_steps": 3, "epochs": 2, **more}
    return kind.Options(**given)


# Each start of the process costs seconds: one algorithm is always run, the others with the slow tests.
@pytest.mark.parametrize(
    "kind", [GRPO, *(pytest.param(each, marks=pytest.mark.slow) for each in (RLOO, PPO, Reinforce))]
)
def test_vllm_samples_by_the_weights_of_each_step(kind: Any, policy_model: Path, tmp_path: Path) -> None:
    kind(options(kind)).train(work(policy_model, tmp_path / "run", **VLLM))
    lines = curves(tmp_path / "run")
    assert len(lines) == 3
    for line in lines:  # with weights of a step before there would be more than rounding between them
        assert line.keys() >= FIGURES
        assert line["sampler_weight_max"] == pytest.approx(1, abs=1e-3) and abs(line["sampler_kl"]) < 1e-4
    assert len({line["loss"] for line in lines}) == 3


@pytest.mark.slow
def test_what_is_stopped_goes_on_with_the_same_draws(policy_model: Path, tmp_path: Path) -> None:
    how = options(GRPO, lora=Lora(r=4), kl_coef=0.01)
    GRPO(how).train(work(policy_model, tmp_path / "straight", **VLLM))
    asked = iter([False, True])
    with pytest.raises(Stopped):
        GRPO(how).train(work(policy_model, tmp_path / "stopped", hooks=Hooks(stopping=lambda: next(asked)), **VLLM))
    assert len(curves(tmp_path / "stopped")) == 2
    with pytest.raises(UsageError, match="sampler"):  # transformers would draw otherwise
        GRPO(how).train(work(policy_model, tmp_path / "stopped", sampling=VLLM["sampling"]))
    GRPO(how).train(work(policy_model, tmp_path / "stopped", **VLLM))
    assert curves(tmp_path / "stopped") == curves(tmp_path / "straight")
    assert same(tmp_path / "stopped" / "model", tmp_path / "straight" / "model")


@pytest.mark.slow
def test_where_vllm_dies_the_training_ends_with_a_sentence_and_goes_on(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = options(GRPO, save_every=1)
    GRPO(how).train(work(policy_model, tmp_path / "straight", **VLLM))
    monkeypatch.setenv("STAND_IN_DIES", "60")  # in the second step
    with pytest.raises(VllmFailed, match="vLLM's process ended with exit code 3; the lines before this one say why"):
        GRPO(how).train(work(policy_model, tmp_path / "broken", **VLLM))
    assert len(curves(tmp_path / "broken")) == 1 and not processes(os.getpid())
    monkeypatch.delenv("STAND_IN_DIES")
    GRPO(how).train(work(policy_model, tmp_path / "broken", **VLLM))
    assert curves(tmp_path / "broken") == curves(tmp_path / "straight")
    assert same(tmp_path / "broken" / "model", tmp_path / "straight" / "model")


@pytest.mark.slow
def test_a_teacher_reads_what_vllm_drew(policy_model: Path, tmp_path: Path) -> None:
    how = options(Distill, teacher=str(policy_model), samples_per_prompt=1, lr=1e-7)
    Distill(how).train(work(policy_model, tmp_path / "run", **VLLM))
    lines = curves(tmp_path / "run")
    assert [line["own"] for line in lines] == [1.0] * 3
    assert all(line.keys() >= FIGURES and abs(line["sampler_kl"]) < 1e-4 for line in lines)
    assert all(abs(line["jsd"]) < 1e-3 for line in lines)


@pytest.mark.slow
def test_an_evaluation_while_it_trains_is_of_the_policy_as_it_is(policy_model: Path, tmp_path: Path) -> None:
    found: list[float | None] = []

    def evaluate(sampler: Any, _step: int) -> dict[str, float]:
        ((only,),) = sampler.continuations([("a", (5, 6), ())])
        found.append(only.log_probs[0])
        return {"eval/first": only.log_probs[0]}

    hooks = Hooks(evaluate=evaluate, evaluate_every=1)
    GRPO(options(GRPO)).train(work(policy_model, tmp_path / "run", hooks=hooks, **VLLM))
    assert len(set(found)) == 3
