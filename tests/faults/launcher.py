"""A dispatcher in a process of its own, whose machine's clock can be set: ``python launcher.py PLAN.json``.

The wall clock is that of the machine plus the seconds that a file holds, looked up at every reading: what gpuherd sees
is what it would see if somebody set the clock. Nothing of gpuherd itself is touched.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from pathlib import Path


def set_clock_by(file: Path) -> None:
    """From now on ``time.time`` is off by the seconds (a double) in ``file``."""
    real = time.time
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    time.time = lambda: real() + float(struct.unpack("d", os.pread(descriptor, 8, 0))[0])


def main() -> int:
    """Runs the plan's jobs. The exit code is the outcome's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = json.loads(Path(sys.argv[1]).read_text())
    set_clock_by(Path(plan["clock"]))
    from gpuherd.errors import GpuherdError
    from gpuherd.jobs import Job, RunDirectory, run_jobs
    from gpuherd.jobs.options import DispatchOptions

    jobs = [Job(**{**job, "argv": tuple(job["argv"]), "needs": tuple(job["needs"])}) for job in plan["jobs"]]
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
