"""CD: the reference's answers alone are learnt from, and their expected reward guides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from tests.posttrain.guidance import exact
from tests.posttrain.guidance.letters import Letters, collecting, training

from gpuherd.lm.guidance.guide import Mode, read_form
from gpuherd.posttrain.algos.cd import CDOptions, ControlledDecoding
from gpuherd.posttrain.engine.options import Scheduler
from gpuherd.posttrain.types import Rollout

OPTIONS = CDOptions(
    samples_per_example=64,
    epochs=6,
    batch_size=32,
    lr=5e-3,
    scheduler=Scheduler.LINEAR,
    warmup_steps=10,
    validation_share=0.0,
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_expected_reward_is_learnt_and_guides(reference: Path, small: Path, tmp_path: Path) -> None:
    task = Letters()
    algorithm = ControlledDecoding(OPTIONS)
    rows = list(algorithm.collect(collecting(reference, task)))
    policy = algorithm.train(training(reference, small, tmp_path, [rows]))
    assert policy.guide is not None
    assert policy.guide.mode is Mode.EXPECTATION
    assert read_form(tmp_path / "model").loss == "mse"
    trees = exact.trees(reference, task)
    assert fmean(exact.error(policy.guide.classifier, tree) for tree in trees.values()) < 0.17
    plain = fmean(tree.worth(()) for tree in trees.values())
    assert fmean(exact.guided_reward(policy.guide, tree) for tree in trees.values()) > plain + 0.15


def test_a_second_round_is_of_the_reference_too(reference: Path, small: Path, tmp_path: Path) -> None:
    task = Letters()
    algorithm = ControlledDecoding(replace(OPTIONS, samples_per_example=4, epochs=1))
    rows = list(algorithm.collect(collecting(reference, task)))
    policy = algorithm.train(training(reference, small, tmp_path, [rows]))
    assert policy.guide is not None and policy.guide.mode is Mode.EXPECTATION
    assert read_form(tmp_path / "model").loss == "mse"
    more = list(algorithm.collect(collecting(reference, task, policy=policy, number=1)))
    unguided = list(algorithm.collect(collecting(reference, task, number=1)))
    assert more == unguided
    assert all(isinstance(each, Rollout) and each.rolled_in == 0 for each in more)
    assert [each.ids for each in more] != [each.ids for each in rows]  # type: ignore[union-attr]
