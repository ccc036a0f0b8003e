"""Where a name is looked up: this machine, known names, the cache of the Hub; GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from tests.models.describe.test_families import CASES
from tests.models.describe.test_headers import save

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.describe.reading import read_architecture


def test_a_known_name_is_taken_from_shipped_data() -> None:
    found = read_architecture("llama-3.1-70b-instruct")
    assert found.source == "known"
    assert found.model == "llama-3.1-70b-instruct"
    assert found.parameters == 70_553_706_496
    assert (found.layers, found.tensor_parallel_limit, found.stored) == (80, 8, "bf16")


def test_a_model_in_the_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "models--somebody--small"
    save(repo / "snapshots" / ("a" * 40), "llama", CASES["llama"][0])
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = read_architecture("somebody/small")
    assert (found.model, found.source, found.layers) == ("somebody/small", "weights", 3)


def test_a_typo_gets_the_nearest_known_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MissingModel, match=r"near known names: meta-llama/Llama-3\.1-8B"):
        read_architecture("lama-3.1-8B")


@pytest.mark.parametrize("text", ["../nothing", "/nothing/at/all", "a/b/c", "", "..", "x" * 300])
def test_what_is_no_model_is_refused(text: str) -> None:
    with pytest.raises(BadModel):
        read_architecture(text)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingModel, match="neither"):
        read_architecture(str(tmp_path))


def gguf(path: Path, architecture: str, layers: int, **left_out: Any) -> Path:
    """A GGUF file of a tiny Llama: 4 heads of 8, 2 of them for keys, width 32, 48 wide inside, 64 words."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_block_count(layers)
    shapes = {"token_embd.weight": (64, 32), "output_norm.weight": (32,), "output.weight": (64, 32)}
    for number in range(layers):
        for name, shape in {
            "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32), "ffn_gate": (48, 32),
            "ffn_up": (48, 32), "ffn_down": (32, 48), "attn_norm": (32,), "ffn_norm": (32,),
        }.items():  # fmt: skip
            shapes[f"blk.{number}.{name}.weight"] = shape
    for name, shape in shapes.items():
        if name not in left_out.get("without", ()):
            writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_planned_as_its_weights(tmp_path: Path) -> None:
    found = read_architecture(str(gguf(tmp_path / "m.gguf", "llama", 2)))
    assert found.parameters == 2 * 64 * 32 + 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32)
    assert found.blocks[-1].name == "lm_head"
    assert {block.cache.per_token for block in found.blocks if block.cache is not None} == {2 * 2 * 8}
    assert "turned back into weights" in found.assumptions[-1]


def test_a_gguf_file_without_a_head_is_tied(tmp_path: Path) -> None:
    found = read_architecture(str(gguf(tmp_path / "m.gguf", "llama", 2, without=("output.weight",))))
    assert next(tensor for tensor in found.tensors() if tensor.name == "lm_head.weight").tied_to


def test_a_gguf_file_that_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", "llama", 2, without=("blk.1.ffn_up.weight",))
    with pytest.raises(BadModel, match="metadata and its weights disagree"):
        read_architecture(str(path))


def test_a_gguf_file_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="'newest'"):
        read_architecture(str(gguf(tmp_path / "m.gguf", "newest", 1)))


def test_remote_code_is_said(tmp_path: Path) -> None:
    config = {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "modeling.Other"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert any("code of its own" in sentence for sentence in read_architecture(str(tmp_path)).assumptions)
