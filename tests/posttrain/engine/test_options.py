"""What options of a training are refused, and the learning rate that they mean."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.options import (
    Lora,
    OptimiserOptions,
    Scheduler,
    Sharding,
    StepOptions,
    Strategy,
    learning_rate,
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"weight_decay": -0.1},
        {"betas": (0.9, 1.0)},
        {"eps": 0.0},
        {"max_grad_norm": 0.0},
        {"warmup_steps": -1},
        {"scheduler": "polynomial"},
        {"optimizer": "lion"},
    ],
)
def test_what_no_optimiser_can_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        OptimiserOptions(**wrong)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"clear_cache_interval": 0}, "clear_cache_interval"),
        ({"strategy": "deepspeed"}, "strategy"),
        ({"fsdp_sharding_strategy": "hybrid"}, "fsdp_sharding_strategy"),
        ({"strategy": Strategy.FSDP, "dynamic_batch_size": True}, "dynamic_batch_size"),
        ({"strategy": Strategy.DDP, "fsdp_cpu_offload": True}, "fsdp_cpu_offload"),
    ],
)
def test_what_no_step_can_be_is_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        StepOptions(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"r": 0}, {"alpha": 0.0}, {"alpha": float("inf")}, {"dropout": 1.0}, {"dropout": -0.1}, {"target_modules": ()}],
)
def test_what_no_adapter_can_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}="):
        Lora(**wrong)


def test_no_shard_is_ddp() -> None:
    assert not StepOptions(strategy=Strategy.FSDP, fsdp_sharding_strategy=Sharding.NO_SHARD).shards
    assert StepOptions(strategy=Strategy.FSDP).shards


@given(st.sampled_from(Scheduler), st.integers(0, 20), st.integers(1, 50))
def test_the_learning_rate_rises_to_its_height_and_never_again(kind: Scheduler, warmup: int, total: int) -> None:
    options = OptimiserOptions(0.5, scheduler=kind, warmup_steps=warmup)
    rates = [learning_rate(options, step, total) for step in range(max(total, warmup + 1))]
    assert all(0 <= rate <= 0.5 for rate in rates)
    assert rates[: warmup or 1] == sorted(rates[: warmup or 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[min(warmup, len(rates) - 1)] == 0.5
    if kind != Scheduler.CONSTANT and total > warmup:
        assert learning_rate(options, total, total) == pytest.approx(0)


def test_half_way_down_half_a_cosine_is_half_the_rate() -> None:
    assert learning_rate(OptimiserOptions(1.0, scheduler=Scheduler.COSINE), 5, 10) == pytest.approx(0.5)
