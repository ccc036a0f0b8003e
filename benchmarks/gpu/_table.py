"""The table of docs/measured.md from the results of ``make gpu``; what was never measured is named as such."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- make gpu: begin -->", "<!-- make gpu: end -->"
NOT_YET = "not yet measured on a GPU"
Figures = Mapping[str, Any]


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g} s"


def _memory(found: Figures) -> str:
    planned = found["planned_mb"]
    if found["reserved_mb"] is None or planned is None:
        return "memory not measured"
    return f"{found['reserved_mb']:,.0f} of {planned:,.0f} MB planned"


def _loaded(found: Figures) -> str:
    return (
        f"weights {found['weights_mb']:,.0f} MB, planned {found['weights_planned_mb']:,.0f}; peak "
        f"{found['peak_mb']:,.0f} MB, planned {found['peak_planned_mb']:,.0f}"
    )


def _trained(found: Figures) -> str:
    return f"loss {found['loss']:.4g}, last step {_seconds(found['last_step_s'])}; {_memory(found)}"


def _decoded(found: Figures) -> str:
    speed, times = found["tokens_a_second"], found["ours_is_so_many_times"]
    others = ", ".join(f"{times[name]:.2f} times {name.replace('_', ' ')}" for name in times)
    return f"{speed['gpuherd']:,.0f} tokens/s: {others}"


def _guided(found: Figures) -> str:
    times = found["times_plain"]
    return f"V {times['guided_v']:.2f}, Q {times['guided_q']:.2f} times the time of plain decoding"


def _precision(found: Figures) -> str:
    return "; ".join(
        f"condition {name}: " + ", ".join(f"{form} {each[form]:.0e}" for form in ("float64", "split", "float32"))
        for name, each in found.items()
    )


def _llama(found: Figures) -> str:
    return (
        f"{found['layers']} layers: {_seconds(found['wall_s'])} in all, {_seconds(found['analysis_s'])} of it analysis;"
        f" the limit is {_seconds(found['limit_s'])}"
    )


def _classes(found: Figures) -> str:
    return "; ".join(f"{case}: {each['class']}" for case, each in found.items())


# Part, measurement, what the row is called, and its figures as text.
ROWS: tuple[tuple[str, str, str, Callable[[Figures], str]], ...] = (
    ("driver", "nvidia_smi", "our table of GPUs beside nvidia-smi's", lambda it: f"{it['gpus']} alike"),
    ("driver", "doctor", "`gpuherd doctor`", lambda it: f"{it['ok']} checks passed, {it['warn']} warnings"),
    ("jobs", "run", "`gpuherd run`: from its start to its command's", lambda it: _seconds(it["start_s"])),
    ("jobs", "lease", "a GPU that is held is refused to others", lambda it: f"with code {it['refused_with']}"),
    ("jobs", "batch", "jobs that compute on the GPU", lambda it: f"{it['jobs']} in {_seconds(it['seconds'])}"),
    ("jobs", "out_of_memory", "CUDA's ways to run out of memory, classed", _classes),
    *(("memory", name, f"a model in {name}", _loaded) for name in ("fp32", "bf16", "fp16", "int8", "nf4")),
    *(("training", name, f"{name.upper()}, 6 steps in bf16", _trained) for name in ("grpo", "ppo", "sft", "dpo")),
    *(("training", f"{name}_lora", f"{name.upper()} with LoRA", _trained) for name in ("grpo", "sft")),
    ("training", "qsharp", "Q#: the classifier's training", lambda it: _memory(it["train"])),
    ("spectra", "precision", "Gram matrices: error in units of n λ_max", _precision),
    ("spectra", "llama_7b", "ESD of a model of Llama 7B's shape", _llama),
    ("answers", "few_shot", "`generate`, 32 questions behind 5 examples, bf16", _decoded),
    ("answers", "questions", "the same without examples", _decoded),
    ("answers", "samples", "10 samples of one prompt", _decoded),
    *(("answers", f"guided_{rows}", f"guided decoding, {rows} rows", _guided) for rows in (1, 8, 32)),
)


def table(result: Mapping[str, Any] | None) -> str:
    """The table as Markdown; ``result`` is the content of gpu.json, None where it was never run."""
    lines = ["| | |", "|---|---|"]
    figures = {} if result is None else result["figures"]
    parts = figures.get("parts", {})
    for part, name, title, text in ROWS:
        measured = parts.get(part, {}).get("measured", {})
        found = measured.get(name, measured.get("all of it"))
        lines.append(f"| {title} | {cell(found, text)} |")
    if result is not None:
        versions = result["versions"]
        what = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "transformers") if name in versions)
        lines += ["", f"On {', '.join(figures['gpus']) or 'no GPU'}, {result['date'][:10]}: {what}."]
    return "\n".join(lines)


def cell(found: Figures | None, text: Callable[[Figures], str]) -> str:
    """One measurement's figures, or why there are none."""
    if found is None:
        return NOT_YET
    if "skipped" in found:
        return f"{NOT_YET} ({found['skipped']})"
    if "failed" in found:
        return "**failed**"
    return text(found)


def read_result(path: Path) -> Mapping[str, Any] | None:
    """The results of ``make gpu``; None where there are none, or only those of small sizes."""
    if not path.exists():
        return None
    result: Mapping[str, Any] = json.loads(path.read_text())
    return None if result["quick"] else result


def write_table(results: Path, document: Path) -> None:
    """Puts the table between the two marks of the document. Raises ValueError where it has no such marks."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} has no lines {BEGIN} and {END}")
    document.write_text(f"{before}{BEGIN}\n{table(read_result(results))}\n{END}{after}")
