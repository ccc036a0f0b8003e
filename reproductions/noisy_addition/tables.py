"""The part of docs/star-graph.md that the control's results write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reproductions.noisy_addition.protocol import HALF_WITHIN, METHODS
from reproductions.results import DOCS, accuracies, costs, read_results, run_again, sweep, table, write_section

# One seed of a trial by other code, T=1 (next-token and CD were not in it).
TRIAL = {
    "base": ".51",
    "next-token": "",
    "REINFORCE": ".975",
    "RPO": ".973",
    "RPO 0.0001": "",
    "DPO": ".887",
    "DPO 0.0001": "",
    "GRPO": ".973",
    "PPO": ".973",
    "CD": "",
    "Q#": ".865",
    "PITA": ".815",
}


def write_documents(results: Path) -> None:
    """Writes the section."""
    seeds = read_results(results)
    if not seeds:
        return
    test = seeds[0]["protocol"]["test"]
    lines = [
        f"**Noisy addition**, share of {test} unseen sums answered right, Wilson's 95 % intervals",
        "",
        *accuracies(seeds, METHODS, {"trial, one seed": TRIAL}),
        "",
        *_bases(seeds),
        "",
        *sweep(seeds, "addition"),
        "",
        "**CPU-seconds** of one thread, medians over seeds: collecting, training, testing (all η)",
        "",
        *table(["base", *METHODS], [costs(seeds, METHODS)]),
    ]
    write_section(DOCS / "star-graph.md", "noisy addition", [*lines, "", *run_again(results)])


def _bases(seeds: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for each in seeds:
        passing = [look for look in each["checkpoints"] if look["passes"]]
        last = passing[0] if passing else each["checkpoints"][-1]
        taken = str(last["step"]) if passing else f"none (last: {last['step']})"
        rows += [[each["seed"], len(each["checkpoints"]), taken, f"{last['right']:.3f}", f"{last['likeliest']:.3f}"]]
    return [
        f"**Bases**: a checkpoint of the last phase counts where the right answer to held-out sums has the probability "
        f".5 ± {HALF_WITHIN}; the first such one is taken",
        "",
        *table(["seed", "checkpoints", "taken: step", "its p(right answer)", "its likeliest answers right"], rows),
    ]
