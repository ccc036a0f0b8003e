"""Proof on a real GPU with one command: ``make gpu``, or ``python -m benchmarks gpu``. Under 10 minutes, no network.

    python -m benchmarks gpu                      all parts; results go to benchmarks/results/gpu.json
    python -m benchmarks.gpu memory training      some parts, printed
    python -m benchmarks.gpu --docs               writes the table of docs/measured.md from the results

Each part runs in a process of its own, under a time limit, and reports one measurement after the other, so that a part
that crashes or runs out of time loses no more than its last one. A measurement that needs something that is not
installed is skipped, and the results say why. A part is a function ``measure(quick)`` of a module in this folder that
yields ``Measurement``; what fails raises, and counts as failed. This module knows nothing of what they measure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from typing import Any

from benchmarks._peers import Absent

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/gpu.json"
# In the order in which they run, with the seconds that each may take; together they may take TOTAL_S.
PARTS = {"driver": 40, "jobs": 100, "memory": 100, "training": 170, "spectra": 170, "answers": 150, "checks": 150}
TOTAL_S = 590


@dataclass(frozen=True, slots=True)
class Measurement:
    """One thing to measure: ``figures()`` returns JSON values, raises Absent where it can't be measured here, and
    anything else where what it measures is wrong."""

    name: str
    figures: Callable[[], dict[str, Any]]


def run(*, quick: bool) -> dict[str, Any]:
    """The figures of all parts, what was skipped and what failed. Raises Absent without a GPU, unless ``quick``."""
    if not quick and not gpu_names():
        raise Absent(f"this machine has no NVIDIA GPU with a driver; skipped: {', '.join(PARTS)}")
    parts: dict[str, Any] = {}
    ends_at = time.monotonic() + TOTAL_S
    for part, limit_s in PARTS.items():
        print(f"{part} (at most {limit_s} s)", file=sys.stderr, flush=True)
        parts[part] = run_part(part, min(limit_s, ends_at - time.monotonic()), quick=quick)
        print(f"  {parts[part]['seconds']:.0f} s", file=sys.stderr, flush=True)
    return {"gpus": gpu_names(), "cuda": cuda_versions(), "parts": parts, **summary(parts)}


def gpu_names() -> list[str]:
    """The GPUs that the CUDA driver shows to this process."""
    from gpuherd.esd.resources import cuda_devices

    return list(cuda_devices().names)


def cuda_versions() -> dict[str, Any]:
    """The versions of CUDA and of the driver that torch and nvidia-smi report; None where they report none."""
    built_for: str | None = None
    if util.find_spec("torch") is not None:
        import torch

        built_for = torch.version.cuda
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = None
    return {"torch_cuda": built_for, "driver": driver}


def run_part(part: str, limit_s: float, *, quick: bool) -> dict[str, Any]:
    """Runs one part in a process of its own and collects what it reports until it ends or its time is up."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--report", part, *(["--quick"] if quick else [])]
    paths = (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=max(limit_s, 1))
        problem = None if process.returncode == 0 else f"the part ended with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        problem = f"the part was ended after its {limit_s:.0f} s"
    found: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1), "measured": {}}
    for line in output.splitlines():
        found["measured"] |= json.loads(line)
    return found if problem is None else {**found, "problem": problem}


def summary(parts: dict[str, Any]) -> dict[str, Any]:
    """Sentences on what was skipped and what failed, over all parts."""
    skipped, failed = [], []
    for part, found in parts.items():
        failed += [f"{part}: {found['problem']}"] if "problem" in found else []
        for name, figures in found["measured"].items():
            skipped += [f"{part}, {name}: {figures['skipped']}"] if "skipped" in figures else []
            failed += [f"{part}, {name}: {figures['failed']}"] if "failed" in figures else []
    return {"skipped": skipped, "failed": failed}


def report(measurements: Iterable[Measurement]) -> Iterator[dict[str, Any]]:
    """Each measurement's figures under its name, as they come: or why it was skipped, or how it failed.

    Where the part itself can't be prepared, that stands under ``all of it``.
    """
    remaining = iter(measurements)
    while True:
        name = "all of it"
        try:
            measurement = next(remaining, None)
            if measurement is None:
                return
            name = measurement.name
            print(f"  {name}", file=sys.stderr, flush=True)
            figures = measurement.figures()
        except (Absent, ModuleNotFoundError) as problem:
            figures = {"skipped": str(problem)}
        except Exception as problem:
            traceback.print_exc()
            figures = {"failed": f"{type(problem).__name__}: {problem}"[-1500:]}
        yield {name: figures}


def needs(*packages: str) -> None:
    """Raises Absent where one of these packages is not installed."""
    missing = [name for name in packages if util.find_spec(name) is None]
    if missing:
        raise Absent(f"{', '.join(missing)}: not installed")


def device(quick: bool) -> str:
    """``cuda:0``, or with ``quick`` the CPU where there is no GPU. Raises Absent where torch can't use the GPU."""
    needs("torch")
    import torch

    if torch.cuda.is_available():
        return "cuda:0"
    if quick:
        return "cpu"
    raise Absent(f"torch {torch.__version__} can't use a GPU here")


def gpuherd(*words: str, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a command of ours. Raises RuntimeError where it fails, with the end of its output, if ``check``."""
    return python("-m", "gpuherd", *words, cwd=cwd, check=check)


def python(*words: str, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs this Python with these arguments; see ``gpuherd``."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=cwd, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(words[:6])} ended with {done.returncode}: {(done.stdout + done.stderr)[-1200:]}")
    return done


def main(argv: Sequence[str] | None = None) -> None:
    """Some parts, printed; or the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Parts of the proof on a GPU.")
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, on the CPU where there is no GPU")
    parser.add_argument("--docs", action="store_true", help="write the table of docs/measured.md from the results")
    parser.add_argument("--report", metavar="PART", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.docs:
        from benchmarks.gpu._table import write_table

        write_table(RESULTS, ROOT / "docs/measured.md")
    elif args.report:
        measurements = import_module(f"benchmarks.gpu.{args.report}").measure(args.quick)
        # Libraries may write to standard output; the parent reads it line by line.
        reports, sys.stdout = sys.stdout, sys.stderr
        for each in report(measurements):
            print(json.dumps(each), file=reports, flush=True)
    else:
        parts = {part: run_part(part, PARTS[part], quick=args.quick) for part in args.parts or PARTS}
        print(json.dumps({**parts, **summary(parts)}, indent=2))
