"""Orders and manifests for the tests of the leader."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpuherd.jobs.job import Job
from gpuherd.jobs.remote.protocol import EndReport, Manifest, Order, read_ended, to_json

NODE = (sys.executable, "-m", "gpuherd.jobs.remote.agent")


def order(folder: Path, argv: tuple[str, ...], number: int = 1, **more: Any) -> Order:
    """An attempt whose files lie in the folder."""
    fields: dict[str, Any] = {
        "log": str(folder / f"{number}.log"),
        "progress": str(folder / f"{number:08d}.progress"),
        "claim": str(folder / f"{number:08d}.claim"),
        "ended": str(folder / f"{number:08d}.ended"),
        "gpus": 0,
        "grace_s": 5.0,
    }
    of_job = {
        each.name: more.pop(each.name) for each in dataclasses.fields(Job) if each.name in more and each.name != "gpus"
    }
    job = Job(name=f"{number}", argv=argv, **of_job)
    return Order(attempt=number, tag=f"{folder}/{number}", job=job, **{**fields, **more})


def shell(folder: Path, script: str, number: int = 1, **more: Any) -> Order:
    """The same for a line of shell."""
    return order(folder, ("/bin/sh", "-c", script), number, **more)


def written(folder: Path, *orders: Order, engine: str = "ray", environment: Mapping[str, str] | None = None) -> str:
    """Writes their manifest; its path."""
    path = folder / "batch.json"
    path.write_text(to_json(Manifest(batch="b", engine=engine, environment=environment or {}, orders=orders)))
    return str(path)


def end(order: Order) -> EndReport:
    """What was told of its end."""
    found = read_ended(Path(order.ended))
    assert found is not None, f"nothing was told of attempt {order.attempt}"
    return found


@contextmanager
def leader(
    manifest: str, index: int = 0, words: Sequence[str] = NODE, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """The command as an engine starts it; killed at the end where it hasn't ended."""
    with subprocess.Popen(
        [*words, manifest, str(index)], stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as child:
        try:
            yield child
        finally:
            child.kill()
