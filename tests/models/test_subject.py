"""Preflight: the facts of good models, and one line for each kind of bad one, before any GPU is taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.subject import Preflight, examine

Tiny = Callable[..., tuple[Any, Path]]


@pytest.fixture
def pair(tiny: Tiny, tmp_path: Path) -> tuple[Path, Path]:
    """A base model and an adapter of it."""
    import warnings

    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    _, base = tiny("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"]))
        adapted.save_pretrained(tmp_path / "adapter")
    return base, tmp_path / "adapter"


def rename_base(adapter: Path, name: str | None) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": name}))


def test_a_model(tiny: Tiny) -> None:
    _, folder = tiny("llama")
    facts = examine(str(folder))
    assert (facts.kind, facts.where, facts.base) == ("model", "local", None)
    assert facts.num_matrices == 2 * 7 + 1
    assert facts.total_bytes == sum(t.numel() * 4 for t in tiny("llama")[0].state_dict().values())


def test_an_adapter_with_the_base_of_its_config(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    for relation in (None, "adapter", "lora", "PEFT", "qlora"):
        facts = examine(str(adapter), relation=relation)
        assert (facts.kind, facts.base, facts.num_matrices) == ("adapter", str(base), 15)


def test_the_list_names_the_base_before_the_config(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    rename_base(adapter, "/home/someone-else/model")
    assert examine(str(adapter), base=str(base)).num_matrices == 15
    with pytest.raises(MissingModel, match=r"base '/home/someone-else/model': .* no such folder"):
        examine(str(adapter))
    rename_base(adapter, None)
    with pytest.raises(BadModel, match="has no base model"):
        examine(str(adapter))
    rename_base(adapter, "org/base")
    assert examine(str(adapter)) == Preflight("adapter", "local", base="org/base")


def test_bad_bases(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, adapter = pair
    (tmp_path / "empty").mkdir()
    for base, error, reason in (
        (str(tmp_path / "empty"), BadModel, "is an empty folder"),
        (str(tmp_path / "absent"), MissingModel, "no such folder"),
        ("a;b", BadModel, "neither a local path nor"),
        (str(adapter), BadModel, "itself an adapter"),
    ):
        with pytest.raises(error, match=reason) as caught:
            examine(str(adapter), base=base)
        assert str(adapter)[:60] in str(caught.value)


def test_a_model_that_the_list_calls_an_adapter(tiny: Tiny) -> None:
    _, folder = tiny("llama")
    with pytest.raises(BadModel, match=r"listed as lora, but has no adapter_config\.json"):
        examine(str(folder), relation="lora")


def test_hub_ids_are_checked_for_form_only() -> None:
    assert examine("org/name") == Preflight("model", "hub")
    assert examine("org/name", relation="lora", base="org/base") == Preflight("adapter", "hub", base="org/base")
    for bad in ("a;b", "$(x)", "a/../b", "a\nb", "x" * 300):
        with pytest.raises(BadModel):
            examine(bad)
        with pytest.raises(BadModel):
            examine("org/name", relation="lora", base=bad)


def test_damage_is_found_without_reading_weights(tiny: Tiny, tmp_path: Path) -> None:
    _, folder = tiny("llama")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(BadModel, match="truncated"):
        examine(str(copy))
    (copy / "model.safetensors").unlink()
    with pytest.raises(BadModel, match="no weights"):
        examine(str(copy))


def test_nothing_to_analyse(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match="no weight matrix"):
        examine(str(tmp_path))


def test_a_model_of_embeddings_alone(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": np.ones((6, 4), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match=r"no weight matrix to analyse; model.embed_tokens .*use --embeddings"):
        examine(str(tmp_path))
    assert examine(str(tmp_path), embeddings=True).num_matrices == 1


@pytest.mark.parametrize("shape", [(2_000_000, 1, 1), (1, 1, 2_000_000)])
def test_a_small_file_of_millions_of_matrices(tmp_path: Path, shape: tuple[int, ...]) -> None:
    weights = {"mlp.experts.up_proj" if shape[2] == 1 else "conv.weight": np.ones(shape, np.float16)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match=r"2000000 .*, too many"):
        examine(str(tmp_path))


def test_a_config_that_would_fill_memory(tmp_path: Path) -> None:
    save_file({"a.weight": np.ones((6, 4), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"a": [' + "[]," * 2_000_000 + "[]]}")
    with pytest.raises(BadModel, match="too many for such a file"):
        examine(str(tmp_path))
