"""Runs benchmarks and writes what they measured to ``benchmarks/results/<name>.json``.

    python -m benchmarks                 all of them
    python -m benchmarks esd             one
    python -m benchmarks --quick --output try     small sizes, to see that they work

A benchmark is a module or package in this folder with ``run(quick: bool) -> dict``: its figures, ready for JSON. This
file knows nothing of what they measure; it adds the machine, the versions and the date. A benchmark that can't run here
raises ``Absent``: its older results stay. What it lists under ``failed`` makes the exit code 1.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from benchmarks._peers import Absent

FOLDER = Path(__file__).parent
PACKAGES = ("gpuherd", "numpy", "scipy", "torch", "transformers", "trl", "peft", "bitsandbytes")


def names() -> list[str]:
    """The benchmarks there are."""
    modules = [*FOLDER.glob("*.py"), *(path.parent for path in FOLDER.glob("*/__init__.py"))]
    return sorted(path.stem for path in modules if not path.stem.startswith("_"))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "threads": os.environ["OMP_NUM_THREADS"],
    }


def cpu_model() -> str:
    """The processor's name, as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the figures depend on; those not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Parses the command line and runs what it names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Runs the benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones (default all): {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats, to see that they work")
    parser.add_argument("--output", type=Path, default=FOLDER / "results", help="folder for the results")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where peers are installed, each in a folder")
    args = parser.parse_args()
    if args.peers is not None:
        os.environ["GPUHERD_BENCH_PEERS"] = str(args.peers.absolute())
    unknown = sorted(set(args.names) - set(names()))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(names())}")
    # CPU-seconds of one thread can be compared between routes. BLAS reads this once, when numpy is first imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args.output.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for name in args.names or names():
        started = machine()
        try:
            figures = importlib.import_module(f"benchmarks.{name}").run(quick=args.quick)
        except Absent as reason:
            print(f"{name}: {reason}", flush=True)
            continue
        result = {
            "name": name,
            "quick": args.quick,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": started,
            "versions": versions(),
            "figures": figures,
        }
        text = json.dumps(result, indent=2)
        (args.output / f"{name}.json").write_text(text + "\n")
        print(text, flush=True)
        failed += [f"{name}: {each}" for each in figures.get("failed", ())]
    if failed:
        raise SystemExit("\n".join(["failed:", *failed]))


if __name__ == "__main__":
    main()
