"""PPO learns with its value head, goes on exactly, and stops where it has gone far enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.posttrain.algos.training_work import curves, same, weights, work

from gpuherd.errors import BadModel, UsageError
from gpuherd.posttrain.algos.ppo import PPO, PPOOptions
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.engine.options import Stopped
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.types import Policy

FAST = PPOOptions(
    lr=5e-3, kl_coef=0.01, epochs=4, batch_size=8, samples_per_prompt=8, minibatch_size=32, num_ppo_epochs=2
)


def test_it_learns_and_so_does_its_value_head(policy_model: Path, tmp_path: Path) -> None:
    assert algorithm_class("PPO") is PPO
    policy = PPO(replace(FAST, epochs=8)).train(work(policy_model, tmp_path))

    assert policy == Policy(str(tmp_path / "model"))
    assert not [name for name in weights(tmp_path / "model") if "value_head" in name or name.startswith("policy.")]
    assert weights(tmp_path / "critic")["weight"].abs().max() > 0
    lines = curves(tmp_path)
    assert lines[0]["reward"] < 0.35 < 0.55 < lines[-1]["reward"]
    assert lines[0]["value"] == 0 and lines[-1]["value"] == pytest.approx(lines[-1]["reward"], abs=0.2)
    assert max(line["explained_variance"] for line in lines) > 0
    assert lines[0]["divergence"] == 0 < lines[-1]["divergence"]
    assert [line["updates"] for line in lines] == [4.0] * 8


def test_a_training_that_was_stopped_goes_on_exactly(policy_model: Path, tmp_path: Path) -> None:
    options = replace(FAST, epochs=3, kl_target=0.5, kl_horizon=300)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    PPO(options).train(work(policy_model, straight))
    with pytest.raises(Stopped):
        PPO(options).train(work(policy_model, broken, hooks=Hooks(stopping=lambda: True)))
    PPO(options).train(work(policy_model, broken))

    assert same(straight / "model", broken / "model") and same(straight / "critic", broken / "critic")
    assert curves(straight) == curves(broken)
    # The weight of the divergence is moved: down at first, as there is none yet.
    weights_of_kl = [line["kl_coef"] for line in curves(straight)]
    assert weights_of_kl[1] == pytest.approx(0.01 * (1 - 0.2 * 64 / 300)) and len(set(weights_of_kl)) == 3


@pytest.mark.slow
def test_the_next_round_has_the_value_head_of_the_one_before(policy_model: Path, tmp_path: Path) -> None:
    first = PPO(FAST).train(work(policy_model, tmp_path / "first"))
    PPO(replace(FAST, epochs=1)).train(work(policy_model, tmp_path / "second", policy=first, round=1))
    assert curves(tmp_path / "second")[0]["value"] == pytest.approx(curves(tmp_path / "first")[-1]["value"], rel=0.5)
    assert curves(tmp_path / "second")[0]["value"] > 0

    (tmp_path / "first/critic/value_head.safetensors").write_bytes(b"damaged")
    with pytest.raises(BadModel, match="no value head of this model"):
        PPO(FAST).train(work(policy_model, tmp_path / "third", policy=first, round=1))


def test_it_goes_no_further_than_the_target(policy_model: Path, tmp_path: Path) -> None:
    options = replace(FAST, lr=2e-2, num_ppo_epochs=8, target_kl=0.02, epochs=2, kl_coef=0.0)
    PPO(options).train(work(policy_model, tmp_path))
    for line in curves(tmp_path):
        assert line["passes"] < 8 and line["updates"] == 2 * line["passes"]
        assert line["approx_kl"] > 0.02
        assert "divergence" not in line


@pytest.mark.parametrize(
    "wrong", [{"gamma": 1.5}, {"gae_lambda": -0.1}, {"num_ppo_epochs": 0}, {"value_loss_coef": 0.0},
              {"kl_target": 1.0, "kl_coef": 0.0}],
)  # fmt: skip
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        PPOOptions(**wrong)  # type: ignore[arg-type]
