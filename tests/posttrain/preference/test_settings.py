"""A training in TRL's words: order of rows, micro-batches, every default that bites said."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.options import OptimiserOptions, Scheduler, Sharding, StepOptions, Strategy
from gpuherd.posttrain.preference.settings import Run, arguments, cut, digest, order, steps_for

small = st.integers(1, 40)


def run(**other: Any) -> Run:
    words: dict[str, Any] = {
        "folder": Path("somewhere"),
        "stage": "DPO training",
        "optimiser": OptimiserOptions(learning_rate=0.5, scheduler=Scheduler.COSINE, max_grad_norm=None),
        "steps": StepOptions(micro_batch_size=4),
        "batch_size": 8,
        "total_steps": 10,
    }
    return Run(**{**words, **other})


@given(rows=small, steps=small, batch=small, seed=st.integers(0, 3))
def test_every_row_comes_as_often_as_any_other(rows: int, steps: int, batch: int, seed: int) -> None:
    places = order(rows, steps, batch, seed)
    assert len(places) == steps * batch
    counts = Counter(places)
    assert max(counts.values()) - min(counts[row] for row in range(rows)) <= 1
    assert order(rows, steps + 1, batch, seed)[: len(places)] == places


def test_another_seed_and_another_epoch_have_another_order() -> None:
    first = order(20, 2, 20, 0)
    assert first[:20] != first[20:]
    assert order(20, 1, 20, 1) != first[:20]


@given(batch=small, micro=small, processes=st.integers(1, 8))
def test_micro_batches_are_of_one_size(batch: int, micro: int, processes: int) -> None:
    if batch % processes:
        with pytest.raises(UsageError, match=f"{processes} processes do not divide batch_size {batch}"):
            cut(batch, micro, processes)
        return
    found = cut(batch, micro, processes)
    assert found.micro * found.times * processes == batch
    assert 1 <= found.micro <= micro


@given(rows=small, epochs=small, batch=small)
def test_all_epochs_are_learnt_from(rows: int, epochs: int, batch: int) -> None:
    steps = steps_for(rows, epochs, batch)
    assert (steps - 1) * batch < rows * epochs <= steps * batch


def test_what_differs_has_another_digest() -> None:
    assert digest([{"a": [1, 2]}]) == digest([{"a": [1, 2]}])
    assert len({digest([{"a": [1, 2]}]), digest([{"a": [1]}, {"a": [2]}]), digest([])}) == 3


def test_defaults_that_bite_are_said() -> None:
    told = arguments(run(), 2)
    assert told["bf16"] is False
    assert told["fp16"] is False
    assert told["activation_checkpointing"] is False
    assert told["learning_rate"] == 0.5
    assert told["max_grad_norm"] == 0.0
    assert told["report_to"] == "none"
    assert told["logging_nan_inf_filter"] is False
    assert told["save_total_limit"] is None
    assert told["lr_scheduler_type"] == "cosine"
    assert (told["per_device_train_batch_size"], told["gradient_accumulation_steps"]) == (4, 1)
    assert "fsdp" not in told
    assert arguments(run(amp_dtype="bfloat16"), 1)["bf16"] is True


def test_they_are_settings_that_transformers_has() -> None:
    from transformers import TrainingArguments

    known = {each.name for each in dataclasses.fields(TrainingArguments)}
    sharded = StepOptions(strategy=Strategy.FSDP, fsdp_cpu_offload=True)
    assert set(arguments(run(steps=sharded, device="cuda"), 2)) <= known


def test_a_process_uses_one_gpu(tmp_path: Path) -> None:
    """(A computer with four GPUs is pretended by what transformers keeps of it.)"""
    from transformers import TrainingArguments

    from gpuherd.posttrain.preference.trainers import on_one_device

    settings = TrainingArguments(**arguments(run(folder=tmp_path), 1))
    assert on_one_device(settings).n_gpu in (0, 1)
    settings._n_gpu = 4
    assert on_one_device(settings).n_gpu == 1


def test_sharding() -> None:
    told = arguments(
        run(steps=StepOptions(strategy=Strategy.FSDP, fsdp_sharding_strategy=Sharding.SHARD_GRAD_OP), device="cuda"), 2
    )
    assert told["fsdp_config"]["reshard_after_forward"] is False
    with pytest.raises(UsageError, match="strategy fsdp on a CPU: accelerate, under TRL, would run ddp"):
        run(steps=StepOptions(strategy=Strategy.FSDP))


@pytest.mark.parametrize("words", [{"batch_size": 0}, {"total_steps": 0}, {"keep": 0}, {"save_every": 0}])
def test_bad_numbers(words: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(words))}=0; the least is 1"):
        run(**words)


def test_checkpoints_are_not_too_many() -> None:
    assert run(total_steps=10).checkpoint_every == 25
    assert run(total_steps=10_000).checkpoint_every == 500
    assert run(save_every=3).checkpoint_every == 3
