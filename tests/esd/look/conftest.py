"""Fixtures: a run folder, a way to put models into it, and a small run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.esd.look.runs import AddModel, put_model, put_small_run

from gpuherd.esd.look.results import RunResults, read_results


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """An empty run folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def add_model(run_folder: Path) -> AddModel:
    """``put_model`` into the run folder."""
    return partial(put_model, run_folder)


@pytest.fixture
def small_run(run_folder: Path) -> RunResults:
    """``put_small_run`` in the run folder, read."""
    put_small_run(run_folder)
    return read_results(run_folder)
