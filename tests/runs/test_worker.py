"""A worker's exit code says whether another try can help; files that are written once stay as they are."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gpuherd.errors import BadModel, CannotWrite, ExitCode
from gpuherd.models.load.options import ShardOptions
from gpuherd.runs.files import create_file, creating_file
from gpuherd.runs.worker import run_worker

WORDS = ["--model=m", "--folder=f", "--shard=3"]


def ended(problem: BaseException | None) -> int:
    def work(options: ShardOptions, words: Sequence[str]) -> None:
        assert (options.model, options.shard) == ("m", 3) and list(words) == ["a.module", *WORDS]
        if problem is not None:
            raise problem

    return run_worker("a.module", "what it does", ShardOptions, work, WORDS)


def out_of_gpu_memory() -> BaseException:
    import torch

    return torch.cuda.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("make", "code", "told"),
    [
        (lambda: None, ExitCode.OK, ""),
        (lambda: BadModel("a bad one"), ExitCode.BAD_INPUT, "error: a bad one"),
        (lambda: MemoryError(), ExitCode.OUT_OF_MEMORY, "MemoryError"),
        (out_of_gpu_memory, ExitCode.OUT_OF_MEMORY, "out of memory"),
        (
            lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            ExitCode.OUT_OF_MEMORY,
            "can't allocate",
        ),
        (lambda: RuntimeError("something else"), ExitCode.FAILED, "something else"),
        (KeyboardInterrupt, ExitCode.INTERRUPTED, ""),
    ],
)
def test_exit_codes(
    make: Callable[[], BaseException | None], code: ExitCode, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(make()) == code
    assert told in capsys.readouterr().err


def test_the_first_of_two_writers_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "once.json"
    with creating_file(path) as file:
        file.write(b"slow")
        assert create_file(path, b"quick") == b"quick"
    assert path.read_bytes() == b"quick"
    assert create_file(path, b"later") == b"quick"
    assert [each.name for each in path.parent.iterdir()] == ["once.json"]


def test_others_may_read_it_as_far_as_the_user_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        create_file(tmp_path / "mine.json", b"{}")
    finally:
        os.umask(before)
    create_file(tmp_path / "ours.json", b"{}")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("mine.json", "ours.json")]
    assert modes == [0o600, 0o666 & ~before]


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), creating_file(tmp_path / "once") as file:
        file.write(b"half")
        raise ValueError("no")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="can't write"):
        create_file(tmp_path / "file" / "below", b"")
