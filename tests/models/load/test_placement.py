"""From plans and device maps to a device for each block: whole blocks, no GPU that isn't there, nothing offloaded
unasked.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.describe.formulas.from_config import architecture_of

from gpuherd.errors import UsageError
from gpuherd.models.describe.description import Architecture
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.load.placement import (
    BlockPlacement,
    all_on,
    block_of,
    device_of,
    from_device_map,
    from_plan,
    weights_by_device,
)
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import parse_gpus
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import MemoryPlan


@pytest.fixture(scope="module")
def big() -> Architecture:
    return read_architecture("Llama-3.1-70B")


def plan_of(architecture: Architecture, gpus: str, precision: Precision = Precision.BF16, **more: Any) -> MemoryPlan:
    plan = make_plan(architecture, parse_gpus(gpus), precision, Workload(8, 512, 64), **more)
    assert isinstance(plan, MemoryPlan)
    return plan


def test_a_plan_gives_every_block_its_gpu_under_the_numbers_of_this_process(big: Architecture) -> None:
    plan = plan_of(big, "4x40GB")
    placement = from_plan(plan, [3, 1, 0, 2])
    numbers = [placement.by_block[name] for name in placement.by_block]
    assert list(placement.by_block) == [block.name for block in plan.architecture.blocks]
    assert set(numbers) == {0, 1, 2, 3} and numbers[0] == 3 and numbers[-1] == 2
    assert not placement.offloads
    assert placement.input_device == "cuda:3"


def test_what_transformers_refuses_is_planned_whole(big: Architecture) -> None:
    """70B int8 on 2 x 40 GiB: device_map="auto" ends in ValueError; here no block leaves the GPUs."""
    placement = from_plan(plan_of(big, "2x40GB", Precision.INT8), range(2))
    assert set(placement.devices) == {0, 1}
    layers = [device for name, device in placement.by_block.items() if ".layers." in name]
    assert abs(layers.count(0) - layers.count(1)) <= 1


def test_pretended_gpus_lie_in_the_cpus_memory_and_keep_their_numbers(big: Architecture) -> None:
    placement = from_plan(plan_of(big, "4x40GB"), range(4), simulated=True)
    assert set(placement.device_map.values()) == {"cpu"}
    assert set(placement.by_block.values()) == {0, 1, 2, 3}
    assert placement.input_device == "cpu" and not placement.offloads


def test_bytes_of_a_placement_are_those_of_the_plan(big: Architecture) -> None:
    for precision in (Precision.BF16, Precision.INT8, Precision.NF4_DQ):
        plan = plan_of(big, "4x80GB", precision, parallel="layers")
        placement = from_plan(plan, range(4))
        by_device = weights_by_device(plan.architecture, placement.devices, precision)
        assert by_device == {
            number: load.usage.weights + load.usage.quantisation for number, load in enumerate(plan.loads)
        }


def test_a_tied_head_counts_once_where_the_embedding_is_and_once_more_elsewhere() -> None:
    tied = read_architecture("Llama-3.2-1B")
    here = weights_by_device(tied, [0] * len(tied.blocks), Precision.BF16)[0]
    apart = weights_by_device(tied, [0] * (len(tied.blocks) - 1) + [1], Precision.BF16)
    assert here == 2 * tied.parameters
    assert sum(apart.values()) - here == apart[1] == 2 * 128256 * 2048


@pytest.mark.parametrize(
    "device_map",
    [
        {"": 1},
        {"model": 1, "lm_head": 1},
        {"model": "cuda:1", "lm_head": "1"},
        {"": 0, "model": 1, "lm_head": 1},
    ],
)
def test_paths_cover_what_is_below_them(big: Architecture, device_map: dict[str, Any]) -> None:
    before = dict(device_map)
    assert set(from_device_map(big, device_map, visible=2).devices) == {1}
    assert device_map == before, "a map that somebody passes in stays as it is"


def test_devices_as_torch_and_accelerate_write_them() -> None:
    torch = pytest.importorskip("torch")
    assert [device_of(each) for each in (2, "cuda", "cuda:3", torch.device("cuda:1"), torch.device("cpu"), "disk")] == [
        2, 0, 3, 1, "cpu", "disk",
    ]  # fmt: skip
    for bad in ("meta", "mps", -1, True, None, "cuda:-1", "cuda:99999999", 1.5):
        with pytest.raises(UsageError, match="is no device"):
            device_of(bad)


@pytest.mark.parametrize(
    ("device_map", "word"),
    [
        ({"model": 0}, "says nothing of 'lm_head.weight'"),
        ({"": 0, "model.layer.3": 1}, "no part 'model.layer.3'; did you mean 'model.layers.3'"),
        ({"": 0, "model.layers.18.mlp": 1}, "'model.layers.18' is cut in two"),
        ({"": 0, "model.layers.18.self_attn.q_proj.weight": 1}, "cut in two"),
        ({"": 2}, "names GPU 2, and CUDA shows this process GPUs 0 to 1"),
        ({"": 0, "lm_head": "cpu"}, "1 of 84 blocks would lie on cpu .lm_head first.*--allow-offload cpu"),
        ({"": "cpu", "lm_head": "disk"}, "--allow-offload disk"),
        ({"": "disk"}, "84 of 84"),
        ({"": "meta"}, "is no device"),
        ({}, "says nothing of"),
    ],
)
def test_maps_that_would_go_wrong_are_refused(big: Architecture, device_map: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        from_device_map(big, device_map, visible=2)


def test_the_processor_alone_is_no_offloading(big: Architecture) -> None:
    assert not from_device_map(big, {"": "cpu"}, visible=0).offloads


def test_offloading_that_is_allowed(big: Architecture) -> None:
    assert from_device_map(big, {"": 0, "lm_head": "cpu"}, visible=1, allow_offload="cpu").offloads
    assert from_device_map(big, {"": 0, "lm_head": "cpu"}, visible=1, allow_offload="disk").offloads
    with pytest.raises(UsageError, match="disk"):
        from_device_map(big, {"": 0, "lm_head": "disk"}, visible=1, allow_offload="cpu")


@given(st.data())
def test_every_block_has_the_device_of_its_longest_path(data: st.DataObject) -> None:
    architecture = read_architecture("Llama-3.2-1B")
    paths = ["", "model", "model.layers", *(block.name for block in architecture.blocks)]
    device_map = {"": 0} | data.draw(st.dictionaries(st.sampled_from(paths), st.integers(0, 3)))
    placement = from_device_map(architecture, device_map, visible=4)
    for name, device in placement.by_block.items():
        above = [path for path in device_map if path in ("", name) or name.startswith(path + ".")]
        assert device == device_map[max(above, key=len)]


def test_runs_of_blocks_in_words() -> None:
    architecture = read_architecture("Llama-2-7B")
    devices = tuple(0 if block.kind == "embedding" else 1 for block in architecture.blocks)
    told = BlockPlacement(architecture, devices).format_blocks()
    assert [device for device, _ in told] == [0, 1]
    assert told[1][1] == "layers 0-31, norm, head"
    assert all_on(architecture, "cpu").format_blocks()[0][0] == "cpu"


def test_the_block_of_a_path() -> None:
    blocks = {"model.layers.1", "model.layers.11", "lm_head"}
    assert block_of("model.layers.11.mlp.weight", blocks) == "model.layers.11"
    assert block_of("model.layers.1.mlp.weight", blocks) == "model.layers.1"
    assert block_of("model.layers.12.mlp.weight", blocks) is None
    assert block_of("lm_head", blocks) == "lm_head"


def test_embeddings_that_are_added_lie_on_one_gpu() -> None:
    """gpt2's positions on another GPU than its tokens: not every family brings one to the other."""
    gpt2 = read_architecture("gpt2")
    with pytest.raises(UsageError, match=r"wte' and '.*wpe' make the first hidden states together, .* GPU 0 and GPU 1"):
        from_device_map(gpt2, {"": 0, "transformer.wpe": 1}, visible=2)
    assert from_device_map(gpt2, {"": 1, "transformer.wte": 0, "transformer.wpe": 0}, visible=2).gpus == (0, 1)


def test_an_embedding_that_is_shared_may_be_used_on_another_gpu() -> None:
    t5 = architecture_of({"model_type": "t5", "tie_word_embeddings": True}, "t5")
    assert from_device_map(t5, {"": 0, "encoder": 1}, visible=2).gpus == (0, 1)
