"""Whatever a message quotes, it is one printable line."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from gpuherd import errors
from gpuherd.errors import BadModel, MissingExtra


def test_examples() -> None:
    failed, tried = doctest.testmod(errors)
    assert tried > 0
    assert failed == 0


@given(st.text())
def test_a_message_is_one_printable_line(text: str) -> None:
    for kind in (BadModel, MissingExtra):
        shown = str(kind(f"model {text} is bad"))
        assert shown.isprintable()
        shown.encode("utf-8")
        if text.isprintable():
            assert shown == f"model {text} is bad"
