"""A user alone: histories are the same, to the microsecond, as before several users could share a machine.

The digests were recorded with the engine as it was then. Who changes what a run of one user does on purpose records
them anew: ``python -m tests.simulate.test_recorded`` prints them.
"""

from __future__ import annotations

import hashlib
from random import Random

import pytest

from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.simulate import History, Recipe, Rules, Scenario, drawn, machine, machines, simulate, spread, variants
from gpuherd.simulate.workload import Mix, background, start_time

WIDE = Mix((0, 1, 2, 4), (1.0, 6.0, 2.0, 1.0))
MEMORY = Mix((8_000, 30_000), (2.0, 1.0))
FAILING = {FailureClass.CRASH: 0.1, FailureClass.GPU_FAULT: 0.03, FailureClass.OUT_OF_MEMORY: 0.05}
STRANGERS = background("busy=0.4,mean=20m,barge=0.3")

# Name: where, how jobs are drawn, rules, external users.
SCENARIOS = {
    "alone": ("4x80GB", Recipe(seconds=spread("5m")), Rules(), None),
    "arrivals": ("4x80GB", Recipe(seconds=spread("exponential:5m"), every=spread("exponential:1m")), Rules(), None),
    "wide": ("8x80GB", Recipe(seconds=spread("lognormal:5m,1"), gpus=WIDE), Rules(), None),
    "longest": ("8x80GB", Recipe(seconds=spread("lognormal:5m,1"), gpus=WIDE), Rules(order="longest"), None),
    "limits": ("8x80GB", Recipe(seconds=spread("lognormal:5m,1"), gpus=WIDE, limits=1.5), Rules(), None),
    "share": ("2x80GB+2x24GB", Recipe(seconds=spread("5m"), memory_mb=MEMORY), Rules(share=True), None),
    "failing": ("8x80GB", Recipe(seconds=spread("5m"), failures=FAILING, every=spread("20s")), Rules(), None),
    "strangers": ("4x80GB", Recipe(seconds=spread("10m"), gpus=WIDE), Rules(), STRANGERS),
    "pause": ("4x80GB", Recipe(seconds=spread("10m")), Rules(yield_to_others="pause"), STRANGERS),
    "requeue": ("4x80GB", Recipe(seconds=spread("10m"), gpus=WIDE), Rules(yield_to_others="requeue"), STRANGERS),
    "quiet hours": (
        "4x80GB",
        Recipe(seconds=spread("30m")),
        Rules(quiet_hours="Mon-Fri 09:00-18:00", quiet_max_gpus=1, max_gpus=3),
        None,
    ),
    "concurrent": ("8x80GB", Recipe(seconds=spread("5m"), gpus=WIDE), Rules(max_concurrent=3, timeout=200), None),
    "cluster": ("4x4x80GB", Recipe(seconds=spread("exponential:5m"), gpus=WIDE), Rules(), None),
    "cluster with strangers": ("4x4x80GB", Recipe(seconds=spread("5m"), gpus=WIDE), Rules(), STRANGERS),
}

RECORDED = {
    "alone": "84cfc816e8c71faa",
    "arrivals": "34f6fa8da505145f",
    "wide": "0fdab9d04a0f9915",
    "longest": "d3c1aca6980314de",
    "limits": "eaaadd457addd3be",
    "share": "cea81d560a9103bb",
    "failing": "622560eaac0cbdcf",
    "strangers": "a233ae9930ce41c1",
    "pause": "a3f00363b1c8ccfc",
    "requeue": "0b783b89f339d00c",
    "quiet hours": "11b47a6ff9fa5f35",
    "concurrent": "2588b1930eeaf50f",
    "cluster": "95c06b7a08b7b28e",
    "cluster with strangers": "91d33a854d8b68b5",
}


def history_of(name: str) -> History:
    where, recipe, rules, strangers = SCENARIOS[name]
    (result,) = simulate(
        Scenario(
            machines=machine(where) if where.split("+")[0].count("x") == 1 else machines(where),
            works=drawn(150, recipe, Random(7)),
            background=strangers,
            seed=7,
            starts_at=start_time("Mon 07:00"),
        ),
        variants(rules, []),
    )
    return result.history


def digest(history: History) -> str:
    lines = [
        f"{each.job} {each.gpus} {each.start:.6f} {each.end:.6f} {each.wait_s:.6f} {each.ending} {each.failure}"
        f" {each.shared}"
        for each in history.attempts
    ]
    lines += [f"{each.gpu} {each.start:.6f} {each.end:.6f}" for each in history.visits]
    lines.append(f"{history.done} {history.failed} {history.cancelled} {history.stuck} {history.decisions}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_history_of_one_user_is_as_it_was(name: str) -> None:
    assert digest(history_of(name)) == RECORDED[name]


if __name__ == "__main__":
    for each in SCENARIOS:
        print(f'    "{each}": "{digest(history_of(each))}",')
