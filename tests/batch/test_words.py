"""Splitting a line as a shell does, and refusing what only a shell could do with it."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.batch.commands_txt import leading_variables, split_words


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), min_size=0, max_size=12), max_size=6)
)
def test_what_shlex_quotes_comes_back(words: list[str]) -> None:
    assert split_words(shlex.join(words)) == words


@given(st.text(alphabet="ab '\"\\ \t#", max_size=25))
def test_words_are_those_of_a_shell(line: str) -> None:
    """shlex is right but for ``#``, which begins a comment only where a word does."""
    try:
        expected = shlex.split(line.split("#")[0]) if line.lstrip().startswith("#") else shlex.split(line)
    except ValueError:
        if "#" not in line:
            with pytest.raises(ValueError, match=r"closed|backslash"):
                split_words(line)
        return
    if "#" not in line:
        assert split_words(line) == expected


def test_a_comment_begins_with_a_word() -> None:
    assert split_words("a b#c # d") == ["a", "b#c"]
    assert split_words("# all of it") == []


@pytest.mark.parametrize(
    ("line", "sign"),
    [
        ("a | b", "|"),
        ("a > out", ">"),
        ("a < in", "<"),
        ("a && b", "&"),
        ("a; b", ";"),
        ("a $(b)", "$("),
        ("a `b`", "`"),
        ("a $HOME", "$H"),
        ('a "${HOME}"', "${"),
        ('a "`b`"', "`"),
        ("a ~/data", "~"),
        ("a *.csv", "*"),
        ("(a)", "("),
    ],
)
def test_what_only_a_shell_can_do_is_refused_with_the_remedy(line: str, sign: str) -> None:
    with pytest.raises(ValueError, match="--shell") as told:
        split_words(line)
    assert sign in str(told.value)
    assert split_words(line, shell_signs=True)


@pytest.mark.parametrize("line", ["a '| > $HOME `b` ~/x *'", 'a "| > ~/x *"', r"a \| \$HOME \*", "a b~ x=~ $ cost$"])
def test_quoted_signs_are_letters(line: str) -> None:
    assert split_words(line) == shlex.split(line)


def test_variables_in_front_of_a_command() -> None:
    assert leading_variables(split_words("A=1 B='x y' run C=3")) == ({"A": "1", "B": "x y"}, ["run", "C=3"])
    assert leading_variables(["A=1"]) == ({"A": "1"}, [])
