"""Two users' runs on one machine: no GPU is ever used by both, by the account of the jobs themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from gpuherd.standin.machine import Machine


@pytest.mark.parametrize(
    ("jobs", "users"), [(40, 2), pytest.param(200, 2, id="acceptance"), pytest.param(100, 4, marks=pytest.mark.slow)]
)
def test_no_gpu_is_ever_used_by_two(
    new_user: Callable[[str], Any],
    four_gpus: Machine,
    find_overlaps: Callable[[list[list[str]]], list[str]],
    jobs: int,
    users: int,
) -> None:
    everyone = [new_user(f"user{i}") for i in range(users)]
    processes = [user.start([user.job(f"j{i}", 0.002 * (i % 3)) for i in range(jobs)]) for user in everyone]
    for process in processes:
        told, _ = process.communicate(timeout=100)
        assert process.returncode == 0, told[-2000:]
    lines = everyone[0].lines()
    assert find_overlaps(lines) == []
    ends = Counter(line[1] for line in lines if line[0] == "end")
    assert ends == {f"user{u}-j{i}": 1 for u in range(users) for i in range(jobs)}
    # They really shared: each had more than one GPU, and more than one had the same GPU.
    by_gpu = {line[2]: {other[1].partition("-")[0] for other in lines if other[2] == line[2]} for line in lines}
    assert len(by_gpu) == 4
    assert any(len(who) > 1 for who in by_gpu.values())


def test_the_check_itself_finds_an_overlap(find_overlaps: Callable[[list[list[str]]], list[str]]) -> None:
    lines = [["start", "a", "0,1"], ["start", "b", "1"], ["end", "a", "0,1"], ["end", "b", "1"]]
    assert find_overlaps(lines) == ["GPU 1: b began while a ran"]
