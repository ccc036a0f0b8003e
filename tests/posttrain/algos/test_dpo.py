"""DPO compares the policy's samples, or right answers with wrong ones, and learns from that."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain.preference.vowels import ADAPTER, SAMPLING, Vowels, collecting, comparisons, training

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.dpo import DPO, Pairing
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.rollout.sampler import Sampler
from gpuherd.posttrain.types import Comparison, Policy, Precision, Reward

# PEFT asks transformers by a name that is old there.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_best_and_the_worst_of_each_problem(policy_model: Path) -> None:
    dpo = DPO(DPO.Options(samples_per_example=6))
    work = collecting(policy_model, 4)
    rows = list(dpo.collect(work))
    assert rows
    for each in rows:
        assert isinstance(each, Comparison)
        assert each.chosen_reward is not None
        assert each.rejected_reward is not None
        assert each.chosen_reward > each.rejected_reward
    parts = [list(dpo.collect(dataclasses.replace(work, problems=[problem]))) for problem in work.problems]
    assert rows == [row for part in parts for row in part]


def test_all_alike_is_counted(policy_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Generous(Vowels):
        def rewards(self, problems: Any, completions: Any) -> list[Reward]:
            del problems
            return [Reward(1.0) for _ in completions]

    with caplog.at_level(logging.INFO, logger="gpuherd"):
        assert list(DPO().collect(collecting(policy_model, 3, task=Generous()))) == []
    assert "3 of 3 problems: all samples earned the same; nothing to compare" in caplog.text


def test_right_answers_against_wrong_samples(policy_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    dpo = DPO(DPO.Options(pairing=Pairing.ANSWER, max_tries=5))
    rows = list(dpo.collect(collecting(policy_model, 3, task=Vowels(right=True))))
    assert [(each.problem, each.chosen) for each in rows if isinstance(each, Comparison)] == [
        ("p0", "aeiou0"),
        ("p1", "aeiou1"),
        ("p2", "aeiou2"),
    ]

    class Pleased(Vowels):
        def rewards(self, problems: Any, completions: Any) -> list[Reward]:
            del problems
            return [Reward(1.0, True) for _ in completions]

    with caplog.at_level(logging.INFO, logger="gpuherd"):
        assert list(dpo.collect(collecting(policy_model, 3, task=Pleased()))) == []
    assert "3 of 3 problems: no sample of 5 was wrong" in caplog.text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"beta": 0.0}, "beta=0.0; it is above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5; it is from 0 to under 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "label_smoothing with loss_type=ipo: only sigmoid knows it"),
        ({"rpo_weight": -1.0}, "rpo_weight=-1.0; the least is 0"),
        ({"samples_per_example": 1}, "samples_per_example=1; a comparison takes 2"),
        ({"max_tries": 0}, "max_tries=0"),
    ],
)
def test_bad_options(words: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        DPO.Options(**words)


@pytest.mark.slow
def test_rounds(policy_model: Path, tmp_path: Path) -> None:
    """The last round's comparisons alone, or those of all."""
    rows = list(DPO().collect(collecting(policy_model, 6)))
    work = dataclasses.replace(training(policy_model, [], tmp_path), rows=[rows[:2], rows[2:5]])
    for all_rounds, steps in ((False, 3), (True, 5)):
        folder = tmp_path / str(all_rounds)
        DPO(DPO.Options(batch_size=1, all_rounds=all_rounds)).train(dataclasses.replace(work, folder=folder))
        assert len(read_curves(folder)) == steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "times"),
    [({}, 2), ({"loss_type": "ipo"}, 2), ({"rpo_weight": 1.0}, 2), ({"lora": ADAPTER, "lr": 1e-2}, 1.5)],
    ids=["sigmoid", "ipo", "rpo", "adapter"],
)
def test_it_learns(words: dict[str, Any], times: float, policy_model: Path, tmp_path: Path) -> None:
    """So many times as many vowels as before, after two rounds of which the second starts from the first."""
    dpo = DPO(DPO.Options(**{"lr": 3e-3, "epochs": 6, "batch_size": 8, "samples_per_example": 8, **words}))
    policy = Policy(str(policy_model))
    for number in range(2):
        work = dataclasses.replace(collecting(policy_model, 24), policy=policy, round=number)
        rows = list(dpo.collect(work))
        policy = dpo.train(training(policy_model, rows, tmp_path / str(number), policy=policy, round=number))
    before, after = (reward_of(each) for each in (Policy(str(policy_model)), policy))
    assert after > times * before
    # The reference is what everything began with, in every round: the second begins away from it.
    first, second = (read_curves(tmp_path / each)[0] for each in ("0", "1"))
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert abs(second["rewards/margins"]) > 1e-3


@pytest.mark.slow
def test_an_adapters_dropout_is_used(policy_model: Path, tmp_path: Path) -> None:
    """The model's own is off, and that of the adapter stays."""
    losses = []
    for share in (0.0, 0.9):
        lora = dataclasses.replace(ADAPTER, dropout=share)
        options = DPO.Options(lr=1e-2, batch_size=8, epochs=2, lora=lora)
        DPO(options).train(training(policy_model, comparisons(), tmp_path / str(share)))
        losses.append([line["loss"] for line in read_curves(tmp_path / str(share))])
    assert losses[0][0] == pytest.approx(losses[1][0])  # a new adapter changes nothing yet
    assert losses[0][1] != pytest.approx(losses[1][1], rel=1e-4)


def reward_of(policy: Policy) -> float:
    """The mean over 160 samples."""
    task = Vowels()
    sampler = Sampler(policy, Precision(), "cpu", dataclasses.replace(SAMPLING, batch_size=160, seed=9))
    found = sampler.rollouts(task, collecting(Path(policy.model), 8).problems, 20)
    return sum(each.reward for each in found) / len(found)
