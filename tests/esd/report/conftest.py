"""Fixtures: a run folder, a way to put models into it, and a small run."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
from tests.esd.report.runs import AddModel, put_model, put_small_run

from gpuherd.esd.report.reading import RunResults, read_results


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


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``put_small_run``. Read only."""
    folder = tmp_path_factory.mktemp("small") / "run"
    folder.mkdir()
    put_small_run(folder)
    return folder


@pytest.fixture
def small_run(run_folder: Path, small_folder: Path) -> RunResults:
    """A copy of the small run in the run folder, read."""
    shutil.copytree(small_folder, run_folder, dirs_exist_ok=True)
    return read_results(run_folder)
