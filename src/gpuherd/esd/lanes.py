"""Analyses matrices on GPUs in lanes: some threads read ahead, each lane computes spectra in a stream of its own, and
the fits run on threads of the CPU meanwhile.

Knows threads, order, the memory of what was read and not yet taken, and what to do when one fails. Which matrix goes
where is planned by `spectra.batching`, what is computed is in `on_device`; knows no files and no columns.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from gpuherd.engines.host import cores
from gpuherd.esd.on_device import (
    Computed,
    MatrixResult,
    MatrixWork,
    Piece,
    compute_group,
    free_cache,
    memory_of,
    own_stream,
    piece_bytes,
    read_pieces,
    reads_slices,
    settle,
    size_of,
    warm_up,
)
from gpuherd.esd.spectra.batching import LanePlan, MatrixGroup, batch_of, plan_lanes
from gpuherd.esd.spectra.device import GramArithmetic, did_not_converge, ieee_float32
from gpuherd.runs.worker import is_out_of_memory

if TYPE_CHECKING:
    from gpuherd.models.tensors.matrices import WeightMatrix


# ---- reading ahead: in a given order, and no more ahead than so many bytes


class LanesStopped(Exception):
    """Reading was stopped: the requested pieces will not come."""


class Delivery:
    """The pieces of one matrix, on their way from the reader to whoever takes them: iterate over it once."""

    def __init__(self, ahead: ReadAhead) -> None:
        self._ahead = ahead
        self._pieces: SimpleQueue[Piece | BaseException | None] = SimpleQueue()
        self._unwanted = False
        self._ended = False

    def __iter__(self) -> Iterator[Piece]:
        """The pieces in order. A piece counts as in memory until the next one is asked for.

        Raises:
            Stopped: another part of the work failed.
            BaseException: what reading this matrix raised.
        """
        while (piece := self._next()) is not None:
            nbytes = piece_bytes(piece)
            try:
                yield piece
            finally:
                del piece
                self._ahead.freed(nbytes)

    def discard(self) -> None:
        """Stops reading: the rest is not read, what was read is released, and reading errors are no longer raised."""
        self._unwanted = True
        while not self._ended:
            with suppress(BaseException):
                piece = self._next()
                if piece is not None:
                    self._ahead.freed(piece_bytes(piece))

    def _next(self) -> Piece | None:
        item = self._pieces.get()
        self._ended = item is None or isinstance(item, BaseException)
        if isinstance(item, BaseException):
            raise item
        return item

    def fill(self, pieces: Callable[[], Iterable[Piece]]) -> None:
        """Reads everything into the delivery; what goes wrong goes in too. By the reader's thread."""
        try:
            if self._ahead.stopped:
                raise LanesStopped
            for piece in pieces():
                if self._unwanted:
                    break
                self._ahead.wait_for_memory(piece_bytes(piece))
                self._pieces.put(piece)
                del piece
        except BaseException as problem:
            self._pieces.put(problem)
        else:
            self._pieces.put(None)


class ReadAhead:
    """Counts the bytes that were read and not yet taken. A piece larger than the limit waits until nothing else is.
    ``stopped``: ``stop`` was called."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held = 0
        self.stopped = False
        self._changed = threading.Condition()

    def wait_for_memory(self, nbytes: int) -> None:
        """Waits until so many bytes more may be held, and counts them. Raises Stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or self._held == 0 or self._held + nbytes <= self._most)
            if self.stopped:
                raise LanesStopped
            self._held += nbytes

    def freed(self, nbytes: int) -> None:
        """So many bytes are held no longer."""
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()

    def stop(self) -> None:
        """Nothing more is read: a reader that waits for room gets Stopped, and so does who waits for its pieces."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()


# ---- the lanes

logger = logging.getLogger(__name__)

# Read and not yet on a GPU: enough that lanes find work, and little compared with a model.
READ_AHEAD_BYTES = 1 << 30
# One thread copies a few GB a second out of the page cache, and a fast disk wants several requests. Each reader has its
# own share of the bytes: the first group that is not finished can then always go on, whatever the others hold.
READERS = 4
# Threads of the CPU for fits, small matrices, and the eigenvalues of bands. Each is busy for no longer than a core is.
MOST_FIT_THREADS = 32


@dataclass
class Left:
    """What the lanes left to be done one after the other: ``alone`` ran out of memory while others ran, ``on_cpu`` is
    what a device can't finish in this precision (deficient rank, no numbers)."""

    alone: list[int] = field(default_factory=list)
    on_cpu: list[int] = field(default_factory=list)


class Lanes:
    """One run over some matrices of a model. Call ``run`` once.

    Args:
        matrices: of the model.
        todo: which of them.
        needs_weights: figures need the weights, which are then read whole.
        devices: as torch names them.
        arithmetic: of each device.
        finish: called with each result that has a spectrum, from one of several threads.
        spectrum_on_cpu: gives a result for a small matrix, by index.
        read_ahead_bytes: read and not yet on a GPU, at most, but for one piece a reader.
    """

    def __init__(
        self,
        matrices: Sequence[WeightMatrix],
        todo: Sequence[int],
        needs_weights: bool,
        devices: Sequence[str],
        arithmetic: Sequence[GramArithmetic],
        finish: Callable[[MatrixResult], None],
        spectrum_on_cpu: Callable[[int], MatrixResult],
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> None:
        self._matrices = matrices
        self._needs_weights = needs_weights
        self._devices = devices
        self._finish = finish
        self._spectrum_on_cpu = spectrum_on_cpu
        memory = memory_of(devices)
        sizes = [size_of(index, matrices[index], memory[1] if memory else None) for index in todo]
        self._plan: LanePlan = plan_lanes(sizes, len(devices), memory[0] if memory else None)
        self._arithmetic = arithmetic
        self._to_read = iter([group for group in self._plan.groups if group.device is not None])
        self._shares: list[ReadAhead] = [ReadAhead(read_ahead_bytes // READERS) for _ in range(READERS)]
        self._waiting: list[SimpleQueue[tuple[MatrixGroup, list[Delivery]] | None]] = [SimpleQueue() for _ in devices]
        self._reading = READERS
        self._lock = threading.Lock()
        self._left = Left()
        self._errors: list[BaseException] = []

    def run(self) -> Left:
        """Analyses everything. Returns what is left to do; raises the first error that is not one matrix's own."""
        by_device = [[g for g in self._plan.groups if g.device == number] for number in range(len(self._devices))]
        threads = [
            threading.Thread(target=self._read, args=(share,), name=f"lane reader {number}")
            for number, share in enumerate(self._shares)
        ]
        for number, groups in enumerate(by_device):
            logger.info(
                "%s: %d groups of matrices in %d lanes, Gram matrices in %s, eigenvalues by the %s",
                self._devices[number], len(groups), min(self._plan.lanes, len(groups)),
                self._arithmetic[number].gram, self._arithmetic[number].solver,
            )  # fmt: skip
            for lane in range(min(self._plan.lanes, len(groups))):
                name = f"lane {lane} on {self._devices[number]}"
                threads.append(threading.Thread(target=self._lane, args=(number,), name=name))
        for device in self._devices:
            warm_up(device)
        fit_threads = max(1, min(MOST_FIT_THREADS, cores() - 1))
        with ieee_float32(), ThreadPoolExecutor(fit_threads, thread_name_prefix="lane fit") as self._pool:
            for group in self._plan.groups:
                if group.device is None:
                    self._pool.submit(self._host_group, group)
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            except BaseException:
                self._stop()
                raise
        if self._errors:
            raise self._errors[0]
        free_cache(self._devices)
        return Left(sorted(self._left.alone), sorted(self._left.on_cpu))

    def _read(self, share: ReadAhead) -> None:
        """A reader: groups for the GPUs in the order of the plan, each read by one thread, until there are no more."""
        try:
            while (item := self._next_group(share)) is not None:
                group, device, deliveries = item
                for index, delivery in zip(group.indices, deliveries, strict=True):
                    matrix, whole = self._matrices[index], self._reads_slices(index)
                    delivery.fill(partial(read_pieces, matrix, self._devices[device], whole))
        finally:
            with self._lock:
                self._reading -= 1
                if self._reading == 0:
                    for queue in self._waiting:
                        for _ in range(self._plan.lanes):
                            queue.put(None)

    def _next_group(self, share: ReadAhead) -> tuple[MatrixGroup, int, list[Delivery]] | None:
        """The next group, handed to its GPU before it is read: lanes take groups in the order of reading."""
        with self._lock:
            group = next(self._to_read, None)
            if group is None or group.device is None:
                return None
            deliveries = [Delivery(share) for _ in group.indices]
            self._waiting[group.device].put((group, deliveries))
            return group, group.device, deliveries

    def _reads_slices(self, index: int) -> bool:
        return reads_slices(self._matrices[index], self._needs_weights)

    def _lane(self, number: int) -> None:
        """One lane: groups for its GPU until there are no more."""
        nothing: set[int] = set()
        with self._errors_of(nothing), own_stream(self._devices[number]):
            while (item := self._waiting[number].get()) is not None:
                group, deliveries = item
                unfinished = set(group.indices)
                with self._errors_of(unfinished):
                    self._compute(group, deliveries, number, unfinished)
                for delivery in deliveries:
                    delivery.discard()

    def _compute(self, group: MatrixGroup, deliveries: Sequence[Delivery], number: int, unfinished: set[int]) -> None:
        """Computes a group and hands its results on; takes what it is done with out of ``unfinished``."""
        work = [
            MatrixWork(index, self._matrices[index], delivery, self._reads_slices(index))
            for index, delivery in zip(group.indices, deliveries, strict=True)
        ]
        arithmetic, device = self._arithmetic[number], self._devices[number]
        for computed in compute_group(work, device, arithmetic, batch_of):
            unfinished.discard(computed.index)
            if self._needs_weights:
                # The lane waits for these fits, so that weights are held of no more matrices than there are lanes.
                self._finish_one(computed)
            else:
                self._pool.submit(self._finish_one, replace(computed, weights=None))

    def _finish_one(self, computed: Computed) -> None:
        with self._errors_of({computed.index}):
            result = settle(computed)
            if result.spectrum is not None:
                self._finish(result)
                return
            with self._lock:
                self._left.on_cpu.append(result.index)

    def _host_group(self, group: MatrixGroup) -> None:
        """A small matrix, or the parts of one tensor, on the CPU; reads by itself."""
        for index in group.indices:
            with self._errors_of({index}):
                if not self._shares[0].stopped:
                    self._finish(self._spectrum_on_cpu(index))

    @contextmanager
    def _errors_of(self, indices: set[int]) -> Iterator[None]:
        """What goes wrong with these matrices: noted for another try, or the end of all lanes."""
        try:
            yield
        except LanesStopped:
            pass
        except BaseException as problem:
            with self._lock:
                if indices and is_out_of_memory(problem):
                    self._left.alone += indices
                elif indices and did_not_converge(problem):
                    self._left.on_cpu += indices
                else:
                    self._errors.append(problem)
            if self._errors:
                self._stop()

    def _stop(self) -> None:
        """Nothing more is read, so that all lanes come to their end."""
        for share in self._shares:
            share.stop()
