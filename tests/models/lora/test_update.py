"""Updates: BA and merged minus base against PEFT in float64, and one model minus another, matrix by matrix."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.blocks import assert_blocks
from tests.models.peft_adapters import save_adapter

from gpuherd.errors import BadModel
from gpuherd.esd.config import FitSettings
from gpuherd.esd.pipeline import analyse_matrices
from gpuherd.esd.spectra.pooled import low_rank_spectrum
from gpuherd.models.checkpoints.open import open_checkpoint
from gpuherd.models.lora.adapter import merge
from gpuherd.models.lora.update import NOT_IN_ADAPTER, NOT_IN_BASE, SAVED_WHOLE
from gpuherd.models.subject import format_ranks, open_subject
from gpuherd.models.tensors.matrices import WeightMatrix, matrices

Tiny = Callable[..., tuple[Any, Path]]
Array = np.ndarray[Any, Any]

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def train(base_folder: Path, folder: Path, **settings: Any) -> tuple[dict[str, Array], dict[str, Array]]:
    """Saves a PEFT adapter with random weights. Returns in float64: merged by PEFT minus base, and PEFT's own s B A of
    each module by the name of its weight."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float64)

    torch.manual_seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_adapter(base(), folder, **settings)
        loaded = PeftModel.from_pretrained(base(), folder, autocast_adapter_dtype=False)
        products = {
            f"{name.removeprefix('base_model.model.')}.weight": module.get_delta_weight("default").detach().numpy()
            for name, module in loaded.named_modules()
            if hasattr(module, "get_delta_weight") and "target_parameters" not in settings
        }
        after = loaded.merge_and_unload().state_dict()
        before = base().state_dict()
    return {name: (after[name] - before[name]).numpy() for name in before if name in after}, products


def dense(matrix: WeightMatrix) -> Array:
    (whole,) = matrix.slices()
    assert whole.dtype == np.float64
    return whole


def multiplied(matrix: WeightMatrix) -> Array:
    assert matrix.factors is not None
    ((left, right),) = matrix.factors()
    assert left.dtype == right.dtype == np.float64
    return left @ right


def analysed(found: list[WeightMatrix]) -> dict[str, WeightMatrix]:
    return {matrix.longname: matrix for matrix in found if matrix.skip is None}


def close(got: Array, wanted: Array, tolerance: float = 1e-10) -> bool:
    return got.shape == wanted.shape and bool(np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max())


SAME: dict[str, tuple[str, dict[str, Any], int]] = {
    "plain": ("llama", {"target_modules": LLAMA}, 14),
    "rslora": ("llama", {"target_modules": LLAMA, "use_rslora": True}, 14),
    "patterns": ("llama", {"target_modules": LLAMA, "rank_pattern": {"q_proj": 2, "up_proj": 40},
                           "alpha_pattern": {"down_proj": 32}}, 14),
    "gpt2 (three parts of columns)": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"],
                                               "fan_in_fan_out": True}, 12),
    "bloom (by head)": ("bloom", {"target_modules": ["query_key_value"]}, 6),
    "phi3 (unequal rows)": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}, 10),
    "embeddings": ("llama", {"target_modules": ["embed_tokens"]}, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_lora_equals_peft_for_ba_and_for_delta(tiny: Tiny, tmp_path: Path, case: str) -> None:
    """s B A, split as the base's weights are, against PEFT's dense product split by our rules and by subtraction."""
    model_type, settings, count = SAME[case]
    _, base = tiny(model_type)
    differences, products = train(base, tmp_path, **settings)
    whole = tmp_path / "whole"
    whole.mkdir()
    shutil.copy(base / "config.json", whole)
    dense_update = {name: torch.zeros(array.shape, dtype=torch.float64) for name, array in differences.items()}
    dense_update |= {name: torch.from_numpy(array.copy()) for name, array in products.items()}
    save_file(dense_update, whole / "model.safetensors")
    wanted = {m.longname: m for m in matrices(open_checkpoint(whole), embeddings=True) if m.skip is None}
    for spectra_of in ("ba", "delta"):
        subject = open_subject(tmp_path, base, spectra_of, embeddings=True)
        found = subject.matrices
        ours = analysed(found)
        assert len(ours) == count
        assert set(subject.ranks) <= ({2, 4, 40} if case == "patterns" else {4})
        for name, matrix in ours.items():
            expected = dense(wanted[name])
            assert close(dense(matrix), expected), name
            if matrix.factors is None:  # PEFT saved the embedding beside its factors: any difference is possible
                assert (case, spectra_of) == ("embeddings", "delta")
                assert_blocks(subject.source, "model.embed_tokens.weight", expected, 1e-12)
                continue
            assert close(multiplied(matrix), expected), name
            singular = np.sort(np.linalg.svd(expected, compute_uv=False) ** 2)
            spectrum = low_rank_spectrum(matrix.factors())
            assert np.abs(spectrum.evals - singular).max() <= 1e-10 * singular[-1]
        assert {m.skip for m in found if m.longname not in ours and m.skip and "embedding" not in m.skip} <= {
            NOT_IN_ADAPTER, "tied to transformer.wte.weight, counted there",
            "tied to transformer.word_embeddings.weight, counted there",
        }  # fmt: skip
    for name, array in products.items():
        assert close(differences[name], array)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_dora_has_a_ba_and_a_delta_of_its_own(tiny: Tiny, tmp_path: Path, model_type: str) -> None:
    _, base = tiny(model_type)
    targets: dict[str, dict[str, Any]] = {
        "llama": {"target_modules": LLAMA},
        "gpt2": {"target_modules": ["c_fc"], "fan_in_fan_out": True},
    }
    differences, products = train(base, tmp_path, use_dora=True, **targets[model_type])
    ba = analysed(open_subject(tmp_path, base, "ba").matrices)
    delta = analysed(open_subject(tmp_path, base, "delta").matrices)
    assert ba.keys() == delta.keys() and ba
    for name, matrix in delta.items():
        assert matrix.factors is None
        assert close(dense(matrix), differences[f"{name}.weight"]), name
        assert close(multiplied(ba[name]), products[f"{name}.weight"])


def test_parts_of_doras_delta_are_those_of_the_whole(tiny: Tiny, tmp_path: Path) -> None:
    """Conv1D: the norms run over all rows, also where a few rows are asked for."""
    _, base = tiny("gpt2")
    train(base, tmp_path, use_dora=True, target_modules=["c_fc", "wte"], fan_in_fan_out=True)
    for source in (merge(open_checkpoint(base), tmp_path), open_subject(tmp_path, base, "delta").source):
        for name in ("transformer.h.1.mlp.c_fc.weight", "transformer.wte.weight"):
            whole = source.read(name)
            assert_blocks(source, name, whole, 1e-7 * np.abs(whole).max())
            pieces = [source.read(name, start, start + 8) for start in range(0, len(whole), 8)]
            assert np.allclose(np.concatenate(pieces), whole, rtol=1e-6, atol=1e-7 * np.abs(whole).max())


def test_saved_modules_and_new_heads(tiny: Tiny, tmp_path: Path) -> None:
    _, base = tiny("llama")
    differences, _ = train(base, tmp_path, target_modules=["q_proj"], modules_to_save=["lm_head"])
    key = "base_model.model.lm_head.weight"
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    changed = torch.randn(64, 32)
    save_file({**tensors, key: changed}, tmp_path / "adapter_model.safetensors")
    ba = {m.longname: m.skip for m in open_subject(tmp_path, base, "ba").matrices}
    assert ba["lm_head"] == SAVED_WHOLE
    head = analysed(open_subject(tmp_path, base, "delta").matrices)["lm_head"]
    old = load_file(base / "model.safetensors")["lm_head.weight"]
    assert np.array_equal(dense(head), changed.double().numpy() - old.double().numpy())
    save_file({**tensors, key: torch.randn(70, 32)}, tmp_path / "adapter_model.safetensors")
    delta = {m.longname: m.skip for m in open_subject(tmp_path, base, "delta").matrices}
    assert delta["lm_head"] == "of shape 64x32 in the base"
    assert len(differences) > 0


def test_experts(tiny: Tiny, tmp_path: Path) -> None:
    """Each expert's own part of the factors, gate and up apart (GPT-OSS alternates them column by column)."""
    _, base = tiny("gpt_oss")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    differences, _ = train(base, tmp_path, target_modules=["q_proj"], target_parameters=targets)
    found = analysed(open_subject(tmp_path, base, "ba").matrices)
    assert len(found) == 2 * (1 + 3 * 3)
    for layer in range(2):
        fused = differences[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        for expert in range(3):
            for part, offset in (("gate", 0), ("up", 1)):
                matrix = found[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"]
                wanted = fused[expert][:, offset::2]
                assert close(multiplied(matrix), wanted) and close(dense(matrix), wanted)
    source = open_subject(tmp_path, base, "delta").source
    for name in (f"model.layers.0.mlp.experts.{kind}_proj" for kind in ("gate_up", "down")):
        assert_blocks(source, name, source.read(name), 1e-12)


def test_convolutions(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def network() -> torch.nn.Module:
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.Conv2d(3, 8, (2, 3)), torch.nn.Conv2d(8, 4, 1)).double()

    base = tmp_path / "base"
    base.mkdir()
    save_file(network().state_dict(), base / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(network(), LoraConfig(r=2, lora_alpha=3, target_modules=["0", "1"]))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.3)
    adapted.save_pretrained(tmp_path / "a")
    subject = open_subject(tmp_path / "a", base, "ba")
    found = analysed(subject.matrices)
    for name in ("0", "1"):
        product = adapted.base_model.model[int(name)].get_delta_weight("default").detach().double().numpy()
        assert found[name].factors is not None
        assert not subject.source.has_blocks(f"{name}.weight")  # type: ignore[attr-defined]
        pairs = found[name].factors()  # type: ignore[misc]
        slices = found[name].slices()
        positions = np.moveaxis(product.reshape(*product.shape[:2], -1), 2, 0)
        assert len(pairs) == len(slices) == len(positions)
        for (left, right), piece, wanted in zip(pairs, slices, positions, strict=True):
            assert close(left @ right, wanted, 1e-6) and close(piece, wanted, 1e-6)
            assert np.allclose(left @ right, piece, rtol=1e-12, atol=1e-14)


# A whole model minus its base.


@pytest.fixture
def pair(tiny: Tiny, tmp_path: Path) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A base in bfloat16 and a fine-tune of it, and the fine-tune's tensors."""
    _, folder = tiny("llama")
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    before = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    torch.manual_seed(3)
    after = {name: (t.float() + 0.01 * torch.randn_like(t.float())).bfloat16() for name, t in before.items()}
    for target, tensors in ((base, before), (tuned, after)):
        target.mkdir()
        shutil.copy(folder / "config.json", target)
        save_file(tensors, target / "model.safetensors")
    return base, tuned, after


def test_a_fine_tune_minus_its_base_is_exact(pair: tuple[Path, Path, dict[str, torch.Tensor]]) -> None:
    base, tuned, after = pair
    before = load_file(base / "model.safetensors")
    subject = open_subject(tuned, base, "delta")
    found = analysed(subject.matrices)
    assert found.keys() == analysed(list(matrices(open_checkpoint(tuned)))).keys()
    for name, matrix in found.items():
        wanted = after[f"{name}.weight"].double() - before[f"{name}.weight"].double()
        assert np.array_equal(dense(matrix), wanted.numpy())
        part = subject.source.read(f"{name}.weight", 1, 3)
        assert np.array_equal(part, wanted[1:3].numpy())
        assert_blocks(subject.source, f"{name}.weight", wanted.numpy(), 0.0)
        assert all(slab.size <= 5 * min(matrix.shape) for slab in matrix.slabs(5))


def test_tensors_without_a_counterpart(pair: tuple[Path, Path, dict[str, torch.Tensor]]) -> None:
    base, tuned, after = pair
    grown = torch.randn(80, 32).bfloat16()
    after = {**after, "lm_head.weight": grown, "extra.weight": torch.randn(5, 6)}
    save_file(after, tuned / "model.safetensors")
    skips = {m.longname: m.skip for m in open_subject(tuned, base, "delta").matrices}
    assert skips["lm_head"] == "of shape 64x32 in the base"
    assert skips["extra"] == NOT_IN_BASE
    assert skips["model.layers.0.self_attn.q_proj"] is None


def test_names_that_differ_by_leading_parts(pair: tuple[Path, Path, dict[str, torch.Tensor]]) -> None:
    base, tuned, after = pair
    short = {name.removeprefix("model."): tensor for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(short, base / "model.safetensors")
    found = analysed(open_subject(tuned, base, "delta").matrices)
    assert len(found) == 15
    name = "model.layers.1.mlp.up_proj"
    wanted = after[f"{name}.weight"].double() - short["layers.1.mlp.up_proj.weight"].double()
    assert np.array_equal(dense(found[name]), wanted.numpy())


def test_two_names_never_share_a_counterpart(tmp_path: Path) -> None:
    for folder, names in (("base", ["block.0.fc.weight"]), ("tuned", ["a.block.0.fc.weight", "b.block.0.fc.weight"])):
        (tmp_path / folder).mkdir()
        save_file({name: torch.randn(6, 6) for name in names}, tmp_path / folder / "model.safetensors")
    with pytest.raises(BadModel, match="right base model"):
        open_subject(tmp_path / "tuned", tmp_path / "base", "delta")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Numbers read from each weight file while the block runs, at the edge where bytes come from the disk."""
    import os

    read: dict[str, int] = {}
    plain = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        got = plain(fd, buffers, offset)
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
        read[name] = read.get(name, 0) + got
        return got

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", preadv)
        yield read


def test_each_tensor_is_read_once_from_each_side(
    pair: tuple[Path, Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through reading, spectrum and fit: the bytes that come from the disk are those of the matrices, on both sides."""
    base, tuned, _ = pair
    subject = open_subject(tuned, base, "delta")
    sizes = sum(subject.source.tensors[m.tensor].nbytes for m in subject.matrices if m.skip is None)
    with counted(monkeypatch) as read:
        rows = analyse_matrices(subject.matrices, FitSettings(), ("cpu",), parallel=False, on_progress=lambda _: None)
    assert sum(row.fit_status == "ok" for row in rows) == 15
    assert read == {str(folder / "model.safetensors"): sizes for folder in (base, tuned)}


@pytest.mark.parametrize("use_dora", [False, True])
def test_merging_reads_the_base_once(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_dora: bool
) -> None:
    """In slabs; for DoRA twice what comes with a part of its inputs only, as wide matrices do. The factors once."""
    _, base = tiny("llama")
    train(base, tmp_path, use_dora=use_dora, target_modules=LLAMA)
    subject = open_subject(tmp_path, base, "weights")
    chosen = [matrix for matrix in subject.matrices if matrix.skip is None and "_proj" in matrix.tensor]
    with counted(monkeypatch) as read:
        for matrix in chosen:
            assert sum(slab.size for slab in matrix.slabs(7)) == matrix.params
    twice = [matrix for matrix in chosen if use_dora and matrix.shape[0] < matrix.shape[1]]
    assert len(chosen) == 14 and len(twice) == (6 if use_dora else 0)
    assert read[str(base / "model.safetensors")] == 4 * sum(matrix.params for matrix in (*chosen, *twice))
    factors = load_file(tmp_path / "adapter_model.safetensors").values()
    assert read[str(tmp_path / "adapter_model.safetensors")] == sum(factor.nbytes for factor in factors)


def test_the_base_is_not_read_for_ba(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, base = tiny("gpt2")
    train(base, tmp_path, target_modules=["c_attn"], fan_in_fan_out=True)
    subject = open_subject(tmp_path, base, "delta")
    with counted(monkeypatch) as read:
        for matrix in analysed(subject.matrices).values():
            assert matrix.factors is not None
            matrix.factors()
    assert list(read) == [str(tmp_path / "adapter_model.safetensors")]


# What is refused.


def test_impossible_combinations(pair: tuple[Path, Path, dict[str, torch.Tensor]], tiny: Tiny, tmp_path: Path) -> None:
    base, tuned, _ = pair
    with pytest.raises(BadModel, match="only an adapter has a BA"):
        open_subject(tuned, base, "ba")
    with pytest.raises(BadModel, match="no base to compare it with"):
        open_subject(tuned, None, "delta")
    _, llama = tiny("llama")
    train(llama, tmp_path / "a", target_modules=["q_proj"])
    with pytest.raises(BadModel, match="is itself an adapter"):
        open_subject(tuned, tmp_path / "a", "delta")
    with pytest.raises(BadModel, match="names no base model"):
        open_subject(tmp_path / "a", None, "ba")
    _, other = tiny("bloom")
    with pytest.raises(BadModel, match="right base model"):
        open_subject(tuned, other, "delta")


def test_ranks_in_words() -> None:
    assert (format_ranks([8, 8]), format_ranks([16, 4, 8])) == ("rank 8", "ranks 4 to 16")
