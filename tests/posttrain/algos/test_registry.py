"""Algorithms register themselves, and say all that others have to know of them."""

from __future__ import annotations

from typing import ClassVar

import pytest

from gpuherd.errors import UsageError
from gpuherd.models.memory.training_job import Method
from gpuherd.posttrain.algos.grpo import GRPO, GRPOOptions
from gpuherd.posttrain.algos.registry import algorithms, canonical, register
from gpuherd.posttrain.engine.options import Lora
from gpuherd.posttrain.policy_gradient.rollout_trainer import deciding


def test_a_name_is_taken_once() -> None:
    assert "QSharp" in algorithms()

    class Copy(GRPO):
        name: ClassVar[str] = "Q#"

    with pytest.raises(ValueError, match="there is an algorithm 'q#' already"):
        register(Copy)
    assert "Q#" not in algorithms()


def test_names_and_their_spellings() -> None:
    assert [canonical(each) for each in ("q#", "Q#-HF", "grpo_hf", "gkd", "rloo")] == [
        "QSharp", "QSharp-HF", "GRPO-HF", "Distill", "RLOO",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"algorithm 'rlo' is none of CD, .*did you mean RLOO\?"):
        canonical("rlo")
    with pytest.raises(UsageError, match="rpo_weight"):
        canonical("rpo")


def test_what_algorithms_say_of_themselves() -> None:
    known = algorithms().values()
    assert {each.name for each in known if each.off_policy} == {"QSharp", "QSharp-HF", "PITA", "CD", "DPO", "Distill"}
    assert {each.name for each in known if each.guided} == {"QSharp", "QSharp-HF", "PITA", "CD"}
    on_policy = {"GRPO", "GRPO-HF", "PPO", "REINFORCE", "RLOO", "RLCR"}
    assert {each.name for each in known if each.on_policy} == on_policy
    assert {each.name for each in known if each.memory is Method.GRPO} == on_policy - {"PPO"} | {"Distill"}
    assert {each.name: each.memory for each in known if each.name in ("PPO", "DPO", "SFT", "PITA")} == {
        "PPO": Method.PPO, "DPO": Method.DPO, "SFT": Method.SFT, "PITA": Method.SFT,
    }  # fmt: skip


def test_checkpoints_of_before_an_option_came_go_on_where_it_is_at_its_default() -> None:
    plain = deciding(GRPOOptions(lora=Lora(r=4)))
    assert plain["clip_range"] == 0.2 and plain["lora"]["r"] == 4
    assert not {"clip_range_c", "save_every"} & plain.keys()
    assert deciding(GRPOOptions(clip_range_c=3.0))["clip_range_c"] == 3.0
