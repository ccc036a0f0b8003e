"""The interface to a maker of GPUs: one ``Driver`` for each management library (``nvml``, ``amdsmi``).

A driver makes single calls and decides nothing: sessions, retries and the assembly of a ``Machine`` are
``gpuherd.gpus.query``'s part, and the environment variables that show GPUs to a process, by ``maker``, that of
``gpuherd.gpus.visible``. To support another maker, write a class with these methods, and add it to ``query.DRIVERS``,
and its variables to ``visible.RUNTIMES``.

Calls are of two kinds. Those that decide whether a GPU can be used (``device``, ``identity``, ``place``,
``partitions``, ``memory``, ``processes``) raise ``error``, but return None where the library has no such figure for
this GPU or user. All others rank GPUs or inform people: any error of theirs gives None, so that one broken sensor, or a
lost neighbour, costs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpuherd.gpus.state import Gpu, GpuProcess, Maker, Peer

MB = 1 << 20
# While a caller waits for a driver, it is started again so often: each time may start its kernel module's loader.
DRIVER_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a GPU or partition in MB, whoever uses it."""

    total_mb: int
    used_mb: int
    free_mb: int


@dataclass(frozen=True, slots=True)
class Sensors:
    """Figures that inform people and rank GPUs."""

    utilisation_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True)
class DriverEvent:
    """The last critical error that the driver has reported of a GPU, how many there were, and a sentence about it if it
    is the GPU's own fault."""

    number: int
    count: int
    fault: str | None


@dataclass(frozen=True, slots=True)
class DriverFailure:
    """Why the whole driver, or one GPU, can't be used, as a sentence for people.

    ``lasting``: another try at once can't help. ``installed``: the driver's library is there, so it may work later.
    """

    sentence: str
    lasting: bool = False
    installed: bool = True


class Events(Protocol):
    """A subscription to the critical errors of some GPUs."""

    def seen(self) -> Mapping[str, DriverEvent]:
        """By UUID, the errors since the subscription; GPUs without any are missing."""

    def close(self) -> None:
        """Ends the subscription."""


class Driver(Protocol):
    """One maker's management library. A handle is the library's own reference to a GPU or a partition of one."""

    maker: Maker
    error: type[Exception]
    numbers_in_order: bool  # whether the library numbers GPUs as the maker's runtime counts them

    def open(self) -> None:
        """Starts the library. Raises ``error``."""

    def close(self) -> None:
        """Ends it; a driver that is gone has nothing left to close."""

    def count(self) -> int:
        """How many GPUs there are. Raises ``error``."""

    def versions(self) -> tuple[str | None, str | None]:
        """The driver's version, and the newest CUDA that it supports (None for other makers)."""

    def device(self, number: int) -> Any:
        """The handle of a GPU, by the library's own number. Raises ``error``."""

    def identity(self, handle: Any) -> Gpu:
        """The GPU with its properties that never change, without index and figures. Raises ``error``."""

    def place(self, handle: Any) -> tuple[int, ...] | None:
        """Sorts GPUs as the maker's runtime counts them. Raises ``error``."""

    def partitions(self, handle: Any, whole: Gpu) -> Sequence[tuple[Any, Gpu]] | DriverFailure | None:
        """The parts of a GPU that is split and that are used like GPUs of their own (MIG instances), each with its
        handle; None for one that is not split; a Failure for one that is split and of whose parts none can be used.
        Raises ``error``."""

    def memory(self, handle: Any) -> Memory | None:
        """Of a GPU or a partition. Raises ``error``."""

    def processes(self, handle: Any) -> Iterable[GpuProcess]:
        """On a GPU or a partition, without their owners; a process may be listed twice, for computing first. Raises
        ``error``."""

    def sensors(self, handle: Any) -> Sensors:
        """Utilisation, temperature and power of a whole GPU."""

    def uncorrected_errors(self, handle: Any) -> int | None:
        """Memory errors that could not be corrected, since the driver was loaded."""

    def events(self, handles: Mapping[str, Any]) -> Events | None:
        """Subscribes to critical errors of these GPUs, by UUID; None where the library has no such events."""

    def peers(self, handles: Mapping[Gpu, Any]) -> dict[str, tuple[Peer, ...]]:
        """For each of these GPUs by UUID, the paths to all others."""

    def machine_failure(self, error: Exception) -> DriverFailure:
        """The sentence for an error of the whole driver, and whether to try again."""

    def gpu_failure(self, error: Exception) -> DriverFailure:
        """The sentence for an error of one GPU, and whether to try again."""
