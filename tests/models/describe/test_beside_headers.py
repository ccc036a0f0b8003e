"""A description beside the headers of a checkpoint: what is stored counts, and what disagrees is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.models.describe.formulas.from_config import architecture_of

from gpuherd.errors import BadModel, MissingExtra
from gpuherd.models.describe import gguf, reading
from gpuherd.models.describe import headers as from_weights
from gpuherd.models.describe.description import Architecture
from gpuherd.models.tensors.source import TensorInfo

LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "vocab_size": 97,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
NEW = {**LLAMA, "model_type": "novel"}


def description() -> Architecture:
    """Of a family that no formula knows, whose modules are those of Llama."""
    return replace(architecture_of(LLAMA, "m"), model_type="novel", source="model")


def headers(rename: str = "model.") -> dict[str, TensorInfo]:
    tensors = [each for each in description().tensors() if each.tied_to is None]
    named = [(each.name.replace("model.", rename, 1), each) for each in tensors]
    return {name: TensorInfo(name, each.shape, "F16", 2 * each.numel) for name, each in named}


def test_headers_that_agree_say_what_is_stored() -> None:
    found = from_weights.of_weights(NEW, headers(), "m", description())
    assert (found.source, found.stored, found.assumptions) == ("weights", "fp16", ())
    assert found.blocks == description().blocks


def test_other_names_for_as_many_numbers_are_the_same_model() -> None:
    found = from_weights.of_weights(NEW, headers("decoder.stack."), "m", description())
    assert (found.source, found.stored) == ("model", "fp16")
    assert "other names" in found.assumptions[-1]
    assert found.blocks == description().blocks


def test_other_numbers_are_planned_by_the_headers_alone() -> None:
    tensors = headers("decoder.stack.")
    table = "decoder.stack.embed_tokens.weight"
    tensors[table] = TensorInfo(table, (9700, 64), "F16", 2 * 9700 * 64)
    found = from_weights.of_weights(NEW, tensors, "m", description())
    assert found.source == "weights"
    assert "is not known here" in found.assumptions[0]


@pytest.mark.parametrize("problem", [BadModel("transformers can't build it"), MissingExtra("torch is not installed")])
def test_where_there_is_no_description_the_headers_answer_and_say_so(
    problem: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> Architecture:
        raise problem

    monkeypatch.setattr(reading, "described", refuse)
    found = reading._of_headers(NEW, headers(), str(tmp_path), training=False)
    assert found.source == "weights"
    assert found.assumptions[-1].startswith(str(problem))
    with pytest.raises(type(problem), match=str(problem)):
        reading._of_fields(NEW, "m", training=False)


@pytest.mark.parametrize(
    ("dtype", "said", "stored"), [("F32", "bfloat16", "fp32"), ("F32", None, "fp32"), ("I64", "float16", "fp16")]
)
def test_headers_alone_say_what_is_stored(dtype: str, said: str | None, stored: str) -> None:
    tensors = {name: replace(info, dtype=dtype) for name, info in headers().items()}
    assert from_weights.of_headers({**NEW, "dtype": said}, tensors, "m").stored == stored


def test_codes_are_counted_with_their_scales_where_headers_alone_answer() -> None:
    tensors = headers()
    name = next(each for each in tensors if each.endswith("q_proj.weight"))
    tensors[name] = replace(tensors[name], dtype="INT8", nbytes=4096, dequantized=True)
    tensors["scales"] = TensorInfo("scales", (64,), "F32", 256, scales_of=name)
    found = from_weights.of_headers(NEW, tensors, "m")
    assert found.stored == "as-stored"
    assert next(each for each in found.tensors() if each.name == name).stored_bytes == 4096 + 256
    assert any("INT8" in sentence for sentence in found.assumptions)


def test_a_name_with_a_number_of_thousands_of_digits_is_no_layer() -> None:
    long = f"model.layers.{'9' * 5000}.self_attn.q_proj.weight"
    found = from_weights.of_headers(NEW, {**headers(), long: TensorInfo(long, (64, 64), "F16", 8192)}, "m")
    assert found.layers == 3


def test_heads_that_are_more_than_the_width_are_not_believed() -> None:
    found = from_weights.of_headers({**NEW, "num_attention_heads": 1000}, headers(), "m")
    assert {block.cache.per_token for block in found.blocks if block.cache is not None} == {2 * 2 * 16}


@pytest.mark.parametrize("shape", [(), (64,), (2, 3, 4)])
def test_a_gguf_file_whose_embedding_is_no_table_is_no_model(shape: tuple[int, ...]) -> None:
    tensors = {name: TensorInfo(name, (64, 64), "F16", 8192) for name in ("blk.0.attn_q.weight", "token_embd.weight")}
    tensors["token_embd.weight"] = replace(tensors["token_embd.weight"], shape=shape)
    with pytest.raises(BadModel, match="no whole model"):
        gguf.architecture_of({"architecture": "llama"}, tensors, "m", training=False)


def test_a_gguf_file_is_turned_back_into_weights_where_headers_alone_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Architecture:
        raise MissingExtra("torch is not installed")

    monkeypatch.setattr(gguf, "described", refuse)
    names = ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight", "token_embd.weight")
    tensors = {name: TensorInfo(name, (64, 64), "Q8_0", 4352, dequantized=True) for name in names}
    found = gguf.architecture_of({"architecture": "llama", "model_type": "gguf"}, tensors, "m", training=False)
    assert (found.stored, found.stored_method) == (None, None)
