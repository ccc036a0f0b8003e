"""Analyses from Python: a model on disk, a module in memory and a matrix give the rows of a worker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from gpuherd.errors import BadModel, MissingModel, UsageError
from gpuherd.esd import FitSettings, analyse_layer, analyze_matrix, analyze_model
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.views import read_table

MakeModel = Callable[..., Path]


class Net(torch.nn.Module):
    """A linear layer, a convolution and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = torch.nn.Embedding(40, 16)
        self.up = torch.nn.Linear(16, 24)
        self.conv = torch.nn.Conv2d(6, 8, 3)


def test_a_model_gives_the_rows_of_its_stats_file(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("a")
    told: list[tuple[int, int]] = []
    table = analyze_model(model, fix_fingers="DKS", progress=lambda done, of: told.append((done, of)))
    words = ["--model-id", str(model), "--output-dir", str(tmp_path / "out"), "--fix-fingers", "DKS"]
    subprocess.run([sys.executable, "-m", "gpuherd.esd.worker", *words], check=True, capture_output=True, timeout=60)
    stats = read_table(ESDDirectory(tmp_path / "out").stats_file(str(model)))
    assert list(table.columns) == list(stats[0])
    for column in ("longname", "fit_status"):
        assert list(table[column]) == [row[column] for row in stats]
    for column in ("alpha", "D", "xmin", "norm", "num_evals", "matrix_rank"):
        wanted = [float(row[column]) if row[column] else None for row in stats]
        assert [None if pd.isna(value) else float(value) for value in table[column]] == wanted, column
    assert told[-1] == (len(stats), len(stats))
    assert {name: str(table[name].dtype) for name in ("alpha", "num_evals", "embeddings")} == {
        "alpha": "float64",
        "num_evals": "Int64",
        "embeddings": "bool",
    }
    assert set(table["fix_fingers"]) == {"DKS"}


def test_a_module_and_its_checkpoint_are_the_same(tmp_path: Path) -> None:
    net = Net()
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    in_memory = analyze_model(net, embeddings=True, save_eigs=True)
    on_disk = analyze_model(tmp_path, embeddings=True, save_eigs=True)
    assert list(in_memory["longname"]) == ["conv", "embed_tokens", "up"]
    ours = [name for name in in_memory.columns if name not in ("model_id", "eigs")]
    pd.testing.assert_frame_equal(in_memory[ours], on_disk[ours])
    for one, other in zip(in_memory["eigs"], on_disk["eigs"], strict=True):
        assert one.tobytes() == other.tobytes()
    assert list(in_memory["model_id"]) == ["Net"] * 3
    assert [len(evals) for evals in in_memory["eigs"]] == [6 * 9, 16, 16]


def test_options_choose_what_is_analysed() -> None:
    table = analyze_model(Net(), layers=["up"], evals_thresh=0.5)
    status = dict(zip(table["longname"], table["fit_status"], strict=True))
    assert status["conv"] == "not analysed: not selected by --layers"
    assert status["up"] != status["conv"]
    assert set(table["evals_thresh"]) == {0.5}


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        (Net(), {"fix_fingers": "mid"}, UsageError),
        (Net(), {"layers": ["nothing*"]}, BadModel),
        (Net(), {"base": "org/b"}, BadModel),
        (Net(), {"spectra_of": "ba"}, BadModel),
        ("./absent", {}, MissingModel),
        (3, {}, BadModel),
        (Net(), {"nonsense": 1}, TypeError),
    ],
)
def test_what_is_refused(model: Any, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        analyze_model(model, **options)


def test_an_adapter_in_memory_is_to_be_merged_first() -> None:
    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = torch.nn.ModuleDict({"lora_A": torch.nn.ModuleDict({"default": torch.nn.Linear(8, 2)})})

    with pytest.raises(BadModel, match="merge_and_unload"):
        analyze_model(Adapted())


def test_an_embedding_with_an_unmerged_adapter_is_refused_too() -> None:
    net = Net()
    factors = torch.nn.ParameterDict({"default": torch.randn(2, 40)})
    net.embed_tokens.lora_embedding_A = factors
    with pytest.raises(BadModel, match=r"embed_tokens\.lora_embedding_A\.default.*merge_and_unload"):
        analyze_model(net)


def test_an_adapter_on_disk(make_model: MakeModel, make_adapter: MakeModel) -> None:
    base = make_model("base")
    adapter = make_adapter("lora", base=base)
    merged = analyze_model(adapter)
    assert set(merged["source_model"]) == {str(base)}
    # As in the worker, what a whole model comes from is told and not looked for.
    assert set(analyze_model(base, base="/nowhere/older")["source_model"]) == {"/nowhere/older"}
    moved = make_adapter("moved", base="org/gone")
    pd.testing.assert_series_equal(analyze_model(moved, base=base)["alpha"], merged["alpha"])


@pytest.mark.parametrize("kind", ["numpy", "float16", "torch", "bfloat16", "list", "int"])
def test_a_matrix_of_any_kind(kind: str) -> None:
    W = np.random.default_rng(0).integers(-50, 50, (30, 20)).astype(np.float32)
    given: Any = {
        "numpy": W,
        "float16": W.astype(np.float16),
        "torch": torch.from_numpy(W).requires_grad_(),
        "bfloat16": torch.from_numpy(W).bfloat16(),
        "list": W.tolist(),
        "int": W.astype(np.int16),
    }[kind]
    row = analyze_matrix(given, name="w", fix_fingers="DKS")
    wanted = analyse_layer("w", [W], FitSettings(fix_fingers="DKS"))
    assert (row.longname, row.M, row.N, row.params) == ("w", 30, 20, 600)
    assert row.alpha == pytest.approx(wanted.alpha, rel=1e-12)
    assert row.norm == pytest.approx(wanted.norm, rel=1e-14)


def test_without_pandas() -> None:
    code = "import sys; sys.modules['pandas'] = None\nfrom gpuherd.esd import analyze_model\nanalyze_model('org/a')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingExtra: pandas is not installed; pip install 'gpuherd[esd,pandas]'" in done.stderr


def test_a_convolution() -> None:
    W = np.random.default_rng(0).standard_normal((8, 6, 3, 3))
    row = analyze_matrix(W)
    assert (row.M, row.N, row.params, row.num_evals) == (8, 6, W.size, 6 * 9)
    assert row.norm == pytest.approx((W**2).sum() / 2)


@pytest.mark.parametrize("bad", [np.ones(3), np.ones((1,) * 6), np.ones((2, 2), complex), [["a"]], np.float64(3)])
def test_what_is_no_matrix(bad: Any) -> None:
    with pytest.raises(ValueError, match="real numbers on two to five axes"):
        analyze_matrix(bad)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (torch.eye(3).to_sparse(), "no array of numbers: .*Sparse"),
        (np.ma.masked_greater(np.eye(3), 0.5), "no mask"),
    ],
)
def test_what_would_be_read_otherwise_than_meant_is_refused(bad: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        analyze_matrix(bad)


def test_a_matrix_without_figures_says_why() -> None:
    assert analyze_matrix(np.zeros((5, 4))).fit_status == "all weights are zero"
    assert "NaN" in analyze_matrix(np.full((5, 4), np.nan)).fit_status
