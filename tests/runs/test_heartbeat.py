"""A sign of life as long as bytes arrive, and none without."""

from __future__ import annotations

import time
from pathlib import Path

from gpuherd.runs.worker import while_bytes_arrive, written_bytes


def test_it_beats_only_while_bytes_are_written(tmp_path: Path) -> None:
    told: list[int] = []
    with while_bytes_arrive(told.append, every_s=0.02):
        time.sleep(0.2)
        assert told == []
        with (tmp_path / "weights").open("wb") as file:
            for _ in range(3):
                file.write(bytes(4 * 2**20))
                file.flush()
                deadline = time.monotonic() + 10
                seen = len(told)
                while len(told) == seen and time.monotonic() < deadline:
                    time.sleep(0.01)
    assert told == [4, 8, 12]
    time.sleep(0.1)
    assert len(told) == 3


def test_the_kernel_tells_what_we_write(tmp_path: Path) -> None:
    before = written_bytes()
    (tmp_path / "file").write_bytes(bytes(1000))
    assert written_bytes() >= before + 1000
