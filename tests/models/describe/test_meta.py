"""Descriptions read off transformers' own models beside the formulas of the families, which know them by heart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tests.models.describe.test_families import CASES

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.models.describe.formulas.from_config import architecture_of

from gpuherd.errors import BadModel
from gpuherd.models.describe.cache import from_dict, to_dict
from gpuherd.models.describe.description import Architecture
from gpuherd.models.describe.meta import describe_config

# One of each kind: grouped heads, windows, old names, an encoder with a decoder, an encoder, latent caches, experts,
# images. Code for states runs token by token and is slow.
OFTEN = frozenset({"llama", "gemma3_text", "gpt2", "t5", "bert", "deepseek_v3", "gpt_oss", "mistral3"})
CASES_OF = [(name, number) for name, cases in CASES.items() for number in range(len(cases))]


def same(ours: Architecture, formula: Architecture) -> None:
    """Asserts that the two agree in all that plans depend on."""
    assert [(block.name, block.kind) for block in ours.blocks] == [(block.name, block.kind) for block in formula.blocks]
    for mine, theirs in zip(ours.blocks, formula.blocks, strict=True):
        assert mine.cache == theirs.cache, mine.name
        assert {tensor.name: tensor for tensor in mine.tensors} == {tensor.name: tensor for tensor in theirs.tensors}
    for name in ("class_name", "hidden_size", "vocab_size", "is_encoder_decoder", "max_tokens", "assumptions"):
        assert getattr(ours, name) == getattr(formula, name), name
    assert (ours.tensor_parallel, ours.tensor_parallel_limit) == (
        formula.tensor_parallel,
        formula.tensor_parallel_limit,
    )


@pytest.mark.parametrize(
    ("model_type", "number"),
    [
        pytest.param(name, number, marks=[] if name in OFTEN and number == 0 else pytest.mark.slow)
        for name, number in CASES_OF
    ],
)
def test_as_the_formulas_have_it(model_type: str, number: int) -> None:
    config = {"model_type": model_type, **CASES[model_type][number]}
    ours = describe_config(config, "m", peaks=False)
    same(ours, architecture_of(config, "m"))
    assert from_dict(json.loads(json.dumps(to_dict(ours))), config, "m") == ours


# A family that no formula knows.
UNKNOWN: Mapping[str, Any] = {
    "model_type": "exaone4", "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4, "vocab_size": 97,
    "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 100, "sliding_window_pattern": 4,
}  # fmt: skip


def test_a_family_that_no_formula_knows_costs_no_edit() -> None:
    found = describe_config(UNKNOWN, "m", peaks=False)
    layers = [block for block in found.blocks if block.kind == "layer"]
    assert len(layers) == 4
    assert {block.cache.window for block in layers if block.cache} == {None, 100}
    assert {block.cache.per_token for block in layers if block.cache} == {2 * 2 * 16}
    assert found.blocks[-1].kind == "head"


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({}, "has no model of the type"),
        ({"model_type": "somebodys_own"}, "has no model of the type"),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "at most"),
        ({"model_type": "llama", "hidden_size": "wide"}, "can't build"),
        ({"model_type": "exaone4", "num_attention_heads": 0}, "can't"),
    ],
)
def test_what_can_not_be_built_is_said(config: Mapping[str, Any], what: str) -> None:
    with pytest.raises(BadModel, match=what):
        describe_config(config, "m", peaks=False)
