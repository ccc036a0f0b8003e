"""Merging adapters: every tensor equal to that of PEFT's own merge_and_unload, for every variant that is merged."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.blocks import assert_blocks
from tests.models.peft_adapters import save_adapter

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.checkpoints.open import open_checkpoint
from gpuherd.models.lora.adapter import adapter_base, check_adapter, is_adapter, merge

Tiny = Callable[..., tuple[Any, Path]]

ALL_LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def train(base_folder: Path, folder: Path, *, auto_class: str = "AutoModelForCausalLM", **settings: Any) -> Any:
    """A PEFT adapter of the model in ``base_folder`` with random trained weights, saved into ``folder``.

    Returns the merged model, in float32.
    """
    import transformers
    from peft import PeftModel

    load = getattr(transformers, auto_class).from_pretrained
    torch.manual_seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_adapter(load(base_folder), folder, **settings)
        return PeftModel.from_pretrained(load(base_folder), folder).merge_and_unload()


def assert_equal(base_folder: Path, folder: Path, merged: Any, *, changed: int, file_names: Any = None) -> None:
    """Each tensor of the merged source against the merged model's state; ``changed`` tensors differ from the base."""
    base = open_checkpoint(base_folder)
    source = merge(base, folder)
    state = {name: tensor.detach().double().numpy() for name, tensor in merged.state_dict().items()}
    state = {file_names(name) if file_names else name: tensor for name, tensor in state.items()}
    different = 0
    for name, info in source.tensors.items():
        got, wanted = source.read(name), state[name]
        assert got.shape == wanted.shape == info.shape
        scale = np.abs(wanted).max()
        assert np.abs(got - wanted).max() <= 1e-6 * scale + 1e-7, name
        if name not in base.tensors or not np.array_equal(got, base.read(name)):
            different += 1
        if len(got.shape) >= 2 and got.shape[0] > 2:
            assert np.allclose(source.read(name, 1, 3), got[1:3], rtol=1e-6, atol=1e-6 * scale)
        if len(got.shape) in (2, 3):
            assert_blocks(source, name, got, 1e-6 * scale)
    assert different == changed


VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "plain": ("llama", {"target_modules": ALL_LLAMA}, 14),
    "rslora": ("llama", {"target_modules": ALL_LLAMA, "use_rslora": True}, 14),
    "dora": ("llama", {"target_modules": ALL_LLAMA, "use_dora": True}, 14),
    "rslora and dora": ("llama", {"target_modules": ["q_proj"], "use_dora": True, "use_rslora": True}, 2),
    "patterns": ("llama", {"target_modules": ALL_LLAMA, "rank_pattern": {"q_proj": 2, r"layers.1.*up_proj": 8},
                           "alpha_pattern": {"down_proj": 32, "model.layers.0.self_attn.k_proj": 1}}, 14),
    "some layers": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}, 1),
    "modules to save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}, 4),
    "head": ("llama", {"target_modules": ["q_proj", "lm_head"]}, 3),
    "embeddings": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}, 3),
    "embeddings with dora": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}, 1),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}, 8),
    "gpt2 with dora": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "use_dora": True,
                                "fan_in_fan_out": True}, 8),
    "gpt2 without the flag": ("gpt2", {"target_modules": ["c_proj"], "fan_in_fan_out": False}, 4),
    "gpt2 embeddings": ("gpt2", {"target_modules": ["wte", "wpe", "c_proj"], "fan_in_fan_out": True}, 6),
    "gpt2 biases": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}, 15),
    "opt": ("opt", {"target_modules": ["q_proj", "fc1", "fc2"]}, 6),
    "opt trained biases": ("opt", {"target_modules": ["q_proj", "fc1"], "bias": "lora_only"}, 8),
    "opt lora_bias": ("opt", {"target_modules": ["q_proj", "fc1"], "lora_bias": True}, 8),
    "mixtral attention": ("mixtral", {"target_modules": ["q_proj", "o_proj"]}, 4),
    "bloom": ("bloom", {"target_modules": ["query_key_value"]}, 2),
    "all linear": ("llama", {"target_modules": "all-linear"}, 14),
}  # fmt: skip


@pytest.mark.parametrize("case", VARIANTS)
def test_equal_to_peft(tiny: Tiny, tmp_path: Path, case: str) -> None:
    model_type, settings, changed = VARIANTS[case]
    _, base_folder = tiny(model_type)
    merged = train(base_folder, tmp_path, **settings)
    if case == "mixtral attention":
        # transformers 5 fuses the experts in memory; the file's names are those of the attention only.
        fused = [name for name in merged.state_dict() if ".experts." in name or ".gate." in name]
        source = merge(open_checkpoint(base_folder), tmp_path)
        state = merged.state_dict()
        assert fused
        for name in source.tensors:
            if name in state:
                assert np.allclose(source.read(name), state[name].numpy(), rtol=1e-6, atol=1e-6)
        return
    assert_equal(base_folder, tmp_path, merged, changed=changed)


def test_spectra_equal_those_of_peft(tiny: Tiny, tmp_path: Path) -> None:
    _, base_folder = tiny("llama")
    variants: tuple[dict[str, Any], ...] = ({}, {"use_rslora": True}, {"use_dora": True})
    for number, settings in enumerate(variants):
        folder = tmp_path / str(number)
        merged = train(base_folder, folder, target_modules=ALL_LLAMA, **settings)
        source = merge(open_checkpoint(base_folder), folder)
        for name, tensor in merged.state_dict().items():
            if tensor.ndim == 2:
                ours = np.linalg.svd(source.read(name).astype(np.float64), compute_uv=False)
                theirs = np.linalg.svd(tensor.double().numpy(), compute_uv=False)
                assert np.abs(ours - theirs).max() <= 1e-5 * theirs.max()


def test_a_base_without_the_leading_part_of_its_names(tiny: Tiny, tmp_path: Path) -> None:
    """Like the original gpt2: ``h.0...`` in the file, ``transformer.h.0...`` in the adapter."""
    _, base_folder = tiny("gpt2")
    short = tmp_path / "short"
    short.mkdir()
    shutil.copy(base_folder / "config.json", short)
    tensors = load_file(base_folder / "model.safetensors")
    save_file({name.removeprefix("transformer."): t for name, t in tensors.items()}, short / "model.safetensors")
    merged = train(base_folder, tmp_path / "a", target_modules=["c_attn", "wte"], fan_in_fan_out=True)
    assert_equal(short, tmp_path / "a", merged, changed=3, file_names=lambda name: name.removeprefix("transformer."))


def test_a_base_with_a_longer_name(tiny: Tiny, tmp_path: Path) -> None:
    _, base_folder = tiny("llama")
    long = tmp_path / "long"
    long.mkdir()
    shutil.copy(base_folder / "config.json", long)
    tensors = load_file(base_folder / "model.safetensors")
    save_file({f"wrapped.{name}": t for name, t in tensors.items()}, long / "model.safetensors")
    merged = train(base_folder, tmp_path / "a", target_modules=["q_proj"])
    assert_equal(long, tmp_path / "a", merged, changed=2, file_names=lambda name: f"wrapped.{name}")


def test_older_key_names_and_pickles(tiny: Tiny, tmp_path: Path) -> None:
    _, base_folder = tiny("llama")
    merged = train(base_folder, tmp_path, target_modules=["q_proj"], use_dora=True)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    older = {}
    for name, tensor in tensors.items():
        name = name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
        older[name.replace("lora_magnitude_vector", "lora_magnitude_vector.default.weight")] = tensor
    assert set(older) != set(tensors)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(older, tmp_path / "adapter_model.bin")
    assert_equal(base_folder, tmp_path, merged, changed=2)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("how", ["saved whole", "by factors"])
def test_the_trained_head_of_a_tied_model(tiny: Tiny, tmp_path: Path, form: str, how: str) -> None:
    """safetensors drops the tied head, a pickle has both names. PEFT trains by factors the one matrix that there is,
    of which it saves a copy; it gives a head saved whole numbers of its own."""
    from gpuherd.models.tensors.matrices import matrices

    model, base_folder = tiny("opt")
    settings: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    if how == "by factors":
        settings = {"target_modules": ["q_proj", "lm_head"]}
    merged = train(base_folder, tmp_path, **settings)
    if form == "bin":
        base_folder = tmp_path / "base"
        base_folder.mkdir()
        torch.save(model.state_dict(), base_folder / "pytorch_model.bin")
        (base_folder / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    source = merge(open_checkpoint(base_folder), tmp_path)
    vocabulary = [m for m in matrices(source, embeddings=True) if m.skip is None and m.shape == (64, 32)]
    wanted = {"model.decoder.embed_tokens": merged.model.decoder.embed_tokens.weight}
    if how == "saved whole":
        wanted["lm_head"] = merged.lm_head.weight
    assert {m.longname for m in vocabulary} == wanted.keys()
    for matrix in vocabulary:
        assert np.allclose(matrix.slices()[0], wanted[matrix.longname].detach().numpy(), atol=1e-6)


def test_a_changed_tensor_is_no_longer_tied(tmp_path: Path) -> None:
    """Two names for one storage in the base; the adapter changes one of them."""
    from gpuherd.models.tensors.matrices import matrices

    base, folder = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    folder.mkdir()
    shared = torch.ones(6, 4)
    torch.save({"a.weight": shared, "b.weight": shared}, base / "pytorch_model.bin")
    factors = {"lora_A": torch.ones(2, 4), "lora_B": torch.ones(6, 2)}
    tensors = {f"base_model.model.b.{name}.weight": tensor for name, tensor in factors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    assert [m.longname for m in matrices(open_checkpoint(base)) if m.skip is None] == ["a"]
    merged = merge(open_checkpoint(base), folder)
    assert [m.longname for m in matrices(merged) if m.skip is None] == ["a", "b"]
    assert np.array_equal(merged.read("b.weight"), np.full((6, 4), 3.0))


def test_a_classification_head_is_new(tiny: Tiny, tmp_path: Path) -> None:
    _, base_folder = tiny("llama")
    merged = train(
        base_folder,
        tmp_path,
        auto_class="AutoModelForSequenceClassification",
        target_modules=["q_proj"],
        task_type="SEQ_CLS",
    )
    source = merge(open_checkpoint(base_folder), tmp_path)
    assert np.allclose(source.read("score.weight"), merged.score.weight.detach().numpy())


@pytest.mark.parametrize("use_dora", [False, True])
def test_convolutions(tmp_path: Path, use_dora: bool) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    def network() -> torch.nn.Module:
        torch.manual_seed(5)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1), torch.nn.Conv2d(4, 4, (2, 3))
        )

    base_folder = tmp_path / "base"
    base_folder.mkdir()
    save_file(network().state_dict(), base_folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = LoraConfig(r=2, lora_alpha=3, target_modules=["0", "2", "3"], use_dora=use_dora)
        adapted = get_peft_model(network(), settings)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0.0, 0.3)
        adapted.save_pretrained(tmp_path / "a")
        merged = PeftModel.from_pretrained(network(), tmp_path / "a").merge_and_unload()
    assert_equal(base_folder, tmp_path / "a", merged, changed=3)


def test_fused_experts(tiny: Tiny, tmp_path: Path) -> None:
    """target_parameters: PEFT's factors for 3-D parameters, of a model that stores them fused."""
    _, base_folder = tiny("gpt_oss")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    merged = train(base_folder, tmp_path, target_modules=["q_proj"], target_parameters=targets)
    assert_equal(base_folder, tmp_path, merged, changed=6)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_fused_experts_of_a_base_that_stores_them_apart(tiny: Tiny, tmp_path: Path, model_type: str) -> None:
    """As nearly all do; transformers fuses them in memory, and saves them apart again."""
    from gpuherd.models.subject import open_subject

    _, base_folder = tiny(model_type)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    merged = train(base_folder, tmp_path / "a", target_modules=["q_proj"], target_parameters=targets)
    merged.save_pretrained(tmp_path / "merged")
    wanted = load_file(tmp_path / "merged" / "model.safetensors")
    base = open_checkpoint(base_folder)
    source = merge(base, tmp_path / "a")
    changed = [name for name in wanted if not np.array_equal(source.read(name), base.read(name))]
    assert len(changed) == 2 + 2 * 3 * 3
    for name in changed:
        got = source.read(name)
        assert np.allclose(got, wanted[name].numpy(), atol=1e-6), name
        assert np.allclose(source.read(name, 1, 3), got[1:3], atol=1e-6)
    update = open_subject(tmp_path / "a", base_folder, "ba")
    assert set(update.ranks) == {4} and len(update.ranks) == len(changed)
    found = {matrix.tensor: matrix for matrix in update.matrices if matrix.skip is None}
    assert set(found) == set(changed)
    for name, matrix in found.items():
        assert matrix.factors is not None
        ((left, right),) = matrix.factors()
        assert np.allclose(left @ right, wanted[name].numpy() - base.read(name), atol=1e-5)


def test_bfloat16_base_is_not_rounded(tiny: Tiny, tmp_path: Path) -> None:
    _, base_folder = tiny("llama")
    half = tmp_path / "half"
    half.mkdir()
    shutil.copy(base_folder / "config.json", half)
    tensors = {name: t.bfloat16() for name, t in load_file(base_folder / "model.safetensors").items()}
    save_file(tensors, half / "model.safetensors")
    train(base_folder, tmp_path / "a", target_modules=["q_proj"])
    factors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (factors[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
    wanted = tensors[f"{name}.weight"].double() + 6 / 4 * b @ a
    got = merge(open_checkpoint(half), tmp_path / "a").read(f"{name}.weight")
    assert got.dtype == np.float32 and np.abs(got - wanted.numpy()).max() < 1e-6


# What is refused.


@pytest.fixture
def adapter(tiny: Tiny, tmp_path: Path) -> tuple[Path, Path]:
    """A base model's folder and an adapter of it, to be spoilt."""
    _, base_folder = tiny("llama")
    folder = tmp_path / "adapter"
    train(base_folder, folder, target_modules=["q_proj"])
    return base_folder, folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(dict(change(load_file(path))), path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "method IA3"),
        ({"peft_type": "PREFIX_TUNING"}, "method PREFIX_TUNING"),
        ({"peft_type": "LOHA"}, "method LOHA"),
        ({"peft_type": None}, "method None"),
        ({"use_qalora": True}, "uses QALoRA"),
        ({"layer_replication": [[0, 2]]}, "uses layer replication"),
        ({"trainable_token_indices": [1]}, "uses trainable tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "started with pissa_niter_4"),
        ({"r": None}, "r must be a whole number"),
        ({"r": 0}, "r must be a whole number"),
        ({"rank_pattern": {"q_proj": "4"}}, "r must be a whole number"),
        ({"rank_pattern": [1]}, "must be tables"),
        ({"lora_alpha": "big"}, "lora_alpha must be a finite number"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a finite number"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a finite number"),
        ({"alpha_pattern": {"q_proj": None}}, "lora_alpha must be a finite number"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"modules_to_save": "lm_head"}, "must be a list of names"),
        ({"target_parameters": [3]}, "must be a list of names"),
        ({"r": 5}, "do not fit"),
        ({"rank_pattern": {"q_proj": 7}}, "do not fit"),
        ({"rank_pattern": {"(": 7}}, "no regular expression"),
    ],
)
def test_other_methods_and_settings(adapter: tuple[Path, Path], changes: dict[str, Any], reason: str) -> None:
    base_folder, folder = adapter
    change_config(folder, **changes)
    with pytest.raises(BadModel, match=reason):
        merge(open_checkpoint(base_folder), folder)


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: {k: v for k, v in t.items() if k != KEY}, "lacks one of its two"),
        (lambda t: {**t, KEY.replace("layers.0", "layers.9"): t[KEY].clone(),
                    KEY.replace("layers.0", "layers.9").replace("_A", "_B"): t[KEY].T.clone().contiguous()},
         "finds no weight in the base"),
        (lambda t: {**t, KEY: torch.ones(4, 99)}, "do not fit"),
        (lambda t: {**t, KEY: t[KEY].to(torch.int8)}, "is I8; factors are floating-point numbers"),
        (lambda t: {**t, "base_model.model.model.norm2.weight": torch.ones(4)}, "has no place in the base"),
        (lambda t: {**t, KEY.replace("lora_A", "lora_C"): torch.ones(4)}, "no tensor of a LoRA adapter"),
        (lambda t: {**t, KEY.replace("lora_A", "lora_A.second"): torch.ones(4, 32)}, "more than one adapter"),
        (lambda t: {}, "no tensor|no LoRA weights"),
    ],
)  # fmt: skip
def test_tensors_without_a_place(adapter: tuple[Path, Path], change: Any, reason: str) -> None:
    base_folder, folder = adapter
    change_tensors(folder, change)
    with pytest.raises(BadModel, match=reason):
        merge(open_checkpoint(base_folder), folder)


def test_factors_given_as_a_model_are_refused(adapter: tuple[Path, Path], tmp_path: Path) -> None:
    _, folder = adapter
    shutil.copy(folder / "adapter_model.safetensors", tmp_path / "weights.safetensors")
    with pytest.raises(BadModel, match="an adapter is given as its folder"):
        open_checkpoint(tmp_path / "weights.safetensors")


def test_another_base(tiny: Tiny, adapter: tuple[Path, Path]) -> None:
    _, folder = adapter
    _, other = tiny("bloom")
    with pytest.raises(BadModel, match="right base model"):
        merge(open_checkpoint(other), folder)


def test_what_is_an_adapter(adapter: tuple[Path, Path], tmp_path: Path) -> None:
    base_folder, folder = adapter
    assert is_adapter(folder) and is_adapter(folder / "adapter_model.safetensors")
    assert not is_adapter(base_folder) and not is_adapter(base_folder / "model.safetensors")
    whole = tmp_path / "whole"
    shutil.copytree(base_folder, whole)
    shutil.copy(folder / "adapter_config.json", whole)
    assert not is_adapter(whole)
    check_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    assert is_adapter(folder)
    with pytest.raises(MissingModel, match=r"no adapter_model\.safetensors"):
        check_adapter(folder)


def test_the_base_that_the_adapter_names(adapter: tuple[Path, Path]) -> None:
    base_folder, folder = adapter
    assert adapter_base(folder) == str(base_folder)
    change_config(folder, base_model_name_or_path="org/base", revision="v2")
    assert adapter_base(folder) == "org/base@v2"
    change_config(folder, base_model_name_or_path=None)
    assert adapter_base(folder) is None


def test_two_reads_are_equal(adapter: tuple[Path, Path]) -> None:
    base_folder, folder = adapter
    source = merge(open_checkpoint(base_folder), folder)
    for name in source.tensors:
        assert np.array_equal(source.read(name), source.read(name))


def test_a_grown_vocabulary_replaces_the_embedding(tiny: Tiny, tmp_path: Path) -> None:
    _, base_folder = tiny("llama")
    train(base_folder, tmp_path, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    key = "base_model.model.model.embed_tokens.weight"
    grown = torch.randn(70, 32)
    change_tensors(tmp_path, lambda tensors: {**tensors, key: grown})
    source = merge(open_checkpoint(base_folder), tmp_path)
    assert source.tensors["model.embed_tokens.weight"].shape == (70, 32)
    assert np.array_equal(source.read("model.embed_tokens.weight"), grown.numpy())
    assert np.array_equal(source.read("model.embed_tokens.weight", 66, 70), grown[66:].numpy())
    change_tensors(tmp_path, lambda tensors: {**tensors, key: torch.randn(64, 31)})
    with pytest.raises(BadModel, match="does not fit"):
        merge(open_checkpoint(base_folder), tmp_path)
