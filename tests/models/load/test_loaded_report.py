"""What is wrong with a loaded model is found: in models that transformers and accelerate really loaded wrongly, and
sentence by sentence.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.models.load.conftest import Small

from gpuherd.models.describe.description import Architecture
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.load.loading import (
    LoadedTensor,
    base_name,
    bytes_by_device,
    bytes_by_dtype,
    in_short,
    misplaced,
    of_other_dtypes,
    tensors_of,
    untied,
)
from gpuherd.models.load.placement import BlockPlacement, all_on, from_device_map

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def pretended(architecture: Architecture, device_map: dict[str, Any]) -> BlockPlacement:
    return from_device_map(architecture, device_map, visible=0, simulated=True, allow_offload="disk")


def test_a_silent_offload_is_found(small: Small, tmp_path: Path) -> None:
    """max_memory of a dict makes transformers put modules on the disk, and only a log line tells."""
    architecture = read_architecture(str(small("llama")))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        small("llama"), device_map="auto", max_memory={"cpu": "150KB"}, offload_folder=str(tmp_path), dtype="auto"
    )
    assert "disk" in model.hf_device_map.values()
    found = misplaced(all_on(architecture, "cpu"), tensors_of(model))
    assert found and all("is on meta, planned on cpu" in each for each in found)
    assert "layers" in in_short(found) and "more" in in_short(found)


def test_what_is_meant_to_be_on_disk_is_no_problem(small: Small, tmp_path: Path) -> None:
    architecture = read_architecture(str(small("llama")))
    device_map = {block.name: "disk" if ".layers." in block.name else "cpu" for block in architecture.blocks}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        small("llama"), device_map=device_map, offload_folder=str(tmp_path), dtype="auto"
    )
    placement = from_device_map(architecture, device_map, visible=0, allow_offload="disk")
    assert misplaced(placement, tensors_of(model)) == []
    assert misplaced(all_on(architecture, "cpu"), tensors_of(model))


def test_a_model_left_on_meta_is_found(small: Small) -> None:
    architecture = read_architecture(str(small("tied")))
    config = transformers.AutoConfig.from_pretrained(small("tied"))
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    found = misplaced(pretended(architecture, {"": 0}), tensors_of(empty))
    assert len([each for each in found if "GPU 0" in each]) >= len(list(architecture.tensors()))


def test_a_copy_in_place_of_a_tie_is_found(small: Small) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(small("tied"), dtype="auto")
    ties = {"lm_head.weight": "model.embed_tokens.weight"}
    assert untied(tensors_of(model), ties) == []
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    assert untied(tensors_of(model), ties) == [
        "lm_head.weight is a copy of model.embed_tokens.weight, to which it is tied"
    ]


def test_another_dtype_is_found(small: Small) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(small("llama"), dtype="auto")
    assert of_other_dtypes(tensors_of(model), frozenset({"bfloat16"}), frozenset()) == []
    model.lm_head.float()
    assert of_other_dtypes(tensors_of(model), frozenset({"bfloat16"}), frozenset()) == [
        "lm_head.weight is in float32, not in bfloat16"
    ]
    assert of_other_dtypes(tensors_of(model), frozenset({"bfloat16"}), frozenset({"lm_head.weight"})) == []


def test_bitsandbytes_state_is_counted_where_transformers_forgets_it(small: Small) -> None:
    pytest.importorskip("bitsandbytes")
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        small("llama"), quantization_config=settings, dtype=torch.bfloat16
    )
    architecture = read_architecture(str(small("llama")))
    ours = sum(bytes_by_device(all_on(architecture, "cpu"), tensors_of(model)).values())
    buffers = sum(each.untyped_storage().nbytes() for each in model.buffers())
    assert ours > 1.03 * (model.get_memory_footprint() - buffers)


def seen(name: str, device: str = "cuda:0", **more: Any) -> LoadedTensor:
    return replace(LoadedTensor(name, device, "bfloat16", storage=hash(name), nbytes=100), **more)


@pytest.fixture(scope="module")
def llama() -> Architecture:
    return read_architecture("Llama-3.2-1B")


def test_a_tensor_on_the_wrong_gpu_is_found(llama: Architecture) -> None:
    placement = from_device_map(llama, {"": 0, "model.layers.3": 1}, visible=2)
    right = [seen("model.norm.weight"), seen("model.layers.3.mlp.up_proj.weight", "cuda:1")]
    assert misplaced(placement, right) == []
    assert misplaced(placement, [seen("model.layers.3.mlp.up_proj.weight")]) == [
        "model.layers.3.mlp.up_proj.weight is on cuda:0, planned on GPU 1"
    ]
    assert misplaced(placement, [seen("model.norm.weight", "cpu")])
    assert misplaced(placement, [seen("visual.patch.weight")]) == [
        "visual.patch.weight is part of no block that was planned"
    ]


def test_what_is_offloaded_beside_gpus_is_on_meta_until_it_is_computed(llama: Architecture) -> None:
    placement = from_device_map(llama, {"": 0, "model.layers.3": "cpu"}, visible=1, allow_offload="cpu")
    assert misplaced(placement, [seen("model.layers.3.mlp.up_proj.weight", "meta")]) == []
    assert misplaced(placement, [seen("model.layers.2.mlp.up_proj.weight", "meta")])
    assert misplaced(all_on(llama, "cpu"), [seen("model.norm.weight", "meta")])


def test_a_storage_counts_once_on_each_device(llama: Architecture) -> None:
    placement = from_device_map(llama, {"": 0, "lm_head": 1}, visible=2)
    tensors = [
        seen("model.embed_tokens.weight", storage=7),
        seen("model.norm.weight", storage=7),
        seen("lm_head.weight", "cuda:1", storage=7, state=5),
        seen("model.rotary_emb.inv_freq", buffer=True),
        seen("model.layers.0.mlp.up_proj.weight", "meta"),
    ]
    assert bytes_by_device(placement, tensors) == {0: 100, 1: 105}
    assert bytes_by_dtype(tensors) == {"bfloat16": 200}


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("base_model.model.lm_head.weight", "lm_head.weight"),
        ("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight", "model.layers.0.mlp.up_proj.weight"),
        ("base_model.model.x.q.lora_A.default.weight", "x.q.lora_A.weight"),
        ("base_model.model.x.q.lora_magnitude_vector.default.weight", "x.q.lora_magnitude_vector.weight"),
        ("base_model.model.head.modules_to_save.default.weight", "head.modules_to_save.weight"),
        ("base_model.model.head.original_module.weight", "head.weight"),
        ("model.default.weight", "model.default.weight"),
    ],
)
def test_names_without_pefts_wrapping(name: str, plain: str) -> None:
    assert base_name(name) == plain
