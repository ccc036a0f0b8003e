"""A follower in a process of its own, whose engine is the tests': ``python follower.py PLAN.json``."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path


def main() -> int:
    """Runs the plan's jobs. The exit code is the outcome's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.jobs.handover.process_engine import ProcessEngine

    from gpuherd.errors import GpuherdError
    from gpuherd.jobs import DispatchOptions, Job, RunDirectory, run_jobs
    from gpuherd.jobs.handover import handover, opening

    handover.PATIENCE_S = 0.5
    opening.make = lambda options: ProcessEngine(Path(plan["cluster"]), options.engine, **plan.get("engine", {}))
    jobs = [Job(**{**job, "argv": tuple(job["argv"]), "needs": tuple(job["needs"])}) for job in plan["jobs"]]
    print("begins", flush=True)
    try:
        outcome = run_jobs(
            jobs,
            DispatchOptions(**plan["options"]),
            RunDirectory(plan["root"]),
            grace_s=plan["grace_s"],
            on_event=lambda event: print(event.kind, event.text, flush=True),
        )
    except GpuherdError as error:
        print(error, flush=True)
        return error.exit_code
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
