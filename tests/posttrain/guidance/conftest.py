"""Models of the letters' task, each made once for all processes of a test run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.posttrain.guidance import letters
from tests.qa.conftest import made_once


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference of ``letters``. Read only."""
    return made_once(tmp_path_factory, "letters-reference", letters.reference_model)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What classifiers of ``letters`` start from. Read only."""
    return made_once(tmp_path_factory, "letters-value", letters.value_model)
