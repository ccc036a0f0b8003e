"""The run that the tests of scorings share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.qa.conftest import made_once
from tests.qa.scoring.small_runs import copy_of, make_run

from gpuherd.qa.runs import Run


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Path:
    """The folder of ``small_runs.make_run``. Read only."""
    return made_once(tmp_path_factory, "answered-facts", lambda place: make_run(place, trained)) / "facts"


@pytest.fixture
def run(facts: Path, tmp_path: Path) -> Run:
    """A copy of it, to add to."""
    return copy_of(facts, tmp_path)
