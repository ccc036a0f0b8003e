"""Runs of blocks and sizes as people read them."""

from __future__ import annotations

from tests.models.plan.toy import cards_of, toy

from gpuherd.models.plan.cutting import ties_together
from gpuherd.models.plan.reading import read_architecture
from gpuherd.models.plan.wording import blocks_in_words, cards_in_words


def test_blocks() -> None:
    architecture = toy()
    assert blocks_in_words(architecture, 0, 6) == "embedding, layers 0-3, head"
    assert blocks_in_words(architecture, 2, 3) == "layer 1"
    assert blocks_in_words(architecture, 4, 6) == "layer 3, head"
    assert blocks_in_words(architecture, 3, 3) == "nothing"


def test_what_stands_twice_is_told_once() -> None:
    together = ties_together(read_architecture("llama-3.2-1b"))
    assert together is not None
    assert blocks_in_words(together, 0, 5) == "embedding, head, layers 0-1"


def test_cards() -> None:
    assert cards_in_words(cards_of(40_960)) == "1 GPU of 40.0 GiB"
    assert cards_in_words(cards_of(24_576, 40_960)) == "2 GPUs of 24.0 to 40.0 GiB"
    assert cards_in_words(cards_of(24_576, 24_580)) == "2 GPUs of 24.0 GiB"
