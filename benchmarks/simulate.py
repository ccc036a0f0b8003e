"""``gpuherd simulate`` with 1,000 GPUs and 100,000 jobs, on one core; 64 jobs of 300 s beside the guides' loop; and
users who share a machine."""

from __future__ import annotations

import resource
import time
from random import Random
from typing import Any

from gpuherd.simulate import (
    Recipe,
    Rules,
    Scenario,
    drawn,
    machine,
    machines,
    simulate,
    spread,
    users,
    variants,
    works_of,
)
from gpuherd.simulate.people import with_expected_costs
from gpuherd.simulate.results import Figures
from gpuherd.simulate.workload import Mix, background

# Name, GPUs that jobs request, external users.
CASES = (
    ("one GPU a job", Mix((1,), (1.0,)), None),
    ("1, 2 and 8 GPUs a job", Mix((1, 2, 8), (80.0, 15.0, 5.0)), None),
    ("1, 2 and 8 GPUs a job, strangers", Mix((1, 2, 8), (80.0, 15.0, 5.0)), "busy=0.3,mean=2h"),
)


def run(*, quick: bool) -> dict[str, Any]:
    """Seconds of CPU by case, with the figures of the simulated run, and the most memory that this process has used."""
    count = 2_000 if quick else 100_000
    return {
        "jobs": count,
        "gpus": 1_000,
        "cases": {name: _case(count, gpus, external) for name, gpus, external in CASES},
        "max_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "64_jobs_of_300_s_on_8_gpus": _beside_the_guides(),
        "users_of_8_gpus": {
            str(number): _shared(number, count // 50) for number in ((2, 10) if quick else (2, 10, 50))
        },
    }


def _shared(number: int, count: int) -> dict[str, Any]:
    """Users of one weight with as many jobs in all, and the one who got the most and the least of what was due."""
    people = users(",".join(f"user{each}" for each in range(number)))
    recipe = Recipe(seconds=spread("exponential:5m"))
    works = works_of(
        (user, with_expected_costs(drawn(max(1, count // number), recipe, Random(user.name)))) for user in people
    )
    started = time.process_time()
    (result,) = simulate(Scenario(machines=machine("8x80GB"), works=works, users=people), variants(Rules(), []))
    of_due = [user.of_due for user in result.users if user.of_due is not None]
    return {
        "jobs": len(works),
        "cpu_seconds": round(time.process_time() - started, 2),
        **_told(result.figures),
        "least_of_due": round(min(of_due), 4),
        "most_of_due": round(max(of_due), 4),
    }


def _case(count: int, gpus: Mix[int], external: str | None) -> dict[str, Any]:
    started = time.process_time(), time.perf_counter()
    works = drawn(count, Recipe(seconds=spread("exponential:5m"), gpus=gpus), Random(0))
    scenario = Scenario(
        machines=machines("125x8x80GB"),
        works=works,
        background=None if external is None else background(external),
    )
    (result,) = simulate(scenario, variants(Rules(), []))
    spent = time.process_time() - started[0], time.perf_counter() - started[1]
    return {"cpu_seconds": round(spent[0], 2), "wall_seconds": round(spent[1], 2), **_told(result.figures)}


def _told(figures: Figures) -> dict[str, Any]:
    told = figures.to_dict()
    return {key: told[key] for key in ("done", "makespan_seconds", "over_least_possible", "utilisation")}


def _beside_the_guides() -> dict[str, Any]:
    scenario = Scenario(machines=machine("8x80GB"), works=drawn(64, Recipe(seconds=spread("300")), Random(0)))
    results = simulate(scenario, variants(Rules(), ["policy=gpuherd,guides"]))
    return {result.variant.rules.policy: _told(result.figures) for result in results}
