"""REINFORCE learns from answers that are drawn, or from the most probable one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain.algos.training_work import curves, same, work
from tests.posttrain.letters import Letters

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.grpo import GRPO, GRPOOptions
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.algos.reinforce import Baseline, Reinforce, ReinforceOptions, compared
from gpuherd.posttrain.types import Policy, Problem, Reward

FAST = ReinforceOptions(lr=5e-3, epochs=6, batch_size=4, samples_per_prompt=8, baseline=Baseline.BATCH_MEAN)


def test_advantages() -> None:
    assert algorithm_class("REINFORCE") is Reinforce
    assert compared([1.0, 0.0, 0.5], Baseline.SHIFT) == pytest.approx([1.0, -0.1, 0.45])
    assert compared([1.0, 0.0, 0.5], Baseline.BATCH_MEAN) == pytest.approx([0.5, -0.5, 0.0])
    assert compared([1.0, 0.0], Baseline.NONE) == [1.0, 0.0]


def test_it_learns(policy_model: Path, tmp_path: Path) -> None:
    Reinforce(FAST).train(work(policy_model, tmp_path))
    lines = curves(tmp_path)
    assert lines[0]["reward"] < 0.35 < 0.6 < lines[-1]["reward"]
    assert all(line["updates"] == 1 and "kl" not in line for line in lines)


def test_the_most_probable_answer_is_learnt_from(policy_model: Path, tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    class Seen(Letters):
        def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
            asked.extend((problem.id, text) for problem, text in zip(problems, completions, strict=True))
            return [Reward(0.0) for _ in completions]

    options = ReinforceOptions(greedy=True, lr=2e-2, batch_size=8, epochs=4)
    Reinforce(options).train(work(policy_model, tmp_path, task=Seen()))
    first, last = dict(asked[:8]), dict(asked[-8:])
    assert len(asked) == 32 and first.keys() == last.keys()
    assert first != last  # a reward of 0 counts -0.1: what was most probable is not any more
    with pytest.raises(UsageError, match="one most probable answer"):
        replace(options, samples_per_prompt=2)
    with pytest.raises(UsageError, match="minibatch_size"):
        ReinforceOptions(minibatch_size=4)


def test_its_divergence_has_the_gradient_of_grpos(policy_model: Path, tmp_path: Path) -> None:
    class Flat(Letters):
        def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
            return [Reward(0.5) for _ in completions]

    Reinforce(replace(FAST, epochs=1)).train(work(policy_model, tmp_path / "far"))
    words: dict[str, Any] = {"kl_coef": 0.5, "epochs": 1, "lr": 5e-3, "batch_size": 4, "samples_per_prompt": 8}
    reference = Policy(str(tmp_path / "far/model"))
    for algorithm in (
        GRPO(GRPOOptions(**words)),
        Reinforce(ReinforceOptions(**words, baseline=Baseline.BATCH_MEAN)),
    ):
        algorithm.train(work(policy_model, tmp_path / algorithm.name, task=Flat(), reference=reference))
    assert same(tmp_path / "GRPO/model", tmp_path / "REINFORCE/model")
    assert not same(tmp_path / "GRPO/model", policy_model)
