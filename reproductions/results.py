"""Results as files, and as cells and sections of documents. No figure in a document is typed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from gpuherd.atomic import atomic_write
from gpuherd.qa.intervals import wilson
from reproductions.comparison import GUIDED

RATE_FACTOR = "times all learning rates of the methods; 1.000001 shows how far a result follows mere rounding"
DOCS = Path(__file__).resolve().parents[1] / "docs"


def quiet_libraries() -> None:
    """Their own bars and notes; ours say how far it is."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def write_result(path: Path, found: dict[str, Any]) -> None:
    """A seed's result, after each method anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(found, indent=1).encode() + b"\n")


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Those of all seeds, by name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def write_section(document: Path, name: str, lines: Sequence[str]) -> None:
    """Puts lines between the markers of a section. Raises ValueError where the document has none."""
    begin, end = f"<!-- {name}: written by reproductions -->", f"<!-- end of {name} -->"
    text = document.read_text(encoding="utf-8")
    if begin not in text or end not in text.partition(begin)[2]:
        raise ValueError(f"{document}: there is no section {name}")
    before, _, rest = text.partition(begin)
    atomic_write(document, f"{before}{begin}\n{chr(10).join(lines)}\n{end}{rest.partition(end)[2]}".encode())


def own(points: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The point at the policy's own eta."""
    return next(each for each in points if each["own"])


def accuracies(
    seeds: Sequence[dict[str, Any]], methods: Sequence[str], columns: dict[str, dict[str, str]]
) -> list[str]:
    """A row for the base and each method: a cell a seed, what the seeds have in common, and further columns, which say
    by method what stands there."""
    heads = ["method", *(f"seed {each['seed']}" for each in seeds), "mean of valid seeds (±: t, 95 %)", *columns]
    rows = [("base", [own(each["base"]) if "base" in each else None for each in seeds])]
    for method in methods:
        points = [own(each["methods"][method]["points"]) if method in each["methods"] else None for each in seeds]
        rows.append((method, points))
    lines = []
    for name, points in rows:
        cells = [
            share_cell(point) if point is not None else "not run" if "base" in each else "not valid"
            for each, point in zip(seeds, points, strict=True)
        ]
        values = [each["right"]["value"] for each in points if each is not None]
        lines.append([name, *cells, over_seeds(values), *(column[name] for column in columns.values())])
    return table(heads, lines)


def share_cell(point: dict[str, Any]) -> str:
    """A share with Wilson's 95 % interval, of one seed."""
    of = point["problems"]
    interval = wilson(round(point["right"]["value"] * of), of)
    return f"{short(point['right']['value'])} ({short(interval.low)}–{short(interval.high)})"


def short(value: float) -> str:
    """Three digits, without the 0 before the point.

    >>> short(0.5), short(1), short(0.9999)
    ('.500', '1.000', '1.000')
    """
    return f"{value:.3f}".removeprefix("0")


def over_seeds(values: Sequence[float]) -> str:
    """Mean and Student's 95 % interval over seeds; two or three seeds say little, and that is what it shows.

    >>> over_seeds([0.5]), over_seeds([])
    ('.500 (one seed)', 'none')
    """
    if not values:
        return "none"
    if len(values) == 1:
        return f"{short(values[0])} (one seed)"
    from scipy.stats import t

    spread = math.sqrt(sum((each - mean(values)) ** 2 for each in values) / (len(values) - 1) / len(values))
    return f"{short(mean(values))} ± {t.ppf(0.975, len(values) - 1) * spread:.3f}"


def run_again(results: Path) -> list[str]:
    """How far a second run, in the folder ``again``, differs: the figures outside of the recorded intervals, and how
    far a result follows a change of the learning rate by a millionth."""
    inside, rows = 0, []
    for path in sorted((results / "again").glob("*.json")):
        first, second = (json.loads(each.read_text())["methods"] for each in (results / path.name, path))
        for method in [name for name in second if name in first]:
            before, after = (own(each[method]["points"]) for each in (first, second))
            interval = wilson(round(before["right"]["value"] * before["problems"]), before["problems"])
            if interval.low <= after["right"]["value"] <= interval.high:
                inside += 1
            else:
                rows.append([path.stem, method, share_cell(before), share_cell(after)])
    lines = [f"**Run again** with the code of a later month: {inside} of {inside + len(rows)} figures lie in the", ""]
    lines[0] += " intervals above; the others:"
    lines += [*table(["graph and seed", "method", "recorded", "again"], rows), ""]
    for path in sorted((results / "again").glob("*.jsonl")):
        found = json.loads(path.read_text())
        factors, shares = ([f"{each[key]:.6f}" for each in found["rows"]] for key in ("rate_factor", "right"))
        lines += [f"**Rounding**: {found['method']}, {found['of']}, with all learning rates times a factor", ""]
        lines += table(["factor", *factors], [["share right", *(share[:5].removeprefix("0") for share in shares)]])
    return lines


def sweep(seeds: Sequence[dict[str, Any]], title: str) -> list[str]:
    """A row an eta: share and, behind the slash, KL(policy || base) an answer in nats, means of the valid seeds."""
    by_eta: dict[float, dict[str, list[dict[str, Any]]]] = {}
    for method in GUIDED:
        for each in seeds:
            for point in each["methods"].get(method, {"points": ()})["points"]:
                by_eta.setdefault(point["eta"], {}).setdefault(method, []).append(point)
    rows = ([f"{eta:g}", *(_swept(by_eta[eta].get(each, ())) for each in GUIDED)] for eta in sorted(by_eta))
    return table([f"{title}: η", *GUIDED], rows)


def _swept(points: Sequence[dict[str, Any]]) -> str:
    if not points:
        return ""
    right, kl = (mean(each[figure]["value"] for each in points) for figure in ("right", "kl"))
    return f"{short(right)} / {abs(kl):.2f}" if abs(kl) < 0.005 else f"{short(right)} / {kl:.2f}"


def costs(seeds: Sequence[dict[str, Any]], methods: Sequence[str]) -> list[str]:
    """The cells of a row: CPU-seconds of the base, and of each method's collecting, training, testing; medians."""
    cells = [f"{_median([each['checkpoints'][-1]['cpu_s'] for each in seeds]):.0f}"]
    for method in methods:
        runs = [each["methods"][method] for each in seeds if method in each["methods"]]
        parts = [[run[f"{part}_cpu_s"] for run in runs] for part in ("collect", "train", "test")]
        cells += [", ".join(f"{_median(each):.0f}" for each in parts) if runs else ""]
    return cells


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table in Markdown."""
    return [_line(heads), _line(["---"] * len(heads)), *(_line(row) for row in rows)]


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
