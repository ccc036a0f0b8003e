"""Tiny models for all tests of post-training, each made once for all processes of a test run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.posttrain import tiny
from tests.qa.conftest import made_once


@pytest.fixture(scope="session")
def policy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a tokenizer of characters. Read only."""
    return made_once(tmp_path_factory, "tiny-policy", tiny.tiny_llama)


@pytest.fixture(scope="session")
def value_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one with the same tokenizer, half as wide. Read only."""
    return made_once(tmp_path_factory, "tiny-value", lambda folder: tiny.tiny_llama(folder, seed=1, width=16))
