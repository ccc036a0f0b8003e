"""The tables of docs/policy-gradient.md from the results of ``python -m benchmarks.posttrain`` (``grpo``,
``calibration``, ``vllm_rollouts``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "posttrain.json", ROOT / "docs" / "policy-gradient.md"
Figures = Mapping[str, Any]


def grpo_table(results: Figures) -> str:
    """A row for each vocabulary, without a reference and with one; and on what machine they were measured."""
    found = results["figures"]["grpo"]
    lines = ["| CPU seconds a step | ours | TRL 1.16 | ours / TRL |", "|---|---|---|---|"]
    for size in (4096, 45):
        for kind in ("without_reference", "with_reference"):
            row = found[f"vocabulary_{size}"][kind]
            label = f"{size:,} tokens, {kind.replace('_', ' a ')}"
            lines.append(f"| {label} | {_ours(row['ours'])} | {_trl(row['trl'])} | {_short(row['ours_over_trl'])} |")
    return "\n".join([*lines, "", _when(found, results)])


def _ours(told: Figures) -> str:
    reference = f"reference {_short(told['reference'])}, " if told["reference"] else ""
    stages = f"sampling {_short(told['sampling'])}, {reference}update {_short(told['update'])}"
    return f"{told['step']:.2f} ({stages})"


def _trl(told: Figures) -> str:
    first = f"sampling and reference {_short(told['sampling_and_reference'])}"
    return f"{told['step']:.2f} ({first}, update {_short(told['update'])})"


def _short(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")


def _when(found: Figures, results: Figures) -> str:
    told = found.get("measured", results)
    where = f"{told['machine']['cpu']}, one thread, load {told['machine']['load_at_start']} when it began"
    note = f"; {found['note']}" if "note" in found else ""
    return f"({told['date'][:10]}, {where}{note}.)"


def calibration_table(results: Figures) -> str:
    """The base, and what each algorithm made of it under each seed; and on what machine they were measured."""
    found = results["figures"]["calibration"]
    lines = [
        "| | accuracy (95 %) | Brier score | of the mean accuracy | ECE | AUROC | CPU seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = {f"{name}, seed {row['seed']}": row for name in ("GRPO", "RLCR") for row in found[name]}
    for label, row in ({"base": found["base"]} | rows).items():
        brier, ece, auroc = (_between(row[each]) for each in ("brier", "ece", "auroc"))
        mean, seconds = f"{row['knows_the_mean']:.3f}", f"{row['cpu_seconds']:.0f}"
        lines.append(f"| {label} | {_between(row['accuracy'])} | {brier} | {mean} | {ece} | {auroc} | {seconds} |")
    return "\n".join([*lines, "", _when(found, results)])


def _between(figure: Sequence[float | None]) -> str:
    value, low, high = figure
    return f"{value:.3f}" if low is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def vllm_table(results: Figures) -> str:
    """A row for each backend, how far their rewards and log-probs are apart, and on what machine they were measured."""
    found = results["figures"]["vllm_rollouts"]
    setting, gap = found["setting"], found["vllm_less_hf"]
    lines = ["| rollouts by | mean reward, first step → last | tokens a second | seconds a step |", "|---|---|---|---|"]
    for name, label in (("hf", "transformers"), ("vllm", "vLLM")):
        row = found[name]
        rewards = f"{row['rewards'][0]:.3f} → {row['rewards'][-1]:.3f}"
        lines.append(f"| {label} | {rewards} | {row['tokens_a_second']:,} | {row['seconds_a_step']:.2f} |")
    apart = (
        f"GRPO, {setting['seeds']} seeds of {setting['steps']} steps each. Mean reward by vLLM less that by "
        f"transformers: {gap['difference']:.4f} ({gap['low']:.4f} to {gap['high']:.4f}, 95 %). Largest of any step: "
        f"KL(sampler‖trainer) {found['sampler_kl_most']:.1e} nats a token, w {found['sampler_weight_most']:.6f}."
    )
    return "\n".join([*lines, "", apart, _when(found, results)])


TABLES: Mapping[str, Callable[[Figures], str]] = {
    "GRPO": grpo_table,
    "calibration": calibration_table,
    "vllm_rollouts": vllm_table,
}


def marks(name: str) -> tuple[str, str]:
    """What stands before and behind a table in the page."""
    return f"<!-- benchmark of {name}: begin -->", f"<!-- benchmark of {name}: end -->"


def write_tables() -> None:
    """Puts the tables of the results into the page."""
    page, results = PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text(encoding="utf-8"))
    for name, table in TABLES.items():
        begin, end = marks(name)
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{table(results)}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(page, encoding="utf-8")
