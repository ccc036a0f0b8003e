"""Bars, wrapped words and commands keep within their window, and lose nothing."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.models.place.page import (
    FREE,
    OTHERS,
    OVER,
    BarPart,
    MemoryBar,
    Window,
    command,
    draw,
    legend,
    text_of,
    wrapped,
)

ONE, TWO = BarPart("one", "weights", "█", "#"), BarPart("two", "cache", "▒", "K")
WINDOW = Window(60)


def bar(*sizes: int, free: int, total: int | None = None, label: str = "GPU 0", holds: str = "layers 0-7") -> MemoryBar:
    parts = tuple(zip((ONE, TWO), sizes, strict=False))
    return MemoryBar(label, parts, free, total or free, f"{sum(sizes)} of {free}", holds)


def signs(each: MemoryBar, scale: int, window: Window = WINDOW) -> str:
    """What stands between the bars' ends."""
    text = "\n".join(text_of(line) for line in draw([each], scale, window))
    return text[text.index("|") + 1 : text.rindex("|")]


def test_a_bar_is_to_scale() -> None:
    told = signs(bar(20, 10, free=40), 40, Window(80))
    assert told == "".join(sorted(told, key="█▒·".index))
    assert [told.count(sign) / len(told) for sign in "█▒·"] == pytest.approx([0.5, 0.25, 0.25], abs=1 / len(told))


def test_what_does_not_fit_is_drawn_beyond_what_does() -> None:
    told = signs(bar(30, 10, free=20), 40)
    assert told == "".join(sorted(told, key="█!".index))
    assert told.count("!") / len(told) == pytest.approx(0.5, abs=1 / len(told))


def test_what_others_use_is_shown() -> None:
    told = signs(bar(10, 0, free=20, total=40), 40)
    assert told == "".join(sorted(told, key="█·x".index))
    assert [told.count(sign) / len(told) for sign in "█·x"] == pytest.approx([0.25, 0.25, 0.5], abs=1 / len(told))


def test_the_legend_names_what_is_there_and_nothing_else() -> None:
    assert text_of(legend([bar(5, 0, free=40)], WINDOW)[0]) == "█ one  · left"
    assert text_of(legend([bar(5, 50, free=40, total=60)], Window(60, unicode=False))[0]) == (
        "# one  K two  ! does not fit  x used by others"
    )
    assert {part.name for part in (FREE, OTHERS, OVER)} == {"left", "used by others", "does not fit"}


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(1, 150)), min_size=1, max_size=5),
    st.integers(40, 200),
    st.text("abc ,-", min_size=1, max_size=80),
    st.booleans(),
)
def test_bars_keep_within_the_window(sizes: list[tuple[int, int, int]], width: int, holds: str, unicode: bool) -> None:
    bars = [
        bar(one, two, free=free, total=free + 9, label=f"GPU {number}", holds=holds.strip() or "-")
        for number, (one, two, free) in enumerate(sizes)
    ]
    scale = max(max(each.total, sum(size for _, size in each.parts)) for each in bars)
    lines = [text_of(line) for line in [*draw(bars, scale, Window(width, unicode)), *legend(bars, Window(width))]]
    assert max(map(len, lines)) <= width
    assert sum(line.count("|") for line in lines) == 2 * len(bars)


@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=12), st.integers(40, 200))
def test_a_command_is_printable_and_a_shell_reads_it_back(words: list[str], width: int) -> None:
    lines = [text_of(line) for line in command(words, Window(width))]
    assert all(line.isprintable() for line in lines)
    if all(word.isprintable() for word in words):
        # A shell joins lines at backslashes; shlex doesn't.
        assert shlex.split("\n".join(lines).replace(" \\\n", " ")) == words


def test_a_command_breaks_between_words_only() -> None:
    words = ["gpuherd", "plan", "a" * 50, "--gpus", "4x40GB"]
    assert [text_of(line) for line in command(words, Window(40))] == [
        "  gpuherd plan \\",
        f"      {'a' * 50} \\",
        "      --gpus 4x40GB",
    ]


def test_sentences_are_printable_and_keep_within_the_window() -> None:
    lines = [text_of(line) for line in wrapped("evil \x1b[31m name " + "x" * 90, Window(40), first="note: ")]
    assert all(line.isprintable() and len(line) <= 40 for line in lines)
    assert "\\x1b[31m" in lines[0]


@pytest.mark.parametrize(("asked", "given"), [(10, 40), (90, 90), (999, 200)])
def test_a_window_has_a_sensible_width(asked: int, given: int) -> None:
    assert Window(asked).width == given
