"""docs/star-graph.md from the results: tables and figures between its markers. No figure is typed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from gpuherd.jobs.durable import atomic_write
from gpuherd.qa.intervals import wilson
from reproductions.star_graph.methods import PUBLISHED
from reproductions.star_graph.protocol import EDGES_ABOVE, SHORTCUT_WITHIN

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- results: written by reproductions.star_graph -->", "<!-- end of results -->"
# Q# paper, figures 2 and 5 (bars; the text gives words) for G(2,5), G(5,5), G(3,8) with GPT-2.
PAPER = {
    "next-token": "1/d",
    "REINFORCE": "1/d",
    "RPO": "1/d",
    "DPO": "1/d to 0",
    "GRPO": "not there",
    "CD": "near 1",
    "Q#": "near 1",
    "PITA": ".997 on G(5,5) (PITA paper, second-hand)",
}


def write_documents(results: Path) -> None:
    """Writes the part of docs/star-graph.md between its markers, and its figures."""
    seeds = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    lines = [*_accuracies(seeds), "", *_bases(seeds), "", *_sweeps(seeds), "", *_costs(seeds)]
    drawn = _draw_sweep(seeds, DOCS / "images" / "star-graph-eta.svg")
    if drawn:
        lines += ["", "![Accuracy and divergence over eta](images/star-graph-eta.svg)"]
    path = DOCS / "star-graph.md"
    before, _, rest = path.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    atomic_write(path, f"{before}{BEGIN}\n{chr(10).join(lines)}\n{END}{after}".encode())


def _of_graphs(seeds: Sequence[dict[str, Any]]) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    names = dict.fromkeys(_graph(each) for each in seeds)
    return ((name, [each for each in seeds if _graph(each) == name]) for name in names)


def _graph(found: dict[str, Any]) -> str:
    return f"G({found['protocol']['degree']},{found['protocol']['length']})"


def _own(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in points if each["own"])


def _share(point: dict[str, Any]) -> str:
    """A share with Wilson's interval, of one seed."""
    of = point["problems"]
    interval = wilson(round(point["right"]["value"] * of), of)
    return f"{_short(point['right']['value'])} ({_short(interval.low)}–{_short(interval.high)})"


def _short(value: float) -> str:
    return f"{value:.3f}".removeprefix("0") if value < 1 else f"{value:.3f}"


def _accuracies(seeds: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for name, some in _of_graphs(seeds):
        head = " | ".join(f"seed {each['seed']}" for each in some)
        lines += [f"**{name}**, share of {some[0]['protocol']['test']} unseen graphs, Wilson's 95 % intervals", ""]
        lines += [f"| method | {head} | mean of valid seeds (±: t, 95 %) | published, larger graphs |"]
        lines += ["|---" * (len(some) + 3) + "|"]
        lines += [_row("base", [_base(each) for each in some], "1/d")]
        for method in PUBLISHED:
            points = [_own(each["methods"][method]["points"]) if method in each["methods"] else None for each in some]
            lines += [_row(method, points, PAPER[method])]
        lines += [""]
    return lines


def _base(found: dict[str, Any]) -> dict[str, Any] | None:
    return _own(found["base"]) if "base" in found else None


def _row(name: str, points: Sequence[dict[str, Any] | None], published: str) -> str:
    values = [each["right"]["value"] for each in points if each is not None]
    cells = ["not valid" if each is None else _share(each) for each in points]
    return f"| {name} | {' | '.join(cells)} | {_over_seeds(values)} | {published} |"


def _over_seeds(values: Sequence[float]) -> str:
    """Mean and Student's interval over seeds; two or three seeds say little, and that is what it shows."""
    if not values:
        return "none"
    if len(values) == 1:
        return f"{_short(values[0])} (one seed)"
    from scipy.stats import t

    spread = math.sqrt(sum((each - mean(values)) ** 2 for each in values) / (len(values) - 1) / len(values))
    return f"{_short(mean(values))} ± {t.ppf(0.975, len(values) - 1) * spread:.3f}"


def _bases(seeds: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"**Bases**: a checkpoint counts where the right path has the probability 1/d ± {SHORTCUT_WITHIN} on held-out "
        f"graphs and edges are followed above {EDGES_ABOVE} at the longer lengths; the last such one is taken",
        "",
        "| graph | seed | checkpoints | that count | taken: step | its p(right path) | its edges followed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, some in _of_graphs(seeds):
        for each in some:
            passing = [look for look in each["checkpoints"] if look["passes"]]
            last = passing[-1] if passing else each["checkpoints"][-1]
            edges = ", ".join(f"l={length} {share:.3f}" for length, share in last["edges"].items())
            taken = str(last["step"]) if passing else f"none (last: {last['step']})"
            row = [name, each["seed"], len(each["checkpoints"]), len(passing), taken, f"{last['right']:.3f}", edges]
            lines += [f"| {' | '.join(map(str, row))} |"]
    return lines


def _sweeps(seeds: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "**η**: accuracy and, behind the slash, KL(policy || base) a completion in nats, mean of the valid seeds",
        "",
    ]
    for name, some in _of_graphs(seeds):
        table: dict[float, dict[str, list[dict[str, Any]]]] = {}
        for method in ("Q#", "CD", "PITA"):
            found = [each["methods"][method]["points"] for each in some if method in each["methods"]]
            for points in found:
                for point in points:
                    table.setdefault(point["eta"], {}).setdefault(method, []).append(point)
        if table:
            lines += [f"| {name}: η | Q# | CD | PITA |", "|---|---|---|---|"]
            lines += [
                f"| {eta:g} | {' | '.join(_swept(table[eta].get(each, ())) for each in ('Q#', 'CD', 'PITA'))} |"
                for eta in sorted(table)
            ]
            lines += [""]
    return lines


def _swept(points: Sequence[dict[str, Any]]) -> str:
    if not points:
        return ""
    right, kl = (mean(each[figure]["value"] for each in points) for figure in ("right", "kl"))
    return f"{_short(right)} / {kl:.2f}"


def _costs(seeds: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "**CPU-seconds** of one thread, median over seeds: collecting, training, testing (all η)",
        "",
        "| graph | base | " + " | ".join(PUBLISHED) + " |",
        "|---" * (len(PUBLISHED) + 2) + "|",
    ]
    for name, some in _of_graphs(seeds):
        cells = [f"{_median([each['checkpoints'][-1]['cpu_s'] for each in some]):.0f}"]
        for method in PUBLISHED:
            runs = [each["methods"][method] for each in some if method in each["methods"]]
            parts = [[run[f"{part}_cpu_s"] for run in runs] for part in ("collect", "train", "test")]
            cells += [", ".join(f"{_median(each):.0f}" for each in parts) if runs else ""]
        lines += [f"| {name} | {' | '.join(cells)} |"]
    return lines


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _draw_sweep(seeds: Sequence[dict[str, Any]], path: Path) -> bool:
    """Accuracy against divergence over eta, a line a seed and method; False where there is nothing to draw."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "star-graph"
    from matplotlib import pyplot

    graphs = [(name, some) for name, some in _of_graphs(seeds) if any("Q#" in each["methods"] for each in some)]
    if not graphs:
        return False
    figure, axes = pyplot.subplots(1, len(graphs), figsize=(4.5 * len(graphs), 3.2), sharey=True, squeeze=False)
    for axis, (name, some) in zip(axes[0], graphs, strict=True):
        for method, colour in (("Q#", "#0072B2"), ("CD", "#D55E00"), ("PITA", "#009E73")):
            runs = [each["methods"][method]["points"] for each in some if method in each["methods"]]
            for number, points in enumerate(runs):
                ordered = sorted(points, key=lambda each: float(each["eta"]))
                axis.plot(
                    [each["kl"]["value"] for each in ordered],
                    [each["right"]["value"] for each in ordered],
                    "o-",
                    color=colour,
                    markersize=3,
                    linewidth=1,
                    label=method if number == 0 else None,
                )
        axis.axhline(1 / some[0]["protocol"]["degree"], color="grey", linewidth=0.8, linestyle=":")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("KL(policy || base) a completion, nats")
    axes[0][0].set_ylabel("share of right paths")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True
