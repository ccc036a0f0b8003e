"""What the page unpacks is what was packed, in the digits that it shows."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpuherd.esd.report.page import packed_spectra, thinned
from gpuherd.esd.spectrum_files import HISTOGRAM_BINS, Sketch, sketch_of


def inflated(text: str) -> bytes:
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
    return zlib.decompress(base64.b64decode(text, validate=True))


def by_number(data: bytes, kind: str) -> NDArray[Any]:
    """As the page's ``interleaved`` does it."""
    width = np.dtype(kind).itemsize
    return np.frombuffer(np.frombuffer(data, np.uint8).reshape(width, -1).T.tobytes(), kind)


def unpacked(text: str, layers: int) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None]:
    """As the page's ``unpackSpectra`` does it."""
    data = inflated(text)
    head = by_number(data[: layers * 24], "<f4").reshape(layers, 6)
    bars = np.frombuffer(data[layers * 24 : layers * (24 + HISTOGRAM_BINS)], np.uint8).reshape(layers, HISTOGRAM_BINS)
    rest = data[layers * (24 + HISTOGRAM_BINS) :]
    steps = [by_number(half, "<u2") for half in (rest[: len(rest) // 2], rest[len(rest) // 2 :])]
    found: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None] = []
    start = 0
    for (count, *ends), bins in zip(head, bars, strict=True):
        if count == 0:
            found.append(None)
            continue
        stop = start + int(count)
        axes = [
            low + (high - low) * np.cumsum(part[start:stop], dtype=np.uint16) / 65535
            for part, low, high in zip(steps, ends[0:4:2], ends[1:4:2], strict=True)
        ]
        found.append((axes[0], axes[1], np.expm1(bins / 255 * np.log1p(ends[4]))))
        start = stop
    return found


def test_spectra_come_back_as_they_look() -> None:
    rng = np.random.default_rng(0)
    sketches: list[Sketch | None] = [sketch_of(np.sort(rng.pareto(2, size) + 0.01), 1e-5) for size in (20, 700, 4096)]
    sketches[1:1] = [None, sketch_of(np.array([3.0]), 1e-5), sketch_of(np.zeros(5), 1e-5)]
    found = unpacked(packed_spectra(sketches, 100), len(sketches))
    assert found[1] is found[2] is found[3] is None
    for sketch, back in zip(sketches, found, strict=True):
        if sketch is None or back is None:
            continue
        span = float(np.ptp(sketch.log10_lambda))
        np.testing.assert_allclose(back[0], sketch.log10_lambda, atol=span * 2e-5)
        np.testing.assert_allclose(back[1], sketch.log10_ccdf, atol=1e-4)
        np.testing.assert_allclose(back[2], sketch.histogram, rtol=0.03, atol=0.02)
        assert ((back[2] > 0) == (sketch.histogram > 0)).all()


@given(st.integers(2, 300), st.integers(2, 120))
def test_thinning_keeps_both_ends_and_no_more_than_asked(count: int, points: int) -> None:
    kept = thinned(count, points)
    assert kept[0] == 0
    assert kept[-1] == count - 1
    assert len(kept) <= max(points, 2)
    assert len(kept) == min(count, points)
    assert kept == sorted(set(kept))
