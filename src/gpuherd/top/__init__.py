"""The full-screen view of a run: GPUs, jobs and logs, with keys to steer it (the extra ``top``)."""

from __future__ import annotations

from gpuherd.errors import MissingExtra
from gpuherd.jobs.run_dir import RunDirectory


def show(run: RunDirectory) -> None:
    """Shows the run until the user leaves. Raises MissingExtra where gpuherd[top] is not installed."""
    try:
        import textual  # noqa: F401
    except ModuleNotFoundError as problem:
        if problem.name != "textual":
            raise
        raise MissingExtra("gpuherd top needs textual; install it with: pip install 'gpuherd[top]'") from None
    from gpuherd.top.app import TopApp

    TopApp(run).run()
