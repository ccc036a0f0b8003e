"""What a person is shown of a job file before and after a run. Plain data in, rich text out; it fits in 80 columns."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuherd.batch.job_batch import PlannedJob
from gpuherd.jobs.failures import clean
from gpuherd.jobs.job import Job
from gpuherd.jobs.outcome import Outcome
from gpuherd.jobs.rundir import RunDirectory

if TYPE_CHECKING:
    from rich.console import Console

MOST_ROWS = 60
MOST_FAILURES = 20
_LONGEST_COMMAND = 200


def print_plan(console: Console, planned: Sequence[PlannedJob]) -> None:
    """The jobs that would run, those that can't and why, and the counts."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("job", overflow="fold", ratio=2)
    table.add_column("GPUs", justify="right", no_wrap=True)
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("command", overflow="ellipsis", no_wrap=True, ratio=3)
    for each in planned[:MOST_ROWS]:
        cells = (each.job.name, gpus(each.job), memory(each.job), each.state, command(each.job))
        table.add_row(*(Text(clean(cell)) for cell in cells))
    console.print(table)
    if len(planned) > MOST_ROWS:
        console.print(Text(f"… and {len(planned) - MOST_ROWS} more jobs"))
    for each in planned:
        if each.never is not None:
            console.print(Text.assemble(("refused  ", "red"), f"{clean(each.job.name)} {each.never}"), soft_wrap=True)
    states = [each.state for each in planned]
    refused = f", {states.count('refused')} refused" if "refused" in states else ""
    console.print(
        Text(f"{states.count('to do')} to do, {states.count('done')} done{refused}; nothing was started"),
        soft_wrap=True,
    )


def print_outcome(console: Console, outcome: Outcome, run: RunDirectory) -> None:
    """The counts, the failures with their reasons and logs, and where everything is."""
    from rich.text import Text

    console.print(Text(headline(outcome)), soft_wrap=True)
    for failure in outcome.failures[:MOST_FAILURES]:
        log = "" if failure.log is None else f" (log: {failure.log})"
        text = f"{clean(failure.title)}: {clean(failure.reason)}{log}"
        console.print(Text.assemble(("failed  ", "red"), text), soft_wrap=True)
    if len(outcome.failures) > MOST_FAILURES:
        console.print(Text(f"… and {len(outcome.failures) - MOST_FAILURES} more in {run.failures}"), soft_wrap=True)
    console.print(Text(f"logs     {run.logs}"), soft_wrap=True)
    console.print(Text(f"metrics  {run.gpu_metrics}"), soft_wrap=True)


def headline(outcome: Outcome) -> str:
    """The counts in one line."""
    counts = (("failed", outcome.failed), ("cancelled", outcome.cancelled), ("waiting", outcome.waiting))
    text = ", ".join([f"{outcome.done} done", *(f"{number} {word}" for word, number in counts if number)])
    return f"{text}; stopped: the same command goes on from here" if outcome.interrupted else text


def gpus(job: Job) -> str:
    """How many GPUs, as it is written in a file."""
    return str(job.gpus) if job.gpus_at_most is None else f"{job.gpus}-{job.gpus_at_most}"


def memory(job: Job) -> str:
    """Memory on each GPU in MB, a dash where nothing is said."""
    return "-" if job.memory_mb is None else str(job.memory_mb)


def command(job: Job) -> str:
    """The command as it could be typed."""
    return shlex.join(job.argv)[:_LONGEST_COMMAND]
