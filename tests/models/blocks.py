"""What every source of tensors that reads blocks must hold to."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_blocks(source: Any, name: str, whole: Any, tolerance: float) -> None:
    """Blocks of rows and columns, also of rows that lie in several experts, are those of the whole."""
    assert source.has_blocks(name)
    rows = whole.reshape(-1, whole.shape[-1])
    height, width = rows.shape
    for (top, bottom), (left, right) in (
        ((0, height), (width // 3, width)),
        ((height // 4, 1 + 2 * height // 3), (0, width)),
        ((height // 4, 1 + 2 * height // 3), (width // 3, width // 2)),
    ):
        block = source.read_block(name, (top, bottom), (left, right))
        assert np.allclose(block, rows[top:bottom, left:right], rtol=1e-6, atol=tolerance), name
