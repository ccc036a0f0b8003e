"""What each of several users got in simulated runs, as a table. Makes text; prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuherd.simulate.charts import short_time

if TYPE_CHECKING:
    from rich.table import Table

    from gpuherd.simulate.results import Result


def user_table(results: Sequence[Result]) -> Table:
    """A row for each user of each variant."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    named = any(result.variant.name for result in results)
    if named:
        made.add_column("Rules", overflow="fold", min_width=10)
    made.add_column("User", overflow="fold", min_width=5)
    for heading in ("Weight", "Done", "GPU-h", "Share", "Of due", "Wait", "p95", "First", "Predicted"):
        made.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    for result in results:
        for place, user in enumerate(result.users):
            waits = user.waits
            made.add_row(
                *(["" if place else result.variant.name] if named else []),
                user.name,
                f"{user.weight:g}",
                str(user.done),
                f"{user.gpu_hours:.3g}",
                _percent(user.share),
                _percent(user.of_due),
                *(["N/A"] * 2 if waits is None else [_time(waits.mean_s), _time(waits.p95_s)]),
                _after(user.first_gpu_s, user.arrives_s),
                _after(user.predicted_s, user.arrives_s),
            )
    return made


def _after(second: float | None, arrived_s: float) -> str:
    return "N/A" if second is None else _time(max(0.0, second - arrived_s))


def _time(seconds: float) -> str:
    return short_time(seconds).replace(" min", "m").replace(" ", "")


def _percent(share: float | None) -> str:
    return "N/A" if share is None else f"{100 * share:.1f}%"
