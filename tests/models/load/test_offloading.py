"""What leaves the GPUs where that is allowed: no more than must, and the first GPU has room to compute it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.models.describe.description import Architecture
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.load.placement import offloaded
from gpuherd.models.memory.kv_cache import GIB, Reserve, Workload
from gpuherd.models.memory.usage import CostTable
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec, parse_gpus
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import AnswerRefusal


@pytest.fixture(scope="module")
def big() -> Architecture:
    return read_architecture("Llama-3.1-70B")


WORK = Workload(8, 512, 64)


def test_70b_on_four_cards_of_30(big: Architecture) -> None:
    cards = parse_gpus("4x30GB")
    assert isinstance(make_plan(big, cards, Precision.FP16, WORK), AnswerRefusal)
    found = offloaded(big, cards, Precision.FP16, WORK, Reserve(), "cpu")
    assert found is not None
    architecture, devices = found
    away = [block.name for block, device in zip(architecture.blocks, devices, strict=True) if device == "cpu"]
    assert away[-1] == "lm_head" and 10 < len(away) < 30
    assert [device for device in devices if isinstance(device, int)] == sorted(
        device for device in devices if isinstance(device, int)
    )


def test_a_tied_head_stays_with_the_embedding() -> None:
    tied = read_architecture("Llama-3.2-1B")
    found = offloaded(tied, parse_gpus("1x3GB"), Precision.FP32, Workload(1, 8, 8), Reserve(), "disk")
    assert found is not None
    where = {block.name: device for block, device in zip(found[0].blocks, found[1], strict=True)}
    assert where["lm_head"] == where["model.embed_tokens"] == 0 and where["model.norm"] == "disk"


def test_no_room_even_so(big: Architecture) -> None:
    assert offloaded(big, parse_gpus("2x1GB"), Precision.FP16, WORK, Reserve(), "cpu") is None


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(2, 24), min_size=1, max_size=4),
    batch=st.integers(1, 16),
    name=st.sampled_from(["Llama-3.1-8B", "Llama-2-13B", "gpt2-xl", "Mixtral-8x7B-v0.1"]),
)
def test_every_gpu_keeps_within_what_is_free(sizes: list[int], batch: int, name: str) -> None:
    architecture = read_architecture(name)
    cards = [GpuSpec(str(place), "card", size * GIB, size * GIB) for place, size in enumerate(sizes)]
    workload = Workload(batch, 128, 32)
    found = offloaded(architecture, cards, Precision.BF16, workload, Reserve(), "cpu")
    if found is None:
        return
    laid, devices = found
    table = CostTable(laid, Precision.BF16, workload, Reserve())
    away = devices.index("cpu")
    assert set(devices[away:]) == {"cpu"}
    for number, card in enumerate(cards):
        here = [place for place, device in enumerate(devices) if device == number]
        if not here:
            continue
        assert here == list(range(here[0], here[-1] + 1))
        taken = table.usage(here[0], here[-1] + 1, card).total
        if number == 0:
            taken += max(sum(table.weights(place, place + 1)) for place in range(away, len(devices)))
            taken += table.cache(away, len(devices)).largest
        assert taken <= card.free
