"""Rows for tests; and a process of several that collect together: ``torchrun … collecting.py FILE``, which prints the
problems that it was asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.runs.rows import collect_rows
from gpuherd.posttrain.types import Comparison, Problem, Rollout, Row
from gpuherd.runs.shards import in_batches
from gpuherd.runs.worker import exit_code_of


def rollout(problem: str, sample: int) -> Rollout:
    return Rollout(problem, sample, (1, 2), (3, 0), (True, True), (-0.1, None), "x", 0.5, True, True, 0, ((1, 0.5),))


def comparison(problem: str) -> Comparison:
    return Comparison(problem, (1,), (2,), (3, 0), (4, 0), "a", "b", 1.0, 0.0)


def problems(count: int) -> list[Problem]:
    return [Problem(f"p{number}", "?") for number in range(count)]


def rows_of(some: Sequence[Problem]) -> list[Row]:
    """Two of each problem, but for p2, which is dropped."""
    return [rollout(each.id, sample) for each in some for sample in range(2) if each.id != "p2"]


def main() -> None:
    asked: list[str] = []

    def ask(some: Sequence[Problem]) -> list[Row]:
        asked.extend(each.id for each in some)
        return rows_of(some)

    with DistEnv.from_environment("cpu") as world:
        collect_rows(Path(sys.argv[1]), in_batches(7, 3), problems(7), ask, world=world)
        for share in world.gather(asked):
            if world.is_main:
                print(json.dumps({"asked": share}))


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
