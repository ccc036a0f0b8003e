"""Real batches with their manifests, as the loop over a queue makes them, and a loop that only looks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.patience import wait_until

from gpuherd.engines.base import Batch, Engine, Parcel, Phase, Placement, Sighting, Ticket
from gpuherd.jobs.job import Job
from gpuherd.jobs.remote.protocol import Claim, EndReport, Manifest, Order, portable, read_claim, read_ended, to_json


class Parcels:
    """One batch of like attempts below a folder of its own."""

    def __init__(
        self, folder: Path, argv: Sequence[str], placement: Placement, *, count: int = 1, grace_s: float = 2.0
    ):
        self.folder = folder
        folder.mkdir(parents=True)
        # As in the queue: no other batch has the name, whatever test made it.
        name = f"t{os.getpid()}-{folder.name}-{abs(hash(folder)):x}"
        orders = tuple(
            Order(
                attempt=number,
                tag=f"{name}/{number}",
                job=Job(name=f"{number}", argv=tuple(argv), cwd=str(folder), nodes=placement.nodes),
                log=str(folder / f"{number}.log"),
                progress=str(folder / f"{number}.progress"),
                claim=str(folder / f"{number}.claim"),
                ended=str(folder / f"{number}.ended"),
                gpus=placement.gpus,
                grace_s=grace_s,
            )
            for number in range(count)
        )
        manifest = folder / "manifest.json"
        manifest.write_text(
            to_json(Manifest(batch=name, engine="ray", environment=portable(os.environ), orders=orders))
        )
        self.batch = Batch(
            name=name,
            placement=placement,
            parcels=tuple(Parcel(attempt=number, title=f"{folder.name} {number}") for number in range(count)),
            command=(sys.executable, "-m", "gpuherd.jobs.remote.agent", str(manifest)),
            folder=folder,
        )
        self.tickets = [Ticket(each.attempt, name, index) for index, each in enumerate(self.batch.parcels)]

    def log(self, number: int = 0) -> str:
        """What an attempt has printed."""
        return (self.folder / f"{number}.log").read_text()

    def begin(self) -> None:
        """Waits until all have printed something: from then on their leaders' deaths are told of."""
        logs = [self.folder / f"{each.attempt}.log" for each in self.batch.parcels]
        wait_until(lambda: all(log.exists() and log.stat().st_size > 0 for log in logs), 240)

    def claim(self, number: int = 0) -> Claim | None:
        """Who has an attempt."""
        return read_claim(self.folder / f"{number}.claim")

    def ended(self, number: int = 0) -> EndReport:
        """How an attempt ended, waited for."""
        path = self.folder / f"{number}.ended"
        wait_until(path.exists)
        found = read_ended(path)
        assert found is not None
        return found

    def until(
        self, engine: Engine, condition: Callable[[Mapping[int, Sighting]], bool], within_s: float = 240.0
    ) -> Mapping[int, Sighting]:
        """Looks until it is so; what was seen then."""
        seen: Mapping[int, Sighting] = {}

        def look() -> bool:
            nonlocal seen
            seen = engine.look(self.tickets)
            return condition(seen)

        wait_until(look, within_s, 0.05, lambda: str(seen))
        return seen

    def to_the_end(self, engine: Engine, within_s: float = 240.0) -> Mapping[int, Sighting]:
        """Looks until all have ended."""
        return self.until(engine, lambda seen: len(seen) == len(self.tickets) and all_in(seen, Phase.ENDED), within_s)


def all_in(seen: Mapping[int, Sighting], phase: Phase) -> bool:
    """Whether all that was seen is in this phase."""
    return bool(seen) and all(each.phase is phase for each in seen.values())
