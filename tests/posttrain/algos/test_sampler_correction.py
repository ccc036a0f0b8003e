"""All policy gradients weigh what they learn from by trainer over sampler, and tell how far the two are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain.algos.training_work import SAMPLING, curves, same, weights, work
from tests.posttrain.letters import Letters

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.grpo import GRPO
from gpuherd.posttrain.algos.ppo import PPO
from gpuherd.posttrain.algos.reinforce import Reinforce
from gpuherd.posttrain.algos.rloo import RLOO
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.rollout.mismatch import Correction
from gpuherd.posttrain.rollout.sampler import RolloutBackend, Sampler
from gpuherd.posttrain.types import BackendName, Policy, Precision, Problem, Rollout, Split

ALGORITHMS = [GRPO, RLOO, PPO, Reinforce]
FIGURES = {"sampler_weight", "sampler_weight_max", "sampler_kl"}


def options(kind: Any, **more: Any) -> Any:
    return kind.Options(lr=5e-3, kl_coef=0.01, batch_size=4, samples_per_prompt=4, weight_decay=0.0, **more)


@pytest.fixture(scope="module")
def rows(policy_model: Path) -> list[Rollout]:
    problems = Letters().problems(Split.TRAIN, 8, 0)
    return Sampler(Policy(str(policy_model)), Precision(), "cpu", SAMPLING).rollouts(Letters(), problems, 4)


def shifted(rows: Sequence[Rollout], shift: float) -> list[Rollout]:
    """As a sampler that gives each token ``e^-shift`` of the trainer's probability records them."""
    return [
        replace(row, log_probs=tuple(None if each is None else each - shift for each in row.log_probs)) for row in rows
    ]


def trained(kind: Any, model: Path, folder: Path, rows: Sequence[Rollout], how: Any, **change: Any) -> Path:
    kind(how).train(work(model, folder, task=None, rows=(rows,), **change))
    return folder / "model"


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_what_is_masked_teaches_nothing(kind: Any, policy_model: Path, tmp_path: Path, rows: list[Rollout]) -> None:
    masked = options(kind, online=False, sampler_correction=Correction.MASKED_TOKEN)
    far = trained(kind, policy_model, tmp_path / "far", shifted(rows, math.log(2.5)), masked)
    start, end = weights(policy_model), weights(far)
    assert all(end[name].equal(each) for name, each in start.items() if name in end) and end.keys() <= start.keys()
    lines = curves(tmp_path / "far")
    assert len(lines) == 2
    for line in lines:
        assert line["sampler_weight"] == pytest.approx(2.5, rel=1e-4)
        assert line["sampler_weight_max"] == pytest.approx(2.5, rel=1e-3)
        assert line["sampler_kl"] == pytest.approx(-math.log(2.5), rel=1e-4)
    assert all(line["approx_kl"] == pytest.approx(0, abs=1e-6) for line in lines)
    # With a larger clip the same rows are learnt from.
    near = trained(
        kind, policy_model, tmp_path / "near", shifted(rows, math.log(2.5)), replace(masked, sampler_clip=3.0)
    )
    assert not same(far, near)


def test_rows_of_vllm_are_corrected_by_token_and_others_are_not(
    policy_model: Path, tmp_path: Path, rows: list[Rollout]
) -> None:
    off, plain = shifted(rows, 0.4), options(GRPO, online=False)
    by_vllm = {"backend": BackendName.VLLM}
    made = {
        "vllm": trained(GRPO, policy_model, tmp_path / "vllm", off, plain, **by_vllm),
        "hf": trained(GRPO, policy_model, tmp_path / "hf", off, plain),
        "token": trained(
            GRPO, policy_model, tmp_path / "token", off, replace(plain, sampler_correction=Correction.TOKEN)
        ),
        "none": trained(
            GRPO,
            policy_model,
            tmp_path / "none",
            off,
            replace(plain, sampler_correction=Correction.NONE),
            **by_vllm,
        ),
    }
    assert same(made["vllm"], made["token"]) and same(made["hf"], made["none"])
    assert not same(made["vllm"], made["hf"])
    # The mismatch is told in any case; of the sampler that the trainer is, there is none at the first step.
    for name in made:
        assert curves(tmp_path / name)[0]["sampler_kl"] == pytest.approx(-0.4, abs=1e-4)
    trained(GRPO, policy_model, tmp_path / "own", rows, plain)
    assert not FIGURES & curves(tmp_path / "own")[0].keys()


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_an_online_sampler_that_is_off_is_corrected(kind: Any, policy_model: Path, tmp_path: Path) -> None:
    task = Letters()

    def roll(sampler: RolloutBackend, problems: Sequence[Problem], samples: int, stream: str) -> list[Rollout]:
        return shifted(sampler.rollouts(task, problems, samples, stream=stream), 0.7)

    how = options(kind, max_steps=1, sampler_correction=Correction.TOKEN)
    made = {}
    for name, each in {"token": how, "none": replace(how, sampler_correction=None)}.items():
        kind(each).train(work(policy_model, tmp_path / name, hooks=Hooks(roll=roll)))
        (made[name],) = curves(tmp_path / name)
        assert made[name]["sampler_weight"] == pytest.approx(math.exp(0.7), rel=1e-4)
    # All tokens have one weight, and a step of one update has its loss and gradient times that.
    if kind in (GRPO, Reinforce):
        assert made["token"]["grad_norm"] == pytest.approx(made["none"]["grad_norm"] * 2.0, rel=1e-2)


def test_a_clip_that_is_out_of_range_is_refused() -> None:
    for clip in (0.5, math.inf, math.nan):
        with pytest.raises(UsageError, match="sampler_clip="):
            options(GRPO, sampler_clip=clip)
