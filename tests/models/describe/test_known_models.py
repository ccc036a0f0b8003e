"""Known names: each shipped config gives the published number of parameters; names are found as people write them."""

from __future__ import annotations

import pytest
from tests.models.describe.formulas.from_config import architecture_of
from tests.models.describe.meta import check

from gpuherd.models.describe.known_models import KnownModel, known_model, known_models, nearest_names, shipped


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.model_id)
def test_published_parameters(model: KnownModel) -> None:
    found = shipped(model.model_id, model.config, model.model_id)
    assert found is not None
    assert found.parameters == model.parameters
    assert architecture_of(model.config, model.model_id).parameters == model.parameters


@pytest.mark.parametrize(
    "text",
    ["llama-3.1-70b", "Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B", "META-LLAMA/llama-3.1-70b-instruct"],
)
def test_names_as_people_write_them(text: str) -> None:
    found = known_model(text)
    assert found is not None
    assert found.model_id == "meta-llama/Llama-3.1-70B"


@pytest.mark.parametrize(
    "text", ["somebody/Llama-3.1-70B", "a/meta-llama/Llama-3.1-70B", "llama", "", "/", "Llama-3.1-70B@main"]
)
def test_other_names_are_not_taken_for_known_ones(text: str) -> None:
    assert known_model(text) is None


def test_typos_get_the_nearest_names() -> None:
    assert nearest_names("lama-3.1-8B")[0] == "meta-llama/Llama-3.1-8B"
    assert nearest_names("zzzzzzzz") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    # Without Flan-T5, whose head transformers ties until it sees that the weights hold another one.
    [model for model in known_models() if "flan" not in model.model_id],
    ids=lambda model: model.model_id,
)
def test_whole_models_are_as_transformers_builds_them(model: KnownModel) -> None:
    fields = {key: value for key, value in model.config.items() if key not in ("model_type", "dtype")}
    check(model.config["model_type"], fields)
