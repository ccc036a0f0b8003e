"""What a person is shown of a job file before and after a run. Plain data in, rich text out; it fits in 80 columns."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuherd.batch.job_batch import PlannedJob
from gpuherd.columns import Column, fitted, window
from gpuherd.errors import printable
from gpuherd.jobs.failures import clean
from gpuherd.jobs.job import Job
from gpuherd.jobs.outcome import Outcome
from gpuherd.jobs.rundir import RunDirectory

if TYPE_CHECKING:
    from rich.console import Console

MOST_ROWS = 60
MOST_FAILURES = 20
_PLAN = (
    Column("job", 0, middle=True),
    Column("GPUs", 3, right=True),
    Column("MB", 4, right=True),
    Column("state", 1),
    Column("command", 2, least=16),
)


def print_plan(console: Console, planned: Sequence[PlannedJob], where: str | None = None) -> None:
    """The jobs that would run, those that can't and why, and the counts. ``where``: an engine beyond this machine."""
    from rich.text import Text

    # A pipe gets every job, in full.
    width = window(console)
    shown = planned if width is None else planned[:MOST_ROWS]
    columns = _PLAN if where is None else (*_PLAN[:-1], Column(f"asks {where} for", 2, least=10), _PLAN[-1])
    table = fitted(columns, [_words(each, there=where is not None) for each in shown], width)
    console.print(Text(table.lines[0], style="bold"), soft_wrap=True)
    console.print(Text("\n".join(table.lines[1:])), soft_wrap=True)
    console.print()
    if len(planned) > len(shown):
        console.print(Text(f"… and {len(planned) - len(shown)} more jobs"))
    if table.left_out:
        console.print(Text(f"no room for {', '.join(table.left_out)}: a wider window or --json shows them"))
    for each in planned:
        if each.never is not None:
            console.print(Text.assemble(("refused  ", "red"), f"{clean(each.job.name)} {each.never}"), soft_wrap=True)
    states = [each.state for each in planned]
    refused = f", {states.count('refused')} refused" if "refused" in states else ""
    console.print(
        Text(f"{states.count('to do')} to do, {states.count('done')} done{refused}; nothing was started"),
        soft_wrap=True,
    )


def _words(planned: PlannedJob, *, there: bool) -> tuple[str, ...]:
    job = planned.job
    asks = (planned.asks or "-",) if there else ()
    return tuple(printable(word) for word in (job.name, gpus(job), memory(job), planned.state, *asks, command(job)))


def print_outcome(console: Console, outcome: Outcome, run: RunDirectory) -> None:
    """The counts, the failures with their reasons and logs, and where everything is."""
    from rich.text import Text

    console.print(Text(headline(outcome)), soft_wrap=True)
    for failure in outcome.failures[:MOST_FAILURES]:
        text = f"{clean(failure.title)}: {printable(failure.sentence)}"
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
    return shlex.join(job.argv)
