"""The plan of a training on rows: their order, how many steps, what tells data apart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.fit import TrainPlan, digest, order, save_every_for, steps_for
from gpuherd.posttrain.engine.options import OptimiserOptions, StepOptions, Watching

small = st.integers(1, 40)


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


@given(rows=small, epochs=small, batch=small)
def test_all_epochs_are_learnt_from(rows: int, epochs: int, batch: int) -> None:
    steps = steps_for(rows, epochs, batch)
    assert (steps - 1) * batch < rows * epochs <= steps * batch


def test_what_differs_has_another_digest() -> None:
    assert digest([{"a": [1, 2]}]) == digest([{"a": [1, 2]}])
    assert len({digest([{"a": [1, 2]}]), digest([{"a": [1]}, {"a": [2]}]), digest([])}) == 3


@pytest.mark.parametrize("words", [{"batch_size": 0}, {"total_steps": 0}, {"keep": 0}, {"save_every": 0}])
def test_bad_numbers(words: dict[str, int]) -> None:
    watched = {name: value for name, value in words.items() if name in ("keep", "save_every")}
    numbers = {"batch_size": 8, "total_steps": 10, **{name: words[name] for name in words if name not in watched}}
    with pytest.raises(UsageError, match=f"DPO training: {next(iter(words))}=0; the least is 1"):
        TrainPlan(
            Path("somewhere"),
            "DPO training",
            OptimiserOptions(),
            StepOptions(),
            **numbers,
            watching=Watching(**watched),
        )


def test_checkpoints_are_not_too_many() -> None:
    assert save_every_for(10, None) == 25
    assert save_every_for(10_000, None) == 500
    assert save_every_for(10_000, 3) == 3
