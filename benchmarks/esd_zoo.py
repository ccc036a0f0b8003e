"""``gpuherd esd import`` and ``gpuherd report`` at the size of the Model-Zoo: 9,000 models, 2 million matrices.

The corpus is made by perturbing the eight published files of GPUHERD_SHARED_DATA (``esd-stats/``): a family has the
names and shapes of one of them, with as many layers as chance says; its base moves every figure, and each fine-tune
moves alpha as little as published fine-tunes do (median |Δalpha| 0.003). As in the published files nobody says what
comes from what. Some matrices have no fit (alpha -1). ``python -m benchmarks.esd_zoo FOLDER MODELS`` makes it alone.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks._peers import Absent
from gpuherd.esd.views import csv_rows

SHARED = Path(os.environ.get("GPUHERD_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data")) / "esd-stats"
MATRICES = 224  # of a model, on average
FAMILY = 12  # models of one base, on average
_COUNTS = ("M", "N", "matrix_rank", "num_evals", "params")
_TEXTS = ("model_id", "is_adapter", "longname")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def make_corpus(folder: Path, models: int, seed: int = 0) -> int:
    """Writes the files of so many models into ``folder``. Returns how many matrices they have."""
    rng = np.random.default_rng(seed)
    sources = [_read(path) for path in sorted(SHARED.glob("*.csv"))]
    folder.mkdir(parents=True, exist_ok=True)
    made = matrices = 0
    while made < models:
        base = _base(sources[rng.integers(len(sources))], rng)
        family = f"org{made % 997}/family-{made}"
        for number in range(min(models - made, 1 + int(rng.geometric(1 / (FAMILY - 1))))):
            model = base if number == 0 else _tuned(base, rng)
            _write(folder / f"zoo__{made:05d}.csv", f"{family}-{number}", model)
            made += 1
            matrices += len(base["longname"])
    return matrices


def _read(path: Path) -> dict[str, Any]:
    """The columns of a published file, and its rows by numbered layer."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    return {name: cells if name in _TEXTS else np.array(cells, np.float64) for name, cells in columns.items()}


def _base(source: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Another model of this architecture, with its layers again and again until there are as many as wanted."""
    names = source["longname"]
    layers: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        if found := _NUMBER.search(name):
            layers.setdefault(found[0], []).append(at)
    each = list(layers.values())
    wanted = max(2, round(MATRICES * rng.uniform(0.25, 1.75) / len(each[0]) / 4) * 4)
    rows, longnames = [], []
    for layer in range(wanted):
        for at in each[layer % len(each)]:
            rows.append(at)
            longnames.append(_NUMBER.sub(str(layer), names[at], count=1))
    base: dict[str, Any] = {"longname": longnames}
    for name, values in source.items():
        if name not in _TEXTS:
            base[name] = values[rows]
            if name not in _COUNTS:
                base[name] = base[name] * np.exp(rng.normal(0, 0.15, len(rows)))
    base["alpha"] = 1.0 + np.abs(base["alpha"] - 1.0)
    base["alpha"][rng.random(len(rows)) < 0.002] = -1.0
    return base


def _tuned(base: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    size = len(base["longname"])
    moved = {
        name: values * (1 + rng.normal(0, 1e-3, size)) if name not in (*_COUNTS, "longname") else values
        for name, values in base.items()
    }
    moved["alpha"] = np.where(base["alpha"] < 0, -1.0, np.maximum(1.01, moved["alpha"]))
    return moved


def _write(path: Path, model_id: str, model: dict[str, Any]) -> None:
    size = len(model["longname"])
    columns = {"model_id": [model_id] * size, "is_adapter": ["False"] * size} | {
        name: pa.array(values.astype(np.int64)) if name in _COUNTS else pa.array(values)
        for name, values in model.items()
    }
    table = pa.table(columns)
    path.write_text(",".join(table.column_names) + "\n" + "".join(csv_rows(table).to_pylist()), encoding="utf-8")


def _timed(*words: str) -> dict[str, float]:
    """Seconds and peak memory of a command."""
    started = time.monotonic()
    command = subprocess.Popen([sys.executable, "-m", "gpuherd", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(command.pid, 0)
    command.returncode = os.waitstatus_to_exitcode(status)
    if command.returncode:
        raise RuntimeError(f"gpuherd {' '.join(words)} ended with {command.returncode}")
    return {
        "s": round(time.monotonic() - started, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_mb": round(used.ru_maxrss / 1024),
    }


def run(quick: bool) -> dict[str, Any]:
    """Times and memory of both commands, and the size of the page."""
    if not SHARED.is_dir():
        raise Absent("no published results: set GPUHERD_SHARED_DATA to the folder that has esd-stats/")
    models = 100 if quick else 9000
    with tempfile.TemporaryDirectory() as work:
        source, out = Path(work) / "zoo", Path(work) / "out"
        matrices = make_corpus(source, models)
        imported = _timed("esd", "import", str(source), "--output-dir", str(out))
        again = _timed("report", str(out), "--open", "no")
        page = (out / "report.html").stat().st_size
    return {
        "models": models,
        "matrices": matrices,
        "import": imported,
        "report": again,
        "page_mb": round(page / 1e6, 2),
    }


if __name__ == "__main__":
    print(make_corpus(Path(sys.argv[1]), int(sys.argv[2])), "matrices")
