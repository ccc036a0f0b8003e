"""Reading rows that lie apart in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.open import open_checkpoint
from gpuherd.models.checkpoints.stored import PANEL_BYTES

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gap", [1, 2048, 1 << 15])
def test_columns_are_those_of_the_library(tmp_path: Path, dtype: torch.dtype, gap: int) -> None:
    width = 5 + gap // dtype.itemsize + 1
    weights = torch.randn(37, width, generator=torch.Generator().manual_seed(gap)).to(dtype)
    save_file({"w.weight": weights}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for columns in ((0, 5), (width - 5, width), (2, width)):  # the last row of the second ends with the file
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            wanted = file.get_slice("w.weight")[3:31, columns[0] : columns[1]]
        found = checkpoint.read_block("w.weight", (3, 31), columns)
        assert np.array_equal(found, wanted.to(torch.float64 if dtype is torch.float64 else torch.float32).numpy())
        if checkpoint.half_of("w.weight") is not None:
            codes = np.zeros(found.shape, np.uint16)
            checkpoint.read_codes("w.weight", (3, 31), columns, codes)
            assert np.array_equal(codes, wanted.contiguous().view(torch.uint16).numpy())


def test_rows_that_take_several_panels(tmp_path: Path) -> None:
    weights = torch.arange(3 * PANEL_BYTES // 1024, dtype=torch.float32).repeat_interleave(256).view(-1, 256)
    assert weights.numel() * 4 == 3 * PANEL_BYTES
    save_file({"w.weight": weights}, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path).read_block("w.weight", (1, len(weights)), (200, 256))
    assert np.array_equal(found, weights[1:, 200:].numpy())


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w.weight": torch.ones(64, 64)}, file)
    checkpoint = open_checkpoint(tmp_path)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 4)
    with pytest.raises(BadModel, match="was changed"):
        checkpoint.read_block("w.weight", (0, 64), (0, 8))
