"""Where an attempt is that an engine beyond this machine has, in words for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuherd.jobs.failures import clean
from gpuherd.jobs.records import Handed
from gpuherd.jobs.standing import Standing

_NAMES: Mapping[str, str] = {"slurm": "SLURM", "ray": "Ray"}


@dataclass(frozen=True, slots=True)
class InEngine:
    """How many running jobs an engine beyond this machine has, and how many of them have not begun there."""

    engine: str
    jobs: int
    in_line: int


def engine_name(engine: str) -> str:
    """The engine as people write it.

    >>> engine_name("slurm"), engine_name("ray")
    ('SLURM', 'Ray')
    """
    return _NAMES.get(engine) or clean(engine)


def why_in_line(handed: Handed, attempt: int, standing: Standing | None) -> str:
    """Why an attempt that was handed over has not begun, as a sentence.

    >>> why_in_line(Handed("slurm", "b1", 0, "17_0"), 4, Standing(pid=1, handed={4: "Resources"}))
    'waits in SLURM: Resources'
    """
    there = engine_name(handed.engine)
    if handed.handle is None:
        return f"is being handed to {there}"
    reason = None if standing is None else standing.handed.get(attempt)
    return f"waits in {there}" + (f": {clean(reason)}" if reason else "")


def there(in_engine: InEngine) -> str:
    """What an engine has, as a part of a sentence.

    >>> there(InEngine("slurm", 12, 5)), there(InEngine("ray", 1, 1))
    ('12 jobs in SLURM, 5 of them in its queue', '1 job in Ray, in its queue')
    """
    if in_engine.jobs == 1:
        return f"1 job in {engine_name(in_engine.engine)}" + (", in its queue" if in_engine.in_line else "")
    of_them = f", {in_engine.in_line} of them in its queue" if in_engine.in_line else ""
    return f"{in_engine.jobs} jobs in {engine_name(in_engine.engine)}{of_them}"
