"""What a job tells of itself arrives, and nothing that a job writes can hurt the reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.engines.progress import Progress, read, report


def test_what_is_reported_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p"
    monkeypatch.setenv("GPUHERD_PROGRESS", str(file))
    report(3, 12, "layer h.3")
    assert read(file) == Progress(3, 12, "layer h.3")
    report(4)
    assert read(file) == Progress(4, None, None)
    assert list(tmp_path.iterdir()) == [file]  # no temporary file stays


def test_outside_gpuherd_and_on_a_bad_path_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report(1, 2)
    monkeypatch.setenv("GPUHERD_PROGRESS", str(tmp_path / "gone" / "p"))
    report(1, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"done": -1}',
        '{"done": true}',
        '{"done": 1, "total": "x"}',
        '{"done": 1, "stage": 5}',
        "[" * 3000,
    ],
)
def test_what_is_no_progress_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "p").write_text(text)
    assert read(tmp_path / "p") is None
    assert read(tmp_path / "absent") is None


@given(st.binary(max_size=200))
def test_any_bytes_are_survived(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.mktemp("any") / "p"
    file.write_bytes(data)
    found = read(file)
    assert found is None or found.done >= 0


def test_a_long_stage_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUHERD_PROGRESS", str(tmp_path / "p"))
    report(1, 2, "x" * 500)
    found = read(tmp_path / "p")
    assert found is not None and found.stage is not None and len(found.stage) == 80
