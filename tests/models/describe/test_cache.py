"""Descriptions as JSON, in the user's cache, and shipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.models.describe.formulas.from_config import architecture_of

from gpuherd.errors import BadModel, MissingExtra
from gpuherd.models.describe import cache, process
from gpuherd.models.describe.description import Architecture, Curve, Peaks, SharedInput, TrainingPeaks
from gpuherd.models.describe.known_models import SHIPPED, known_model, known_models
from gpuherd.models.describe.known_models import shipped as shipped_known
from gpuherd.models.describe.process import described
from gpuherd.models.describe.reading import read_architecture

CONFIG: Mapping[str, Any] = {
    "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 7, "vocab_size": 97,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "sliding_window": 8, "dtype": "bfloat16",
}  # fmt: skip


has_models = process._has_models


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(process, "_has_models", lambda: False)  # which other tests have loaded


def example() -> Architecture:
    """A description with everything that one may have."""
    found = architecture_of(CONFIG, "m")
    curves = (Curve((1, 0, 0.5), (7, 8, 9), 640), Curve((0, 0, 0), (0, 12, 0)))
    step = TrainingPeaks((0, 9, 0.5), (0, 2, 0), ((0, 3, 0), (0, 0, 1)))
    inputs = (SharedInput((".q_proj.weight", ".k_proj.weight")), SharedInput((".o_proj.weight",), kept=True))
    peaks = Peaks({"16": curves, "32": curves}, {"16": curves[:1]}, 64, {"whole-fp32": step}, inputs)
    blocks = tuple(replace(each, peaks="a" if each.kind == "layer" else None) for each in found.blocks)
    return replace(found, blocks=blocks, peaks={"a": peaks}, around={"whole-fp32": (1, 2, 0)}, source="model")


def test_a_description_survives_json() -> None:
    text = json.dumps(cache.to_dict(example()))
    assert cache.from_dict(json.loads(text), CONFIG, "m") == example()


def test_layers_of_a_kind_are_written_once() -> None:
    record = cache.to_dict(example())
    names = [name for name, *_ in record["blocks"]]
    assert len(record["templates"]) < 7
    assert names.count("model.layers") == 3  # six with windows, but for the full one between them: 0-4, 5, 6


def test_what_no_shape_depends_on_asks_for_the_same_description() -> None:
    same = {**CONFIG, "dtype": "float16", "transformers_version": "5.0", "rope_theta": 1e6, "architectures": ["X"]}
    assert cache.digest(same) == cache.digest(dict(reversed(same.items()))) == cache.digest(CONFIG)
    assert cache.digest({**CONFIG, "hidden_size": 65}) != cache.digest(CONFIG)


def test_the_checkpoints_own_fields_are_read_again() -> None:
    cache.write_cached(CONFIG, cache.to_dict(example()))
    found = cache.read_cached({**CONFIG, "dtype": "float16", "quantization_config": {"quant_method": "x"}}, "other")
    assert found is not None
    assert (found.model, found.stored) == ("other", "fp16")
    assert any("stored quantised" in sentence for sentence in found.assumptions)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 0}', '{"version": 1, "templates": 3}', "[" * 10**6])
def test_a_damaged_file_is_as_none(text: str) -> None:
    cache.write_cached(CONFIG, cache.to_dict(example()))
    (path,) = cache._folder().glob("*.json")
    path.write_text(text)
    assert cache.read_cached(CONFIG, "m") is None


def test_the_oldest_of_too_many_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST_FILES", 3)
    record = cache.to_dict(example())
    for number in range(5):
        cache.write_cached({**CONFIG, "vocab_size": number}, record)
        newest = cache._folder() / f"{cache.digest({**CONFIG, 'vocab_size': number})}.json"
        os.utime(newest, (number, number))
    left = {cache.read_cached({**CONFIG, "vocab_size": number}, "m") is not None for number in (2, 3, 4)}
    assert left == {True}
    assert len(list(cache._folder().glob("*.json"))) == 3


def test_a_cache_that_can_not_be_written_costs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache.write_cached(CONFIG, cache.to_dict(example()))
    assert cache.read_cached(CONFIG, "m") is None


# --- asking --------------------------------------------------------------------------------------------------------


def test_a_configuration_is_described_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def answer(config: Mapping[str, Any], model: str, training: bool) -> dict[str, Any]:
        asked.append(model)
        return cache.to_dict(example())

    monkeypatch.setattr(process, "_ask", answer)
    assert described(CONFIG, "m") == described(CONFIG, "m") == example()
    assert asked == ["m"]
    assert capsys.readouterr().err.count("described for the first time") == 1


def test_trainings_are_measured_when_one_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(config: Mapping[str, Any], model: str, training: bool) -> dict[str, Any]:
        asked.append(training)
        return cache.to_dict(example() if training else replace(example(), around={}))

    monkeypatch.setattr(process, "_ask", answer)
    for training in (False, False, True, True, False):
        assert described(CONFIG, "m", training=training).trainings_measured == (True in asked)
    assert asked == [False, True]


def test_without_the_libraries_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"gpuherd\[load\]"):
        described(CONFIG, "m")


def test_a_type_that_transformers_does_not_name_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(process, "_ask", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(BadModel, match="somebodys_own"):
        described({"model_type": "somebodys_own"}, "m")


@pytest.mark.parametrize(
    ("says", "what"),
    [
        ("print('no JSON')", "failed"),
        ("import sys; sys.exit('out of memory')", "out of memory"),
        ('print(\'{"problem": "no heads"}\')', "no heads"),
    ],
)
def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, says: str, what: str) -> None:
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **options: run([sys.executable, "-c", says], **options))
    with pytest.raises(BadModel, match=what):
        process._ask(CONFIG, "m", False)


def test_a_process_that_has_transformers_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers.modeling_utils")
    assert has_models()
    monkeypatch.setattr(process, "_ask", lambda *_: pytest.fail("a process was started"))
    small = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 32,
        "num_hidden_layers": 2,
    }  # fmt: skip
    assert process._describe_here(small, "m", True).keys() == cache.to_dict(example()).keys()
    with pytest.raises(BadModel, match="can't build"):
        process._describe_here({**small, "num_attention_heads": 0}, "m", False)


@pytest.mark.slow
def test_the_process_itself() -> None:
    pytest.importorskip("transformers")
    found = described({**CONFIG, "model_type": "exaone4"}, "m")
    assert (found.source, found.layers, found.class_name) == ("model", 7, "Exaone4ForCausalLM")
    assert all(block.peaks in found.peaks for block in found.blocks if block.kind == "layer")


def test_a_folder_of_a_family_that_no_formula_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(process, "_ask", lambda *_: cache.to_dict(example()))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "exaone4"}))
    found = read_architecture(str(tmp_path))
    assert (found.source, found.layers) == ("model", 7)


# --- shipped -------------------------------------------------------------------------------------------------------


def test_at_least_sixty_models_are_shipped_as_they_were_published() -> None:
    shipped = [(known, shipped_known(known.model_id, known.config, known.model_id)) for known in known_models()]
    there = [(known, found) for known, found in shipped if found is not None]
    assert len(there) >= 60
    for known, found in there:
        assert found.parameters == known.parameters, known.model_id
        formula = architecture_of(known.config, known.model_id)
        assert [(block.name, block.kind, block.cache) for block in found.blocks] == [
            (block.name, block.kind, block.cache) for block in formula.blocks
        ]
        assert {tensor.name: tensor for tensor in found.tensors()} == {each.name: each for each in formula.tensors()}
        assert all(block.peaks in found.peaks for block in found.blocks if block.kind == "layer"), known.model_id


def test_a_known_name_is_answered_by_its_shipped_description() -> None:
    known = known_model("llama-3.1-70b")
    assert known is not None
    found = read_architecture("llama-3.1-70b")
    assert found.source == "known"
    assert found.peaks


def test_without_torch_a_fine_tuned_model_is_described_as_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = known_model("llama-2-7b-hf")
    assert known is not None
    changes = {"vocab_size": 32016, "max_position_embeddings": 16384, "rope_theta": 1e6}
    monkeypatch.setattr(process, "find_spec", lambda _: None)  # neither torch nor transformers
    (tmp_path / "config.json").write_text(json.dumps({**known.config, **changes}))
    found, base = read_architecture(str(tmp_path)), read_architecture("llama-2-7b-hf")
    assert found.peaks == base.peaks
    assert found.parameters == base.parameters + 2 * 16 * 4096
    assert "not installed" in found.assumptions[-1]
    (tmp_path / "config.json").write_text(json.dumps({**known.config, "intermediate_size": 11264}))
    with pytest.raises(MissingExtra):
        read_architecture(str(tmp_path))


def test_a_damaged_shipped_line_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / SHIPPED).write_text("a/b\t{}\n")
    monkeypatch.setattr("gpuherd.models.describe.known_models.resources.files", lambda _: tmp_path)
    with pytest.raises(BadModel, match="install gpuherd again"):
        shipped_known("a/b", CONFIG, "m")
    assert shipped_known("a", CONFIG, "m") is None
