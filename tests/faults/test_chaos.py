"""Queues under random faults: the short form here, the long one by ``python -m tests.faults --runs 1000``."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.chaos import one_run


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 105))])
def test_nothing_is_lost_doubled_or_left(tmp_path: Path, seed: int) -> None:
    result = one_run(seed, tmp_path / "run")
    assert result.problems == ()
    assert result.faults.total() >= 8
