"""What is said of simulated runs: a table with a row for each, and remarks in sentences. Makes text; prints nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpuherd.jobs.failures import clean
from gpuherd.simulate.timeline import short_time

if TYPE_CHECKING:
    from rich.table import Table

    from gpuherd.simulate.scenario import Result, Scenario


def headline(scenario: Scenario) -> str:
    """What was simulated: ``64 jobs on 8 GPUs``."""
    gpus = sum(len(machine) for machine in scenario.machines)
    where = f"{gpus} GPUs" if len(scenario.machines) == 1 else f"{len(scenario.machines)} machines with {gpus} GPUs"
    return f"{len(scenario.works)} jobs on {where}"


def line(result: Result) -> str:
    """The main figures in a line."""
    told = result.figures
    parts = [f"makespan {short_time(told.makespan_s)}"]
    if told.over_least is not None:
        parts.append(f"{told.over_least:.3g} times the least possible")
    if told.utilisation is not None:
        parts.append(f"GPUs used {_percent(told.utilisation)}")
    if told.waits is not None:
        parts.append(f"wait {short_time(told.waits.mean_s)} on average, {short_time(told.waits.p95_s)} for 95 %")
    return "; ".join(parts)


def table(results: Sequence[Result]) -> Table:
    """A row for each variant."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    named = any(result.variant.name for result in results)
    strangers = any(result.figures.strangers for result in results)
    if named:
        made.add_column("Rules", overflow="fold", min_width=13)
    headings = ("Makespan", "x least", "Used", *(["Others"] if strangers else []), "Lost", "Wait", "p50", "p95", "max")
    # Figures are never cut: where the window is narrow, the rules get more lines.
    for heading in (*headings, "Done"):
        made.add_column(heading, justify="right", no_wrap=True, min_width=max(5, len(heading)))
    for result in results:
        told, waits = result.figures, result.figures.waits
        made.add_row(
            *([result.variant.name] if named else []),
            _time(told.makespan_s),
            _figure(told.over_least, "{:.3f}"),
            _percent(told.utilisation),
            *([_percent(told.strangers)] if strangers else []),
            _percent(told.lost_gpu_hours / told.gpu_hours if told.gpu_hours else None),
            *(
                _time(value)
                for value in ((waits.mean_s, waits.p50_s, waits.p95_s, waits.max_s) if waits is not None else ())
            ),
            *(["N/A"] * 4 if waits is None else []),
            str(told.done),
        )
    return made


def remarks(scenario: Scenario, results: Sequence[Result]) -> Iterator[str]:
    """What the table does not say: failures, refusals, jobs that never came to run; and which variant was fastest."""
    for result in results:
        told = result.figures
        name = f"{result.variant.name}: " if result.variant.name else ""
        if told.failures:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(told.failures.items()))
            yield f"{name}attempts that failed: {kinds}; jobs failed: {told.failed}, cancelled: {told.cancelled}"
        if told.gave_way:
            yield f"{name}{told.gave_way} attempts were put back for a stranger"
        for reason, count in Counter(result.history.never.values()).most_common(3):
            first = next(job for job, why in result.history.never.items() if why == reason)
            job = scenario.works[first].job
            others = f" and {count - 1} more" if count > 1 else ""
            yield f"{name}refused: {clean(job.title or job.name)}{others} {reason}"
        if told.stuck:
            yield f"{name}{told.stuck} jobs never came to run: in a year nothing could start"
    if len(results) > 1:
        ended = [result for result in results if not result.figures.stuck]
        best = min(ended, key=lambda result: result.figures.makespan_s, default=None)
        worst = max(ended, key=lambda result: result.figures.makespan_s, default=None)
        if best is not None and worst is not None and worst.figures.makespan_s > best.figures.makespan_s > 0:
            times = worst.figures.makespan_s / best.figures.makespan_s
            yield f"Shortest: {best.variant.name}, {times:.3g} times as fast as {worst.variant.name}"


def _time(seconds: float) -> str:
    """A length of time in the few signs that a column has: ``1.78h``, ``35.2m``."""
    return short_time(seconds).replace(" min", "m").replace(" ", "")


def _percent(share: float | None) -> str:
    return "N/A" if share is None else f"{100 * share:.1f}%"


def _figure(value: float | None, form: str) -> str:
    return "N/A" if value is None else form.format(value)
