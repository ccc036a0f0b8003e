"""The part of docs/star-graph.md that the results write: tables, and the figure of the sweep over eta."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from reproductions.comparison import GUIDED
from reproductions.results import DOCS, accuracies, costs, read_results, run_again, sweep, table, write_section
from reproductions.star_graph.protocol import EDGES_ABOVE, METHODS, SHORTCUT_WITHIN

# Q# paper, figures 2 and 5 (bars; the text gives words) for G(2,5), G(5,5), G(3,8) with GPT-2.
PAPER = {
    "base": "1/d",
    "next-token": "1/d",
    "REINFORCE": "1/d",
    "RPO": "",
    "RPO 0.0001": "1/d",
    "DPO": "",
    "DPO 0.0001": "1/d to 0",
    "GRPO": "not there",
    "CD": "near 1",
    "Q#": "near 1",
    "PITA": ".997 on G(5,5) (PITA paper, second-hand)",
}
COLOURS = {"Q#": "#0072B2", "CD": "#D55E00", "PITA": "#009E73"}


def write_documents(results: Path) -> None:
    """Writes the section, and its figure."""
    seeds = read_results(results)
    lines = [*_accuracies(seeds), *_bases(seeds), "", *_sweeps(seeds), *_costs(seeds)]
    if _draw_sweep(seeds, DOCS / "images" / "star-graph-eta.svg"):
        lines += ["", "![Accuracy and divergence over eta](images/star-graph-eta.svg)"]
    write_section(DOCS / "star-graph.md", "star graphs", [*lines, "", *run_again(results)])


def _of_graphs(seeds: Sequence[dict[str, Any]]) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    names = dict.fromkeys(_graph(each) for each in seeds)
    return ((name, [each for each in seeds if _graph(each) == name]) for name in names)


def _graph(found: dict[str, Any]) -> str:
    return f"G({found['protocol']['degree']},{found['protocol']['length']})"


def _accuracies(seeds: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for name, some in _of_graphs(seeds):
        test = some[0]["protocol"]["test"]
        lines += [f"**{name}**, share of {test} unseen graphs answered right, Wilson's 95 % intervals", ""]
        lines += [*accuracies(some, METHODS, {"published, larger graphs": PAPER}), ""]
    return lines


def _bases(seeds: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for name, some in _of_graphs(seeds):
        for each in some:
            passing = [look for look in each["checkpoints"] if look["passes"]]
            last = passing[-1] if passing else each["checkpoints"][-1]
            edges = ", ".join(f"l={length} {share:.3f}" for length, share in last["edges"].items())
            taken = str(last["step"]) if passing else f"none (last: {last['step']})"
            rows += [[name, each["seed"], len(each["checkpoints"]), len(passing), taken, f"{last['right']:.3f}", edges]]
    heads = ["graph", "seed", "checkpoints", "that count", "taken: step", "its p(right path)", "its edges followed"]
    return [
        f"**Bases**: a checkpoint counts where the right path has the probability 1/d ± {SHORTCUT_WITHIN} on held-out "
        f"graphs and edges are followed above {EDGES_ABOVE} at the longer lengths; the last such one is taken",
        "",
        *table(heads, rows),
    ]


def _sweeps(seeds: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["**η**: share and, behind the slash, KL(policy || base) an answer in nats, means of the valid seeds", ""]
    for name, some in _of_graphs(seeds):
        lines += [*sweep(some, name), ""]
    return lines


def _costs(seeds: Sequence[dict[str, Any]]) -> list[str]:
    rows = ([name, *costs(some, METHODS)] for name, some in _of_graphs(seeds))
    return [
        "**CPU-seconds** of one thread, medians over seeds: collecting, training, testing (all η)",
        "",
        *table(["graph", "base", *METHODS], rows),
    ]


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
        for method in GUIDED:
            runs = [each["methods"][method]["points"] for each in some if method in each["methods"]]
            for number, points in enumerate(runs):
                ordered = sorted(points, key=lambda each: float(each["eta"]))
                divergences = [each["kl"]["value"] for each in ordered]
                shares = [each["right"]["value"] for each in ordered]
                label = method if number == 0 else None
                axis.plot(divergences, shares, "o-", color=COLOURS[method], markersize=3, linewidth=1, label=label)
        axis.axhline(1 / some[0]["protocol"]["degree"], color="grey", linewidth=0.8, linestyle=":")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("KL(policy || base) an answer, nats")
    axes[0][0].set_ylabel("share of right paths")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True
