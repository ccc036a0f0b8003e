"""A follower in a process of its own, whose engine is the tests': ``python follower.py PLAN.json``."""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def die_at(where: str, when: str) -> None:
    """SIGKILL to ourselves before or after the first call of this: ``module:Class.method``."""
    module, _, name = where.partition(":")
    *path, last = name.split(".")
    owner: Any = import_module(module)
    for each in path:
        owner = getattr(owner, each)
    real = getattr(owner, last)

    def dying(*arguments: Any, **more: Any) -> None:
        if when == "after":
            real(*arguments, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, last, dying)


def main() -> int:
    """Runs the plan's jobs. The exit code is the outcome's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.jobs.remote.process_engine import ProcessEngine

    from gpuherd.errors import GpuherdError
    from gpuherd.jobs import DispatchOptions, Job, RunDirectory, run_jobs
    from gpuherd.jobs.remote import dispatcher as handover
    from gpuherd.jobs.remote import dispatcher as opening

    vars(handover)["REPORT_DELAY_S"] = 0.5
    opening.make = lambda options: ProcessEngine(Path(plan["cluster"]), options.engine, **plan.get("engine", {}))
    if plan.get("dies"):
        die_at(*plan["dies"])
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
