"""The coverage table: every tensor once, the right status, and a sum that is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.esd.coverage_files import read_coverage

from gpuherd.errors import BadModel, UsageError
from gpuherd.esd.config import FitSettings
from gpuherd.esd.pipeline import analyse_matrices
from gpuherd.esd.schema import LayerRow
from gpuherd.esd.selection import (
    TensorCoverage,
    coverage,
    coverage_text,
    selected,
    stored_share,
    totals,
    without_unchanged,
)
from gpuherd.models.subject import Subject, count_analysed, count_weights, examine, open_subject

Build = Callable[[dict[str, torch.Tensor]], Path]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A model of these tensors, GPT-2 by its config."""

    def make(tensors: dict[str, torch.Tensor]) -> Path:
        save_file(tensors, tmp_path / "model.safetensors")
        config = {"model_type": "gpt2", "tie_word_embeddings": True}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def mixed() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    c_attn = torch.randn(16, 48)
    c_attn[:, 16:32] = 0
    return {
        "wte.weight": torch.randn(50, 16),
        "lm_head.weight": torch.randn(50, 16),
        "h.0.attn.c_attn.weight": c_attn,
        "h.0.attn.c_attn.bias": torch.randn(48),
        "h.0.attn.mask": torch.ones(4, 4, dtype=torch.bool),
        "h.0.mlp.c_fc.weight": torch.randn(16, 64),
        "h.0.mlp.c_proj.weight": torch.full((64, 16), torch.nan),
        "h.0.conv.weight": torch.randn(6, 5, 3),
        "scale": torch.tensor(2.0),
        "odd": torch.randn(3, 3),
        "empty.weight": torch.zeros(0, 4),
    }


def analysed(folder: Path, layers: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> tuple[Subject, list[Any]]:
    subject = open_subject(folder, None)
    found = selected(subject.matrices, subject.source.tensors, layers, exclude)
    rows = analyse_matrices(found, FitSettings(), ("cpu",), parallel=False, on_progress=lambda _: None)
    return subject, coverage(subject.source.tensors, found, rows)


def test_every_tensor_has_a_line(build: Build) -> None:
    tensors = mixed()
    subject, lines = analysed(build(tensors))
    assert [line.tensor for line in lines] == list(subject.source.tensors)
    by_name: dict[str, TensorCoverage] = {line.tensor: line for line in lines}
    assert by_name.keys() == tensors.keys()
    told = {name: (line.status, line.matrices, line.reason) for name, line in by_name.items()}
    assert told["h.0.mlp.c_fc.weight"] == ("analysed", 1, None)
    assert told["h.0.conv.weight"] == ("analysed", 1, None)
    status, count, reason = told["h.0.attn.c_attn.weight"]
    assert (status, count) == ("analysed", 3)
    assert reason == "1 of 3 matrices without a fit; h.0.attn.c_attn_k: all weights are zero"
    assert told["h.0.mlp.c_proj.weight"] == ("failed", 1, "1024 of 1024 weights are NaN or infinite")
    assert told["wte.weight"][0] == "skipped" and "--embeddings" in str(told["wte.weight"][2])
    assert told["lm_head.weight"] == ("skipped", 1, "tied to wte.weight, counted there")
    assert told["h.0.attn.c_attn.bias"] == ("skipped", 0, "one axis: no matrix")
    assert told["scale"] == ("skipped", 0, "a single number")
    assert told["h.0.attn.mask"] == ("skipped", 1, "stored as BOOL, no weights")
    assert told["empty.weight"][2] == "empty"
    assert told["odd"][0] == "skipped"
    shapes = {name: (line.shape, line.dtype, line.params) for name, line in by_name.items()}
    assert shapes["h.0.conv.weight"] == ("6x5x3", "F32", 90)
    assert shapes["scale"] == ("1", "F32", 1)
    assert by_name["h.0.attn.c_attn.weight"].params_analysed == 2 * 16 * 16


def test_totals_count_each_weight_once(build: Build) -> None:
    subject, lines = analysed(build(mixed()))
    sums = totals(lines)
    weights = 50 * 16 + 16 * 48 + 48 + 2 * 16 * 64 + 90 + 1 + 9
    assert (sums.tensors, sums.analysed, sums.failed, sums.params) == (11, 3, 1, weights)
    assert sums.params_analysed == 2 * 16 * 16 + 16 * 64 + 90
    assert sums.share == pytest.approx(sums.params_analysed / weights)
    assert sums.sentence().startswith("3 of 11 tensors analysed (7 skipped, 1 failed), 43.")
    assert count_weights(subject.source.tensors, subject.matrices) == weights
    assert count_analysed(subject.matrices) == 16 * 48 + 2 * 16 * 64 + 90
    facts = examine(str(subject.source.path))  # type: ignore[attr-defined]
    assert (facts.params, facts.params_analysed, facts.num_matrices) == (weights, 16 * 48 + 2 * 16 * 64 + 90, 6)
    assert totals([]).share == 0.0


def test_buffers_are_listed_and_are_no_weights(build: Build) -> None:
    """Those of float numbers too: GPT-2's own file has 12 million in its masks, a tenth of the model."""
    weight = {"h.0.mlp.c_fc.weight": torch.randn(16, 64), "h.0.attn.out.bias": torch.randn(1, 1, 2, 3)}
    buffers = {
        "h.0.attn.bias": torch.ones(1, 1, 32, 32),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
        "h.0.bn.running_mean": torch.randn(16),
        "h.0.bn.running_var": torch.rand(16),
        "h.0.rotary_emb.inv_freq": torch.rand(8),
        "fc.weight_mask": torch.ones(16, 64),
    }
    subject, lines = analysed(build(weight | buffers))
    told = {line.tensor: (line.status, line.reason) for line in lines}
    for name in buffers:
        status, reason = told[name]
        assert status == "skipped" and str(reason).startswith("a buffer, no weight: "), name
    assert told["h.0.attn.bias"][1] == "a buffer, no weight: a mask"
    assert told["h.0.attn.out.bias"] == ("skipped", "a bias")
    assert totals(lines).params == count_weights(subject.source.tensors, subject.matrices) == 16 * 64 + 6
    assert totals(lines).share == 1024 / 1030


def test_patterns_are_reasons(build: Build) -> None:
    _, lines = analysed(build(mixed()), ("*.c_attn*",), ("*_k",))
    told = {line.tensor: (line.status, line.reason) for line in lines}
    assert told["h.0.mlp.c_fc.weight"] == ("skipped", "not selected by --layers")
    assert told["h.0.attn.c_attn.weight"][0] == "analysed"
    assert "left out by --exclude '*_k'" in str(told["h.0.attn.c_attn.weight"][1])
    # What failed is told before what was left out.
    _, lines = analysed(build(mixed()), ("*.c_fc", "*c_attn_[qk]"), ("*_q",))
    told = {line.tensor: (line.status, line.reason) for line in lines}
    reason = "3 of 3 matrices without a fit; h.0.attn.c_attn_k: all weights are zero"
    assert told["h.0.attn.c_attn.weight"] == ("failed", reason)
    _, lines = analysed(build(mixed()), exclude=("h.0.attn.c_attn.weight",))
    told = {line.tensor: (line.status, line.reason) for line in lines}
    assert told["h.0.attn.c_attn.weight"] == ("skipped", "left out by --exclude 'h.0.attn.c_attn.weight'")


def test_a_table_reads_back(build: Build, tmp_path: Path) -> None:
    hostile = {"=cmd|' /C calc'!A0.weight": torch.randn(5, 4), 'a\x1b[31m\r\n,".weight': torch.randn(3)}
    _, lines = analysed(build(mixed() | hostile))
    file = tmp_path / "c.csv"
    file.write_text(coverage_text(lines), encoding="utf-8")
    again = read_coverage(file)
    assert len(again) == len(lines)
    for new, old in zip(again, lines, strict=True):
        if old.tensor.isprintable():
            assert new == old
    assert "\x1b" not in file.read_text() and "\n=cmd" not in file.read_text()
    assert totals(again) == totals(lines)
    assert stored_share(file) == totals(lines).share


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "tensor,shape,dtype,params,matrices,params_analysed,status,reason\n"
                                  "a,1,F32,1,0,0,lost,\n"])  # fmt: skip
def test_another_table_has_no_share(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.csv").write_text(text)
    assert stored_share(tmp_path / "x.csv") is None
    assert "x.csv can't be read" in caplog.text


def test_an_unchanged_layer_is_no_failure() -> None:
    rows = [LayerRow(longname="a", M=4, N=4, params=16, fit_status="all weights are zero"),
            LayerRow(longname="b", M=4, N=4, params=16, alpha=3.0, fit_status="ok")]  # fmt: skip
    assert [row.fit_status for row in without_unchanged(rows)] == ["not analysed: the same as in the base", "ok"]


def test_nothing_left_to_analyse_is_refused_beforehand(build: Build) -> None:
    from functools import partial

    folder = build(mixed())
    choose = partial(selected, layers=("wte.weight",), exclude=())
    with pytest.raises(BadModel, match="no weight matrix to analyse"):
        examine(str(folder), choose=choose)
    with pytest.raises(BadModel, match="'nothing' matches no tensor"):
        examine(str(folder), choose=partial(selected, layers=("nothing",), exclude=()))
    assert not issubclass(BadModel, UsageError)
