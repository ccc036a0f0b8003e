"""Descriptions of GPUs for tests of pure functions, hypothesis strategies that draw them, and a check for pauses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from gpuherd.gpus.state import Gpu, GpuProcess, Peer, Proximity


def gpu(index: int, *, used_mb: int = 0, total_mb: int = 40_960, **fields: object) -> Gpu:
    """A working GPU of 40 GB unless said otherwise."""
    uuid = fields.pop("uuid", f"GPU-{index:08x}-aaaa")
    plain = Gpu(
        index=index,
        uuid=str(uuid),
        name="Test GPU",
        total_mb=total_mb,
        used_mb=used_mb,
        free_mb=total_mb - used_mb,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def split(index: int, positions: Sequence[int]) -> list[Gpu]:
    """A GPU in MIG mode and its instances at these places."""
    parent = gpu(index)
    instances = [
        gpu(
            index,
            total_mb=20_480,
            uuid=f"MIG-{index}{position}-bbbb",
            mig_parent=parent.uuid,
            mig_position=position,
        )
        for position in positions
    ]
    return [replace(parent, mig_instances=tuple(instance.uuid for instance in instances)), *instances]


def process(pid: int = 4711, *, memory_mb: int | None = 900, compute: bool = True) -> GpuProcess:
    """Alice's python."""
    return GpuProcess(pid=pid, user="alice", command="python", memory_mb=memory_mb, compute=compute)


@st.composite
def machines(draw: st.DrawFn, *, mig: bool = True, most: int = 5) -> list[Gpu]:
    """Some GPUs in PCI order, some of them split."""
    gpus: list[Gpu] = []
    for index in range(draw(st.integers(0, most))):
        if mig and draw(st.booleans()):
            gpus += split(index, sorted(draw(st.sets(st.integers(0, 6), min_size=1, max_size=3))))
        else:
            gpus.append(gpu(index))
    return gpus


@st.composite
def linked_machines(draw: st.DrawFn, *, most: int = 6) -> list[Gpu]:
    """Whole GPUs with any load, links and NUMA nodes."""
    count = draw(st.integers(1, most))
    ways = {
        (one, two): (draw(st.integers(0, 2)), draw(st.sampled_from(Proximity)))
        for one in range(count)
        for two in range(one + 1, count)
    }
    gpus = []
    for index in range(count):
        peers = tuple(
            Peer(gpu(other).uuid, *ways[min(index, other), max(index, other)])
            for other in range(count)
            if other != index
        )
        load = draw(st.sampled_from([0, 0, 3, 20_000]))
        busy = draw(st.sampled_from([None, 0, 50]))
        node = draw(st.sampled_from([None, 0, 1]))
        gpus.append(gpu(index, used_mb=load, utilisation_percent=busy, numa_node=node, peers=peers))
    return gpus


@contextmanager
def no_pauses() -> Iterator[None]:
    """Fails when a driver that can't answer is queried again after a pause."""

    def refuse(seconds: float) -> None:
        raise AssertionError(f"a pause of {seconds} s before another try")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpuherd.gpus.query.time.sleep", refuse)
        yield
