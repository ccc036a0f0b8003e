"""No weight is missed and none counted twice: mixtures of experts, ties, convolutions, rows in every form of file."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpuherd.esd.config import FitSettings
from gpuherd.esd.pipeline import analyse_matrices
from gpuherd.esd.schema import LayerRow
from gpuherd.esd.worker import main
from gpuherd.models.checkpoints.module import module_source
from gpuherd.models.checkpoints.open import open_checkpoint
from gpuherd.models.subject import count_weights
from gpuherd.models.tensors.matrices import WeightMatrix, matrices
from gpuherd.models.tensors.source import TensorSource

Tiny = Callable[..., tuple[Any, Path]]


def analysed(source: TensorSource) -> list[WeightMatrix]:
    return [m for m in matrices(source, embeddings=True) if m.skip is None]


def numbers(found: list[WeightMatrix]) -> Counter[bytes]:
    """The matrices themselves, whatever they are called; either way round."""
    return Counter(min(a.tobytes(), a.T.tobytes()) for m in found for a in m.slices())


# architecture, experts' matrices: layers x experts x (gate, up, down), and JetMoE's mixtures of attention
MIXTURES = [
    ("mixtral", 18), ("qwen3_moe", 18), ("olmoe", 18), ("granitemoe", 18), ("gpt_oss", 18), ("deepseek_v3", 18),
    ("llama4_text", 18), ("jetmoe", 18 + 12),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "experts"), MIXTURES)
def test_each_expert_counts_in_memory_as_in_the_file(tiny: Tiny, model_type: str, experts: int) -> None:
    """transformers 5 fuses most experts on loading and writes them apart: the same matrices, none missed."""
    model, folder = tiny(model_type)
    in_memory, in_file = analysed(module_source(model)), analysed(open_checkpoint(folder))
    assert numbers(in_memory) == numbers(in_file)
    assert sum(m.kind == "expert" for m in in_memory) == experts
    matrix_weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "bias" not in name)
    assert sum(m.params for m in in_memory) == sum(m.params for m in in_file) == matrix_weights


@pytest.mark.parametrize("model_type", ["gpt2", "xlm-roberta", "opt", "bloom"])
@pytest.mark.parametrize("form", ["module", "safetensors", "bin"])
def test_a_tied_head_counts_once_whichever_comes_first(tiny: Tiny, tmp_path: Path, model_type: str, form: str) -> None:
    """In XLM-R's state dictionary the head comes before the embedding whose storage it shares."""
    model, folder = tiny(model_type)
    if form == "bin":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        folder = tmp_path
    source: TensorSource = module_source(model) if form == "module" else open_checkpoint(folder)
    found = list(matrices(source, embeddings=True))
    vocabulary = [m.longname for m in found if m.shape == (64, 32) and m.skip is None]
    assert len(vocabulary) == 1 and vocabulary[0].endswith(("wte", "embed_tokens", "word_embeddings"))
    assert all("tied to" in str(m.skip) for m in found if m.shape == (64, 32) and m.longname not in vocabulary)
    assert count_weights(source.tensors, found) == sum(parameter.numel() for parameter in model.parameters())


CONVOLUTIONS = [
    (torch.nn.Conv1d, torch.nn.ConvTranspose1d, (3,)),
    (torch.nn.Conv2d, torch.nn.ConvTranspose2d, (2, 3)),
    (torch.nn.Conv3d, torch.nn.ConvTranspose3d, (2, 1, 2)),
]


@pytest.mark.parametrize(("plain", "transposed", "kernel"), CONVOLUTIONS)
def test_a_transposed_convolution_has_the_spectrum_of_the_plain_one(
    plain: Any, transposed: Any, kernel: tuple[int, ...]
) -> None:
    """(in, out, ...) in place of (out, in, ...): each slice is the transpose, and no name need tell which it is."""
    one, other = plain(5, 7, kernel), transposed(7, 5, kernel)
    with torch.no_grad():
        other.weight.copy_(one.weight)
    (a,), (b,) = analysed(module_source(one)), analysed(module_source(other))
    assert a.shape == b.shape == (7, 5) and len(a.slices()) == np.prod(kernel)
    swapped = transposed(5, 7, kernel)
    with torch.no_grad():
        swapped.weight.copy_(one.weight.transpose(0, 1))
    rows = [analyse_matrices(analysed(module_source(m)), FitSettings("xmin_mid"), ("cpu",), parallel=False,
                             on_progress=lambda _: None)[0] for m in (one, swapped)]  # fmt: skip
    assert (rows[0].M, rows[0].N) == (rows[1].N, rows[1].M)
    assert rows[0].alpha == pytest.approx(rows[1].alpha, rel=1e-12) and rows[0].num_evals == 5 * np.prod(kernel)


def test_groups_of_a_convolution_are_one_matrix_as_stored() -> None:
    """Depthwise: (channels, 1) at each position, one eigenvalue each."""
    layer = torch.nn.Conv1d(6, 6, 4, groups=6)
    (matrix,) = analysed(module_source(layer))
    assert matrix.shape == (6, 1) and len(matrix.slices()) == 4
    wanted = layer.weight.detach()[:, :, 2].numpy()
    assert np.array_equal(matrix.slices()[2], wanted)


def test_shared_experts_in_one_tensor_are_taken_apart(tmp_path: Path) -> None:
    """As Inkling in transformers 5 has them, beside those that are routed."""
    names = [f"model.layers.0.mlp.shared_experts.{part}_proj" for part in ("down", "gate", "up")]
    save_file({name: torch.randn(2, 6, 4) for name in names}, tmp_path / "model.safetensors")
    wanted = {f"model.layers.0.mlp.shared_experts.{n}.{part}_proj" for n in range(2) for part in ("down", "gate", "up")}
    assert {m.longname for m in analysed(open_checkpoint(tmp_path))} == wanted


@pytest.mark.parametrize(
    "name",
    ["emb", "bert.embeddings.shape_embed", "backbone.embeddings", "wte", "visual.pos_embed", "token_type_embeddings"],
)
def test_embeddings_are_known_by_name(tmp_path: Path, name: str) -> None:
    """RWKV's own files call it emb; RoCBert has two beside its words, Qwen3-VL one of positions in a picture."""
    save_file({f"{name}.weight": torch.randn(9, 4)}, tmp_path / "model.safetensors")
    (matrix,) = matrices(open_checkpoint(tmp_path))
    assert (matrix.kind, matrix.skip) == ("embedding", "embedding (use --embeddings)")


def test_an_embedding_of_patches_is_a_linear_layer(tmp_path: Path) -> None:
    """SigLIP 2 has it as one; in SigLIP it is a convolution."""
    for patches in (torch.randn(8, 48), torch.randn(8, 3, 4, 4)):
        save_file({"vision_model.embeddings.patch_embedding.weight": patches}, tmp_path / "model.safetensors")
        (matrix,) = matrices(open_checkpoint(tmp_path))
        assert matrix.skip is None and matrix.params == 8 * 48


def test_the_convolution_of_one_expert_is_no_mixture() -> None:
    experts = torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Conv1d(4, 6, 3)])})
    (matrix,) = analysed(module_source(experts))
    assert (matrix.longname, matrix.kind, matrix.shape, matrix.params) == ("experts.0", "conv", (6, 4), 72)


def test_a_weight_kept_as_direction_and_length_is_told() -> None:
    for normed in (torch.nn.utils.parametrizations.weight_norm, _old_weight_norm):
        reasons = [m.skip for m in matrices(module_source(normed(torch.nn.Conv1d(4, 6, 3))))]
        assert len(reasons) == 2 and all("weight norm" in str(reason) for reason in reasons)


def _old_weight_norm(layer: torch.nn.Module) -> torch.nn.Module:
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(layer)


def test_recurrent_layers() -> None:
    projected = {m.longname: m.shape for m in analysed(module_source(torch.nn.LSTM(5, 4, proj_size=3)))}
    assert projected == {"weight_ih_l0": (16, 5), "weight_hh_l0": (16, 3), "weight_hr_l0": (3, 4)}
    layer = torch.nn.LSTM(5, 4, bidirectional=True)
    found = {m.longname: m.shape for m in analysed(module_source(layer))}
    assert found == {
        "weight_ih_l0": (16, 5), "weight_hh_l0": (16, 4), "weight_ih_l0_reverse": (16, 5),
        "weight_hh_l0_reverse": (16, 4),
    }  # fmt: skip


def test_a_vocabulary_of_50257_is_analysed(tmp_path: Path) -> None:
    """Twice the rows of what others silently leave out; its small side makes the work."""
    wte = torch.randn(50257, 48, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    save_file({"transformer.wte.weight": wte}, tmp_path / "model.safetensors")
    (row,) = rows_of(open_checkpoint(tmp_path))
    assert (row.M, row.N, row.num_evals, row.fit_status) == (50257, 48, 48, "ok")
    assert row.norm == pytest.approx(float((wte.double() ** 2).sum()), rel=1e-12)


def rows_of(source: TensorSource) -> list[LayerRow]:
    return analyse_matrices(
        list(matrices(source, embeddings=True)),
        FitSettings("DKS"),
        ("cpu",),
        parallel=False,
        on_progress=lambda _: None,
    )


def test_rows_are_the_same_in_every_form_of_file(tiny: Tiny, tmp_path: Path) -> None:
    """One file, shards in any order, a pickle, the module itself: every figure to the bit."""
    model, folder = tiny("phi3")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    shards, pickle = tmp_path / "shards", tmp_path / "pickle"
    for path in (shards, pickle):
        path.mkdir()
        (path / "config.json").write_bytes((folder / "config.json").read_bytes())
    names = list(reversed(state))
    files = {f"model-0000{n + 1}-of-00003.safetensors": names[n::3] for n in range(3)}
    for file, inside in files.items():
        save_file({name: state[name] for name in inside}, shards / file)
    weight_map = {name: file for file, inside in files.items() for name in inside}
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save(model.state_dict(), pickle / "pytorch_model.bin")
    wanted = rows_of(open_checkpoint(folder))
    assert len(wanted) == 2 * (4 + 3) + 2 and all(row.fit_status == "ok" for row in wanted)
    for source in (open_checkpoint(shards), open_checkpoint(pickle), module_source(model)):
        assert rows_of(source) == wanted


def test_the_same_weights_in_gguf_give_the_same_rows(tiny: Tiny, tmp_path: Path) -> None:
    """A file in float32 under llama.cpp's names; and one in 8-bit blocks, which the worker analyses as it stands."""
    gguf = pytest.importorskip("gguf")
    model, folder = tiny("llama")
    state = model.state_dict()
    names = {"blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight", "output.weight": "lm_head.weight"}

    def write(path: Path, kind: Any) -> None:
        writer = gguf.GGUFWriter(path, "llama")
        for name, original in names.items():
            writer.add_tensor(name, gguf.quants.quantize(state[original].numpy(), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write(tmp_path / "m.gguf", gguf.GGMLQuantizationType.F32)
    wanted = {row.longname: row for row in rows_of(open_checkpoint(folder))}
    for row in rows_of(open_checkpoint(tmp_path / "m.gguf")):
        original = names[f"{row.longname}.weight"].removesuffix(".weight")
        assert replace(row, longname=original) == wanted[original]
    write(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    command = ["--model-id", str(tmp_path / "m.gguf"), "--output-dir", str(tmp_path / "out"), "--device-map", "cpu"]
    assert main(command) == 0
    with next((tmp_path / "out" / "stats").glob("*.csv")).open(newline="") as text:
        rows = {row["longname"]: row for row in csv.DictReader(text)}
    assert float(rows["output"]["norm"]) == pytest.approx(wanted["lm_head"].norm, rel=1e-3)
    assert float(rows["output"]["norm"]) != wanted["lm_head"].norm


def test_layers_of_nan_and_of_zeros_fail_with_a_reason_through_the_worker(tmp_path: Path) -> None:
    """Such layers were 1.4 % of the published rows, saved as alpha = -1; the sound ones beside them count."""
    good = torch.randn(30, 20, generator=torch.Generator().manual_seed(1))
    spoilt = good.clone()
    spoilt[3, 4], spoilt[5, 6] = float("nan"), float("inf")
    tensors = {"a.weight": good, "b.weight": spoilt, "c.weight": torch.zeros(30, 20), "d.weight": torch.ones(4, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert main(["--model-id", str(tmp_path), "--output-dir", str(tmp_path / "out"), "--device-map", "cpu"]) == 0
    (file,) = (tmp_path / "out" / "stats").glob("*.csv")
    with file.open(newline="") as text:
        rows = {row["longname"]: row for row in csv.DictReader(text)}
    assert rows["a"]["fit_status"] == "ok" and float(rows["a"]["alpha"]) > 1
    assert rows["b"]["fit_status"] == "2 of 600 weights are NaN or infinite"
    assert rows["c"]["fit_status"] == "all weights are zero"
    assert "too small" in rows["d"]["fit_status"]
    assert all(rows[name][figure] == "" for name in "bcd" for figure in ("alpha", "norm", "D", "entropy"))
    # Nothing but such layers is a failed model, without a file that could be taken for a result.
    save_file({"b.weight": spoilt, "c.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    assert main(["--model-id", str(tmp_path), "--output-dir", str(tmp_path / "out"), "--device-map", "cpu"]) == 65
    assert not file.exists()
