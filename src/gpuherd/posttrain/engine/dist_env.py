"""The processes of one training and what they tell each other. One process is a world too, and needs no group.

``torchrun`` starts the processes and tells each its rank by environment variables; tensors go between GPUs by NCCL and
between CPUs by gloo, objects always by gloo.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.posttrain.engine.options import Stopped

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = timedelta(minutes=60)  # a process may sample or score for long while others wait for it
_FAREWELL = timedelta(minutes=1)

_meetings = count()  # of this process with the others: each begins with nothing that an earlier one has left behind


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands among those that torchrun has started."""

    rank: int
    size: int
    local_rank: int


def place_told(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun's variables tell; None where there are none. Raises UsageError for half of them.

    >>> variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    >>> place_told(variables)
    Place(rank=5, size=8, local_rank=1)
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    missing = [name for name in _VARIABLES if not environment.get(name)]
    if missing:
        raise UsageError(f"{', '.join(missing)} not set though other variables of torchrun are; start it by torchrun")
    try:
        rank, size, local = (int(environment[name]) for name in _VARIABLES[:3])
    except ValueError:
        raise UsageError(f"{_VARIABLES[:3]} must be whole numbers, as torchrun sets them") from None
    if not (0 <= rank < size and 0 <= local <= rank):
        raise UsageError(f"rank {rank} (local {local}) of {size} processes can't be; start it by torchrun")
    return Place(rank, size, local)


@dataclass(eq=False)
class DistEnv:
    """The processes of one training, as one of them sees it. A context manager: at its end the group is dissolved.

    Attributes:
        rank, size: this process's number, and how many there are.
        local_rank: its number on this machine, which is its GPU's.
        device: ``cpu`` or ``cuda:N``.
        backend: what tensors go by, ``gloo`` or ``nccl``; None for a single process.
    """

    rank: int
    size: int
    local_rank: int
    device: str
    backend: str | None
    _owns_group: bool = field(default=False, repr=False)
    _store: Any = field(default=None, repr=False)  # of the group that it owns

    @classmethod
    def single(cls, device: str = "cpu") -> Self:
        """One process alone."""
        return cls(0, 1, 0, device, None)

    @classmethod
    def from_environment(cls, device: str | None = None) -> Self:
        """The world that torchrun's variables tell of, one process alone where there are none.

        Args:
            device: ``cpu``, ``cuda`` or ``cuda:N``; by default this process's GPU where torch sees GPUs. In a world of
                several processes the number is the local rank's.

        Raises:
            UsageError: half of the variables are set, CUDA is asked for and not there, or fewer GPUs are seen than
                processes run here.
            GpuherdError: the processes did not find each other.
        """
        import torch

        place = place_told(os.environ)
        kind = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
        if kind == "cuda" and not torch.cuda.is_available():
            raise UsageError(f"torch {torch.__version__} finds no CUDA here; train on the CPU (--device cpu)")
        if place is None:
            return cls.single(device if device is not None and ":" in device else _first(kind))
        if kind == "cuda" and torch.cuda.device_count() <= place.local_rank:
            raise UsageError(
                f"process {place.local_rank} of this machine has no GPU: torch sees {torch.cuda.device_count()}; start "
                "fewer processes, or show them more GPUs (CUDA_VISIBLE_DEVICES)"
            )
        return cls._joined(place, kind)

    @classmethod
    def _joined(cls, place: Place, kind: str) -> Self:
        import torch
        import torch.distributed as dist

        if not dist.is_available():
            raise GpuherdError("this build of torch has no torch.distributed; install another, or train in one process")
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        if kind == "cuda":
            torch.cuda.set_device(place.local_rank)
        backend, group = ("nccl", "cpu:gloo,cuda:nccl") if kind == "cuda" else ("gloo", "gloo")
        owns, own = not dist.is_initialized(), None
        if owns:
            try:
                # Where an earlier group's addresses are still known, a process takes them for those of this one.
                store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
                own = PrefixStore(f"gpuherd {next(_meetings)}", store)
                dist.init_process_group(group, store=own, rank=place.rank, world_size=place.size, timeout=_PATIENCE)
            except (RuntimeError, ValueError) as problem:
                address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                raise GpuherdError(
                    f"process {place.rank} of {place.size} could not join the others at {address}: {problem}"
                ) from problem
        device = f"cuda:{place.local_rank}" if kind == "cuda" else "cpu"
        return cls(place.rank, place.size, place.local_rank, device, backend, owns, own)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files that are written once."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's items: every ``size``-th from its rank on."""
        return items[self.rank :: self.size]

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes, a new tensor; each process has the same."""
        if self.size == 1:
            return value.clone()
        import torch.distributed as dist

        total = value.detach().clone().contiguous()
        dist.all_reduce(total)
        return total

    def total(self, value: float) -> float:
        """The sum of a number over all processes, in float64."""
        if self.size == 1:
            return float(value)
        import torch

        return float(self.sum(torch.tensor(value, dtype=torch.float64)).item())

    def any(self, value: bool) -> bool:
        """Whether it is true in one process at least: what all must do together."""
        return self.total(float(value)) > 0

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank; each process has them all. The processes of a world trust each other: values
        are pickled."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast(self, value: T) -> T:
        """The main process's value, in every process."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        holder = [value]
        dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def from_main(self, make: Callable[[], T]) -> T:
        """What the main process makes, in every process. A GpuherdError of making it is raised in the main process, and
        ends the others by its exit code (SystemExit) without a word: they would wait for it forever, and one says it.
        """
        made: T | None = None
        problem: GpuherdError | None = None
        if self.is_main:
            try:
                made = make()
            except GpuherdError as error:
                problem = error
        found, code = self.broadcast((made, None if problem is None else int(problem.exit_code)))
        if problem is not None:
            raise problem
        if code is not None:
            raise SystemExit(code)
        return found  # type: ignore[return-value]

    def barrier(self) -> None:
        """Waits until all processes have come here."""
        self.total(0.0)

    def close(self, *, together: bool = True) -> None:
        """Dissolves the group, where this world has made it.

        Args:
            together: all processes come here, so that each waits until the others have had their last message: gloo
                resets its connections at the end, and what the other side has not read by then is lost to it.
        """
        if self._owns_group:
            import torch.distributed as dist

            if together:
                with suppress(RuntimeError):  # another one has died, and torchrun ends this one too
                    self._store.set(f"done {self.rank}", "")
                    self._store.wait([f"done {rank}" for rank in range(self.size)], _FAREWELL)
            dist.destroy_process_group()
            self._owns_group, self._store = False, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(together=kind is None or issubclass(kind, Stopped))


def _first(kind: str) -> str:
    return "cuda:0" if kind == "cuda" else kind


def leave(code: int) -> NoReturn:
    """Ends this process at once, when all is saved and closed.

    While Python takes itself apart, torch's threads may still want it, and then abort the process ("terminate called
    without an active exception"): torchrun would call a training that has ended a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
