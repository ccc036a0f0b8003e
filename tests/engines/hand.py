"""Hands batches to an engine and follows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.patience import wait_until

from gpuherd.engines.base import Batch, Engine, Parcel, Phase, Placement, Sighting, Ticket


class Hand:
    """Hands batches to an engine and follows them, as a test's own little follower."""

    def __init__(self, engine: Engine, folder: Path):
        self.engine = engine
        self.folder = folder
        self.tickets: dict[int, Ticket] = {}
        self._batches = 0

    def over(
        self,
        *command: str,
        count: int = 1,
        after: tuple[str, ...] = (),
        at_once: int | None = None,
        placement: Placement | None = None,
    ) -> list[int]:
        """Hands a batch over; the numbers of its attempts. The command's last word is the index."""
        self._batches += 1
        first = len(self.tickets) + 1
        batch = Batch(
            name=f"{self.folder.name}-{self._batches}",
            placement=placement or Placement(gpus=1),
            parcels=tuple(Parcel(attempt=first + at, title=f"job {first + at}") for at in range(count)),
            command=command,
            folder=self.folder,
            after=after,
            at_once=at_once,
        )
        handles = self.engine.submit(batch)
        assert len(handles) == count
        for index, (parcel, handle) in enumerate(zip(batch.parcels, handles, strict=True)):
            self.tickets[parcel.attempt] = Ticket(parcel.attempt, batch.name, index, handle)
        return [parcel.attempt for parcel in batch.parcels]

    def handle(self, attempt: int) -> str:
        handle = self.tickets[attempt].handle
        assert handle is not None
        return handle

    def look(self) -> dict[int, Sighting]:
        return dict(self.engine.look(list(self.tickets.values())))

    def sighting(self, attempt: int) -> Sighting:
        return self.look()[attempt]

    def until(self, condition: Callable[[dict[int, Sighting]], bool]) -> dict[int, Sighting]:
        """Looks until it is true of what is seen; what is seen then."""
        seen: dict[int, Sighting] = {}

        def there() -> bool:
            nonlocal seen
            seen = self.look()
            return condition(seen)

        wait_until(there, every_s=0.1, told=lambda: str(seen))
        return seen

    def until_ended(self, *attempts: int) -> dict[int, Sighting]:
        return self.until(lambda seen: all(seen[each].phase is Phase.ENDED for each in attempts or self.tickets))

    def until_running(self, *attempts: int) -> dict[int, Sighting]:
        return self.until(lambda seen: all(seen[each].phase is Phase.RUNNING for each in attempts))
