"""The guide's suffixes for quantised models."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuherd.models.memory.weights import Precision, split_precision


@pytest.mark.parametrize(
    ("text", "model", "precision"),
    [
        ("Llama-3.1-70B-8bit", "Llama-3.1-70B", Precision.INT8),
        ("meta-llama/Llama-3.1-70B-Instruct-4bit", "meta-llama/Llama-3.1-70B-Instruct", Precision.NF4),
        ("some/Model-4BIT", "some/Model", Precision.NF4),
        ("Llama-3.1-70B", "Llama-3.1-70B", None),
        ("-8bit", "-8bit", None),
        ("model-8bits", "model-8bits", None),
    ],
)
def test_suffixes(text: str, model: str, precision: Precision | None) -> None:
    assert split_precision(text) == (model, precision)


def test_a_folder_of_that_very_name_is_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine-4bit").mkdir()
    monkeypatch.chdir(tmp_path)
    assert split_precision("mine-4bit") == ("mine-4bit", None)
    assert split_precision("other-4bit") == ("other", Precision.NF4)
