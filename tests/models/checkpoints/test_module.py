"""A module in memory has the matrices of the same model saved, number by number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.module import module_source
from gpuherd.models.checkpoints.open import open_checkpoint
from gpuherd.models.tensors.matrices import WeightMatrix, matrices
from gpuherd.models.tensors.source import BlockSource, TensorSource

Tiny = Callable[..., tuple[Any, Path]]


def listed(source: TensorSource) -> dict[str, WeightMatrix]:
    return {m.longname: m for m in matrices(source, embeddings=True) if m.skip is None}


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi3", "bloom"])
def test_the_same_matrices_as_saved(tiny: Tiny, model_type: str) -> None:
    model, folder = tiny(model_type)
    source = module_source(model)
    assert isinstance(source, BlockSource) and source.config["model_type"] == model_type
    ours, saved = listed(source), listed(open_checkpoint(folder))
    # A file may leave out the leading part of the names.
    assert [name.split(".")[-2:] for name in ours] == [name.split(".")[-2:] for name in saved]
    for one, other in zip(ours.values(), saved.values(), strict=True):
        for mine, theirs in zip(one.slices(), other.slices(), strict=True):
            assert np.array_equal(mine, theirs)
        assert np.array_equal(
            np.concatenate(list(one.slabs(7)), axis=int(one.shape[0] < one.shape[1])), one.slices()[0]
        )


def test_fused_experts_of_a_module_equal_the_files_separate_ones(tiny: Tiny) -> None:
    """transformers fuses Mixtral's experts on loading and writes them apart."""
    model, folder = tiny("mixtral")
    ours, saved = listed(module_source(model)), listed(open_checkpoint(folder))
    assert len(ours) == len(saved)
    for layer in range(2):
        for expert in range(3):
            for name, old in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
                mine = ours[f"model.layers.{layer}.mlp.experts.{expert}.{name}"].slices()[0]
                theirs = saved[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{old}"].slices()[0]
                assert np.array_equal(mine, theirs)


def test_half_precision_comes_as_float32_and_nothing_can_be_written() -> None:
    layer = torch.nn.Linear(6, 4, bias=False)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        (matrix,) = listed(module_source(layer.to(dtype))).values()
        (array,) = matrix.slices()
        assert array.dtype == (np.float64 if dtype == torch.float64 else np.float32)
        assert np.array_equal(array, layer.weight.detach().double().numpy())
        if dtype in (torch.float32, torch.float64):
            assert not array.flags.writeable and np.shares_memory(array, layer.weight.detach().numpy())


def test_tied_weights_count_once() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = torch.nn.Embedding(9, 4)
            self.lm_head = torch.nn.Linear(4, 9, bias=False)
            self.lm_head.weight = self.wte.weight

    found = {m.longname: m.skip for m in matrices(module_source(Tied()), embeddings=True)}
    assert found == {"wte": None, "lm_head": "tied to wte.weight, counted there"}


def test_convolutions_and_views() -> None:
    conv = torch.nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    (matrix,) = listed(module_source(conv)).values()
    assert np.array_equal(matrix.slices()[3], conv.weight.detach()[:, :, 1, 1].numpy())


class Codes(torch.nn.Module):
    def __init__(self, name: str, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer(name, value)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (torch.nn.ReLU(), "a ReLU without weights"),
        (torch.nn.Linear(3, 3, device="meta"), "meta device"),
        (Codes("weight", torch.ones(4, 4, dtype=torch.int8)), "quantised"),
        (Codes("qweight", torch.ones(4, 4, dtype=torch.int32)), r"quantised \(GPTQ or AWQ\)"),
        (Codes("weight", torch.ones(4, 4).to_sparse()), "only dense tensors"),
    ],
)
def test_refused(module: torch.nn.Module, reason: str) -> None:
    with pytest.raises(BadModel, match=reason):
        module_source(module)


def test_a_subclass_of_tensor_is_refused() -> None:
    class Packed(torch.Tensor):
        pass

    layer = torch.nn.Linear(3, 3)
    layer.weight = torch.nn.Parameter(torch.ones(3, 3).as_subclass(Packed))
    with pytest.raises(BadModel, match="is a Packed"):
        module_source(layer)
