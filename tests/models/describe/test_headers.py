"""Checkpoints as transformers saves them give the very architecture that the formulas give; what disagrees is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.describe.formulas import from_config
from tests.models.describe.formulas.fields import family_defaults
from tests.models.describe.test_families import ALIKE, CASES
from tests.models.describe.test_meta import same

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.describe import reading
from gpuherd.models.describe.config import images_of
from gpuherd.models.describe.description import Architecture, Role
from gpuherd.models.describe.meta import describe_config
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.memory.weights import Precision


def save(folder: Path, model_type: str, fields: Mapping[str, Any]) -> Path:
    """A small model with random weights, as save_pretrained writes it."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = getattr(transformers, family_defaults()[model_type]["class_name"])
    torch.manual_seed(0)
    kind._from_config(CONFIG_MAPPING[model_type](**fields), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


# transformers computes their states token by token.
RECURRENT = frozenset(
    {
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "mamba",
        "mamba2",
        "qwen3_next",
        "recurrent_gemma",
    }
)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE | RECURRENT else []) for name in CASES]
)
def test_saved_models_are_read_as_the_formulas_have_them(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(config: Mapping[str, Any], model: str, *, training: bool) -> Architecture:
        assert not training
        return describe_config(config, model, peaks=False)

    monkeypatch.setattr(reading, "described", described)  # peaks are measured elsewhere, and take seconds
    folder = save(tmp_path / "m", model_type, CASES[model_type][0])
    found = read_architecture(str(folder))
    formula = from_config.architecture_of(json.loads((folder / "config.json").read_text()), str(folder))
    same(found, formula)
    assert (found.source, found.stored) == ("weights", "bf16")
    assert found.assumptions == images_of(found.blocks)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "llama", "llama", CASES["llama"][0])


def copied(source: Path, target: Path, change: Any) -> Path:
    """The model with its tensors changed by a function."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


def test_a_tensor_of_another_shape_is_named(llama: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(100, 64)

    with pytest.raises(BadModel, match=r"disagree.*'model.layers.1.mlp.up_proj.weight' has the shape \(100, 64\).*112"):
        read_architecture(str(copied(llama, tmp_path / "m", change)))


def test_a_missing_tensor_is_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"asks for 'model.layers.2.self_attn.k_proj.weight'.*don't have"):
        read_architecture(str(copied(llama, tmp_path / "m", lambda t: t.pop("model.layers.2.self_attn.k_proj.weight"))))


def test_a_missing_shard_is_named(llama: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(MissingModel, match="model-00001-of-00002"):
        read_architecture(str(tmp_path))


def test_without_a_head_there_is_none(llama: Path, tmp_path: Path) -> None:
    found = read_architecture(str(copied(llama, tmp_path / "m", lambda t: t.pop("lm_head.weight"))))
    assert [block.kind for block in found.blocks].count("head") == 0
    assert any("no output head" in sentence for sentence in found.assumptions)


def test_what_the_loaded_model_has_no_place_for_is_said(llama: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.layers.3.extra.weight"] = torch.zeros(400, 64)

    found = read_architecture(str(copied(llama, tmp_path / "m", change)))
    assert any("'model.layers.3.extra.weight'" in sentence for sentence in found.assumptions)
    assert found.layers == 3


def test_an_unknown_family_is_read_from_its_names(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path / "m", lambda t: None)
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "other", "auto_map": code}))
    found, known = read_architecture(str(folder)), read_architecture(str(llama))
    assert found.parameters == known.parameters
    assert found.layers == known.layers
    assert [b.name for b in found.blocks] == [b.name for b in known.blocks if b.tensors]
    assert {t.name: (t.shape, t.role) for t in found.tensors()} == {t.name: (t.shape, t.role) for t in known.tensors()}
    assert [b.cache for b in found.blocks if b.kind == "layer"] == [b.cache for b in known.blocks if b.kind == "layer"]
    assert "'other' is not known" in found.assumptions[0]
    assert "code of its own" in found.assumptions[1]


def test_a_single_file_without_a_config_tells_its_cache_by_its_shapes(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path / "m", lambda t: None)
    (folder / "config.json").unlink()
    found = read_architecture(str(folder / "model.safetensors"))
    caches = {block.cache.per_token for block in found.blocks if block.cache is not None}
    assert caches == {2 * 2 * 16}
    assert any("no config" in sentence for sentence in found.assumptions)


def test_a_cache_that_nothing_tells_is_refused(tmp_path: Path) -> None:
    save_file({f"blocks.{n}.qkv.weight": torch.zeros(12, 4) for n in range(2)}, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match="config has no num_attention_heads"):
        read_architecture(str(tmp_path))


def test_an_unknown_config_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama"}))
    with pytest.raises(BadModel, match=r"'lama'.*nearest known: llama"):
        read_architecture(str(tmp_path))


def test_a_folder_with_a_config_alone_is_planned_by_what_transformers_builds(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    found = read_architecture(str(tmp_path))
    assert found.source == "model"
    same(found, read_architecture(str(llama)))


def test_an_existing_folder_wins_over_a_known_name(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(llama, tmp_path / "llama-3.1-70b", lambda t: None)
    monkeypatch.chdir(tmp_path)
    assert read_architecture("llama-3.1-70b").parameters == read_architecture(str(llama)).parameters


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("value", [0, -1, "8", 1.5, True, 1 << 60])
def test_fields_that_cannot_be_are_named(field: str, value: Any) -> None:
    config = {"model_type": "llama", field: value}
    with pytest.raises(BadModel, match=field):
        from_config.architecture_of(config, "m")


def test_quantised_checkpoints_keep_the_bytes_that_they_are_stored_in(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"

    def change(tensors: dict[str, Any]) -> None:
        del tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = torch.zeros(64, 64, dtype=torch.int8)
        tensors[f"{name}.SCB"] = torch.ones(64, dtype=torch.float32)

    found = read_architecture(str(copied(llama, tmp_path / "m", change)))
    tensor = next(tensor for tensor in found.tensors() if tensor.name == f"{name}.weight")
    assert tensor.stored_bytes == 64 * 64 + 64 * 4
    assert tensor.role is Role.LINEAR
    assert found.stored == "as-stored"
    assert any("INT8" in sentence for sentence in found.assumptions)


def test_bitsandbytes_checkpoints_take_what_their_codes_take(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from gpuherd.models.memory.weights import weight_bytes

    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(llama, quantization_config=settings).save_pretrained(tmp_path / "m")
    found = read_architecture(str(tmp_path / "m"))
    linear = [tensor for tensor in found.tensors() if tensor.role is Role.LINEAR]
    assert len(linear) == 3 * 7
    for tensor in linear:
        assert tensor.stored_bytes == sum(weight_bytes(replace(tensor, stored_bytes=None), Precision.NF4))
    assert found.stored == "as-stored"


def test_a_config_that_says_quantised_is_told(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert any("'gptq'" in sentence for sentence in read_architecture(str(tmp_path)).assumptions)


def test_what_is_said_to_be_tied_but_is_not_counts_twice(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path / "m", lambda t: None)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    found = read_architecture(str(folder))
    assert found.parameters == read_architecture(str(llama)).parameters
    assert any("not tied" in sentence for sentence in found.assumptions)


def test_what_is_tied_and_stored_twice_counts_once(llama: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = copied(llama, tmp_path / "m", change)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    found = read_architecture(str(folder))
    assert found.parameters == read_architecture(str(llama)).parameters - 97 * 64
    assert found.assumptions == ()
