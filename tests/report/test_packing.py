"""What a page unpacks is what was packed, in the digits that it shows."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpuherd.report.page import packed_floats, packed_json


def inflated(text: str) -> bytes:
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
    return zlib.decompress(base64.b64decode(text, validate=True))


def by_number(data: bytes, kind: str) -> NDArray[Any]:
    """As the page's ``interleaved`` does it."""
    width = np.dtype(kind).itemsize
    return np.frombuffer(np.frombuffer(data, np.uint8).reshape(width, -1).T.tobytes(), kind)


NUMBERS = st.one_of(st.just(float("nan")), st.just(0.0), st.floats(1e-30, 1e30), st.floats(-1e30, -1e-30))


@given(st.lists(NUMBERS))
def test_numbers_keep_six_digits(values: list[float]) -> None:
    found = by_number(inflated(packed_floats(np.array(values))), "<f4")
    np.testing.assert_allclose(found, values, rtol=6e-7)
    assert np.isnan(found).tolist() == np.isnan(np.array(values, float)).tolist()


def test_counts_are_exact_and_what_is_too_large_is_no_number() -> None:
    counts = [50_257.0, 65_537.0, 999_999.0]
    assert by_number(inflated(packed_floats(np.array(counts))), "<f4").tolist() == counts
    assert np.isnan(by_number(inflated(packed_floats(np.array([1e39, -1e300, 3.4028234e38]))), "<f4")).all()


def test_json_comes_back_whatever_it_holds() -> None:
    value = {"</script>": ["\u2028", "\ud800", "ü", None, 1.5]}
    data = inflated(packed_json(value)).decode("utf-8")
    assert json.loads(data) == value
    with pytest.raises(ValueError, match="JSON"):
        packed_json(float("nan"))
