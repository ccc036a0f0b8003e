"""Runs of blocks and sizes as people read them."""

from __future__ import annotations

from tests.models.memory.toy import gpus_of, toy

from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.place.gpus import gpus_with_memory
from gpuherd.models.place.result import format_blocks
from gpuherd.models.place.split import ties_together


def test_blocks() -> None:
    architecture = toy()
    assert format_blocks(architecture, 0, 6) == "embedding, layers 0-3, head"
    assert format_blocks(architecture, 2, 3) == "layer 1"
    assert format_blocks(architecture, 4, 6) == "layer 3, head"
    assert format_blocks(architecture, 3, 3) == "nothing"


def test_what_stands_twice_is_told_once() -> None:
    together = ties_together(read_architecture("llama-3.2-1b"))
    assert together is not None
    assert format_blocks(together, 0, 5) == "embedding, head, layers 0-1"


def test_cards() -> None:
    assert gpus_with_memory(gpus_of(40_960)) == "1 GPU of 40.0 GiB"
    assert gpus_with_memory(gpus_of(24_576, 40_960)) == "2 GPUs of 24.0 to 40.0 GiB"
    assert gpus_with_memory(gpus_of(24_576, 24_580)) == "2 GPUs of 24.0 GiB"
