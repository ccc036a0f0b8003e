"""The stand-in driver library, asked through NVIDIA's own Python binding, answers what the state says."""

from __future__ import annotations

from collections.abc import Callable

import pynvml

from gpuherd.standin.machine import Machine

Standin = Callable[..., Machine]


def test_lists_the_gpus_of_the_spec(standin: Standin) -> None:
    machine = standin("2x24GB+80GB")
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    assert [pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 20 for handle in handles] == [24576, 24576, 81920]
    assert tuple(pynvml.nvmlDeviceGetUUID(handle) for handle in handles) == machine.uuids
