"""Cards out of words, and of what is wrong with words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.models.place.gpus import KINDS, find_kind, gpus_option, parse_gpus

GIB = 1 << 30


def test_a_gigabyte_is_two_to_the_thirty() -> None:
    cards = parse_gpus("4x40GB")
    assert [card.label for card in cards] == ["0", "1", "2", "3"]
    assert {(card.name, card.total, card.free, card.capability) for card in cards} == {
        ("40GB", 40 * GIB, 40 * GIB, None)
    }


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("2x80GB+4x24GB", ["80GB"] * 2 + ["24GB"] * 4),
        ("40GB", ["40GB"]),
        ("4xA100-40", ["A100-40"] * 4),
        ("4x A100-40GB", ["A100-40"] * 4),
        ("a100-sxm4-80gb", ["A100-80"]),
        ("NVIDIA A100-SXM4-40GB", ["A100-40"]),
        ("NVIDIA H100 80GB HBM3", ["H100"]),
        ("8xH100", ["H100"] * 8),
        ("NVIDIA H200", ["H200"]),
        ("1xRTX4090", ["RTX4090"]),
        ("2x NVIDIA GeForce RTX 4090", ["RTX4090"] * 2),
        ("NVIDIA RTX 6000 Ada Generation", ["RTX6000-Ada"]),
        ("NVIDIA RTX A6000", ["RTX-A6000"]),
        ("Tesla T4", ["T4"]),
        ("NVIDIA GH200 480GB", ["GH200"]),
        ("NVIDIA A100 80GB PCIe", ["A100-80"]),
        ("NVIDIA H100 NVL", ["H100-NVL"]),
        ("NVIDIA L40S", ["L40S"]),
        ("Tesla V100-SXM2-32GB", ["V100-32"]),
        ("24GiB", ["24GB"]),
        ("1.5GB", ["1536MB"]),
    ],
)
def test_words_that_people_write(words: str, names: list[str]) -> None:
    assert [card.name for card in parse_gpus(words)] == names


def test_a_kind_has_what_cuda_gives_out_and_its_capability() -> None:
    (card,) = parse_gpus("A100-40")
    assert 39 * GIB < card.total < 40 * GIB
    assert card.capability == (8, 0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("4x40", "write 4x40GB"),
        ("40", "write 1x40GB"),
        ("2x4090", "write 2xRTX4090"),
        ("0x40GB", "at least 1"),
        ("-1x40GB", "at least 1"),
        ("-4", "describes no GPUs"),
        ("", "describes no GPUs"),
        ("4x40GB+", "describes no GPUs"),
        ("99999x40GB", "at most 1024"),
        ("600x40GB+600x40GB", "at most 1024"),
        ("4x0GB", "is not a size"),
        ("4x9000000GB", "no GPU has"),
        ("4xA100", "A100-40 or A100-80"),
        ("4xRTX4009", "RTX4090"),
        ("4xpotato", "give its memory"),
        ("4x", "no kind of GPU"),
        ("4x40 GB of memory", "no kind of GPU"),
        ("x\x1b[31m", "no kind of GPU"),
    ],
)
def test_what_is_wrong_is_told_with_what_to_write(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as problem:
        parse_gpus(words)
    assert str(problem.value).isprintable()


@given(st.text(max_size=30))
def test_no_words_do_harm(words: str) -> None:
    try:
        cards = parse_gpus(words)
    except UsageError:
        return
    assert cards


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([*(kind.name for kind in KINDS), "40GB", "7MB"]))))
def test_cards_become_words_that_mean_the_same_cards(groups: list[tuple[int, str]]) -> None:
    cards = parse_gpus("+".join(f"{count}x{name}" for count, name in groups) or "1x2GB")
    assert parse_gpus(gpus_option(cards)) == cards


def test_every_kind_is_found_by_its_own_name_once() -> None:
    assert [find_kind(kind.name) for kind in KINDS] == list(KINDS)
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Tesla T4 16GB", "T4"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100 94GB", "H100-NVL"),
        ("NVIDIA GeForce RTX 3060 12GB", "RTX3060"),
        ("A6000 48GB", "RTX-A6000"),
        ("MI300X 192GB", "MI300X"),
        ("H100 40GB", None),
        ("T4 12GB", None),
        ("T4 24GB", None),
        ("A100", None),
    ],
)
def test_a_board_is_found_with_the_memory_that_its_maker_names_and_no_other(name: str, kind: str | None) -> None:
    found = find_kind(name)
    assert (None if found is None else found.name) == kind
