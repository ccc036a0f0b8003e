"""Uses for tests of the ledger."""

from __future__ import annotations

from dataclasses import replace

from gpuherd.ledger.records import Kind, Use


def use(name: str = "a", *, since: float = 1_000.0, held_s: float = 100.0, **fields: object) -> Use:
    """A job of user 1001 on GPU 0 that held it all the time."""
    plain = Use(
        id=name,
        uid=1001,
        gpu="GPU-0",
        label="0",
        kind=Kind.JOB,
        since=since,
        until=since + held_s,
        held_s=held_s,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]
