"""The long form of the fault suite: ``python -m tests.faults --runs 1000 [--at-once 2] [--json FILE]``.

Exits with 1 when anything did not hold; the folder of such a run stays, and its seed makes the same faults again (not
the same instants: those are the machine's).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tests.faults.chaos import Result, one_run


def main() -> int:
    """Runs them and prints what did not hold, and a summary."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=50, help="jobs in a queue")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--json", type=Path, help="where the summary goes as well")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpuherd-chaos-"))
    began, results = time.monotonic(), []
    with ProcessPoolExecutor(args.at_once) as pool:
        work = partial(_run, str(folder), args.jobs)
        for result in pool.map(work, range(args.first_seed, args.first_seed + args.runs)):
            results.append(result)
            for problem in result.problems[:10]:
                print(f"seed {result.seed}: {problem} (see {folder / str(result.seed)})", flush=True)
            if len(results) % 20 == 0:
                print(f"{len(results)} runs in {time.monotonic() - began:.0f} s", flush=True)
    summary = _summary(results, args.jobs, time.monotonic() - began)
    print(json.dumps(summary, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if summary["runs_with_problems"] else 0


def _run(folder: str, jobs: int, seed: int) -> Result:
    return one_run(seed, Path(folder, str(seed)), jobs=jobs)


def _summary(results: list[Result], jobs: int, seconds: float) -> dict[str, object]:
    faults: Counter[str] = Counter()
    for result in results:
        faults.update(result.faults)
    return {
        "runs": len(results),
        "jobs_a_run": jobs,
        "dispatchers": sum(result.dispatchers for result in results),
        "faults": dict(sorted(faults.items())),
        "runs_with_problems": sum(bool(result.problems) for result in results),
        "problems": [f"seed {result.seed}: {problem}" for result in results for problem in result.problems],
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
