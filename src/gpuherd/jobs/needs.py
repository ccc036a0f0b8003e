"""Which jobs need which: checks that every need names a job and that no job needs itself by a detour. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpuherd.errors import UsageError
from gpuherd.jobs.job import Job


def check_needs(jobs: Sequence[Job]) -> None:
    """Raises UsageError for a name given twice, a need that names no job, and a circle (named in full)."""
    by_name: dict[str, Job] = {}
    for job in jobs:
        if job.name in by_name:
            raise UsageError(f"two jobs are named {job.name!r}; a name is given once")
        by_name[job.name] = job
    for job in jobs:
        for need in job.needs:
            if need not in by_name:
                raise UsageError(f"job {job.name!r} needs {need!r}, and there is no such job")
    circle = _circle(by_name)
    if circle:
        raise UsageError("jobs need each other in a circle: " + " needs ".join(repr(name) for name in circle))


def _circle(by_name: dict[str, Job]) -> tuple[str, ...]:
    """A circle of needs, first name repeated at the end, or (). Depth-first without recursion: chains may be long."""
    finished: set[str] = set()
    for root in by_name:
        path: dict[str, None] = {}
        stack = [(root, iter(by_name[root].needs))] if root not in finished else []
        path[root] = None
        while stack:
            name, rest = stack[-1]
            need = next(rest, None)
            if need is None:
                stack.pop()
                del path[name]
                finished.add(name)
            elif need in path:
                names = list(path)
                return (*names[names.index(need) :], need)
            elif need not in finished:
                path[need] = None
                stack.append((need, iter(by_name[need].needs)))
    return ()
