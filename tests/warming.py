"""What a worker of pytest-xdist does before it collects: libraries with one thread each, and bytecode of all files.

Of workers that collect the same files each compiles a part, and reads what the others did.
"""

from __future__ import annotations

import compileall
import importlib
import os
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"
WORDS_OF_REWRITTEN = ("test_*.py", "conftest.py")

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
NUMERIC = ("numpy", "scipy.linalg", "torch")


def load_single_threaded() -> None:
    """Load what computes, so that it has one thread in this process; what the process starts chooses as ever.

    There are more workers than cores: threads of small products would wait for each other, busily, for most of a
    test's time.
    """
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        for name in NUMERIC:
            importlib.import_module(name)
    except ImportError:
        pass  # their tests are skipped
    finally:
        for name in THREADS:
            del os.environ[name]


def share(files: list[Path], worker: int, workers: int) -> list[Path]:
    """A worker's part of the files, of about the same size as each other's."""
    return sorted(files, key=lambda file: (-file.stat().st_size, file))[worker::workers]


def compile_share(config: pytest.Config, worker: int, workers: int) -> None:
    """Rewrite the assertions of the tests and compile the sources: the worker's part of what has no bytecode yet.

    Rewriting takes a core 25 seconds; three workers would each do all of it, at the same time.
    """
    for file in share(list(SOURCE.rglob("*.py")), worker, workers):
        compileall.compile_file(file, quiet=2)
    state = config.stash[rewrite.assertstate_key]
    for file in share([file for words in WORDS_OF_REWRITTEN for file in TESTS.rglob(words)], worker, workers):
        cache = rewrite.get_cache_dir(file)
        compiled = cache / (file.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(cache):
            source, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, source, compiled)
