"""An experiment of tiny models for the tests of rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain.runs import small
from tests.qa.conftest import made_once

from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.runs.settings import Settings

MakeSettings = Callable[..., Settings]


@pytest.fixture(scope="session")
def adder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that adds, half of the time. Takes seconds to train: for slow tests. Read only."""
    return made_once(tmp_path_factory, "adder", small.adder)


@pytest.fixture(scope="session")
def classifier_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with its tokens. Read only."""
    return made_once(tmp_path_factory, "adder-value", small.classifier_base)


@pytest.fixture
def make_settings(tmp_path: Path, policy_model: Path, value_model: Path) -> MakeSettings:
    """``make_settings(rounds_of_training=1, ...)``: an experiment of random models on sums, blocks replaced."""

    def make(**changed: Any) -> Settings:
        values: dict[str, Any] = {
            "experiment": {"name": "small"},
            "output_dir": str(tmp_path / "outputs"),
            "system": {"dtype": "fp32"},
            "algos": {"QSharp": {"samples_per_example": 2}},
            "models": {"tiny": {"reference": str(policy_model), "value": str(value_model)}},
            "datasets": {"sums": {"task": "arithmetic", "settings": {"digits": 1, "train": 12, "test": 4}}},
            "generation": {"max_new_tokens": 4, "batch_size": 3},
            "data_collection": {"shards": 2},
            "evaluation": {"num_samples": 2, "etas": [1, 0.1], "resamples": 100},
        }
        return read(Settings, values | changed)

    return make
