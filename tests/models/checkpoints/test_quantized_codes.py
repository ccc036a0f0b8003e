"""Numbers of 16 bits as they are stored: the same as the floats that reading gives, for every way that they can lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.open import open_checkpoint
from gpuherd.models.tensors.matrices import WeightMatrix, matrices
from gpuherd.models.tensors.source import Codes

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16}


def widened(matrix: WeightMatrix, most: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """All slabs of the stored numbers, put together and widened by torch."""
    assert matrix.half is not None
    rooms: list[Codes] = []

    def room(shape: tuple[int, int]) -> Codes:
        rooms.append(np.full(shape, 0xFFFF, np.uint16))
        return rooms[-1]

    slabs = list(matrix.half.stream(most, room))
    assert [id(slab) for slab in slabs] == [id(made) for made in rooms]
    assert all(max(slab.shape) <= max(most, min(matrix.shape)) for slab in slabs)
    whole = np.concatenate(slabs, axis=0 if matrix.shape[0] >= matrix.shape[1] else 1)
    return torch.from_numpy(whole.view(np.int16)).view(TORCH[matrix.half.dtype]).float().numpy()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {
        "layers.0.tall.weight": torch.randn(90, 40).bfloat16(),
        "layers.0.wide.weight": torch.randn(40, 90).bfloat16(),
        "layers.0.half.weight": torch.randn(50, 50).half(),
        "layers.0.float.weight": torch.randn(30, 30),
        "h.0.attn.c_attn.weight": torch.randn(32, 96).bfloat16(),
        "layers.1.mlp.experts.down_proj": torch.randn(3, 20, 30).bfloat16(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 32, "n_head": 4}')
    return tmp_path


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_stored_numbers_are_those_that_reading_gives(model: Path, most: int) -> None:
    found = [matrix for matrix in matrices(open_checkpoint(model)) if matrix.skip is None]
    with_half = [matrix for matrix in found if matrix.half is not None]
    assert {matrix.longname for matrix in found} - {matrix.longname for matrix in with_half} == {"layers.0.float"}
    assert len(with_half) == 9
    for matrix in with_half:
        (expected,) = matrix.slices()
        assert (widened(matrix, most) == expected).all(), matrix.longname


def test_a_view_of_a_torch_file_is_read_where_its_rows_lie_in_one_piece(tmp_path: Path) -> None:
    base = torch.randn(40, 60).bfloat16()
    torch.save({"part.weight": base[:, 10:40], "turned.weight": base.T}, tmp_path / "pytorch_model.bin")
    found = {matrix.longname: matrix for matrix in matrices(open_checkpoint(tmp_path / "pytorch_model.bin"))}
    assert found["turned"].half is None
    assert (widened(found["part"], 9) == base[:, 10:40].float().numpy()).all()


def test_a_file_that_changed_is_not_read(model: Path) -> None:
    (matrix,) = (each for each in matrices(open_checkpoint(model)) if each.longname == "layers.0.tall")
    save_file({"layers.0.tall.weight": torch.zeros(90, 40).bfloat16()}, model / "model.safetensors")
    with pytest.raises(BadModel, match=r"model\.safetensors was changed while it was being read"):
        widened(matrix, 50)


def test_a_block_that_is_not_there_is_refused(model: Path) -> None:
    source = open_checkpoint(model)
    assert source.half_of("layers.0.float.weight") is None
    with pytest.raises(ValueError, match="not stored in 16 bits"):
        source.read_codes("layers.0.float.weight", (0, 1), (0, 1), np.empty((1, 1), np.uint16))
    with pytest.raises(ValueError, match="no block"):
        source.read_codes("layers.0.tall.weight", (0, 91), (0, 1), np.empty((91, 1), np.uint16))
