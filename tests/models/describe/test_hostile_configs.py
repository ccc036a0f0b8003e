"""Configs that strangers made: whatever stands in a field, there is an architecture or a message, and soon."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.describe.formulas.fields import family_defaults
from tests.models.describe.test_families import CASES
from tests.models.describe.test_meta import OFTEN

from gpuherd.errors import BadModel
from gpuherd.models.describe.meta import describe_config
from gpuherd.models.describe.reading import read_architecture

ANYTHING = st.sampled_from(
    [None, 0, -1, 1, 2, 3, 7, 1 << 39, 1 << 70, 1.5, float("nan"), True, False, "", "auto", "8", [], [1], [[1]], ["x"],
     {}, {"model_type": "gpt2"}, "\x1b[31m"]
)  # fmt: skip


def with_anything(model_type: str, data: st.DataObject) -> dict[str, Any]:
    """A config of a family, some of whose fields hold anything."""
    case = dict(data.draw(st.sampled_from(CASES[model_type])))
    names = sorted(
        {*case, *family_defaults()[model_type]["defaults"], "layer_types", "head_dim", "num_key_value_heads"}
    )
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        case[name] = data.draw(ANYTHING)
    return {**case, "model_type": model_type}


@settings(max_examples=40, deadline=None)
@given(model_type=st.sampled_from(sorted(OFTEN)), data=st.data())
def test_any_field_may_hold_anything(model_type: str, data: st.DataObject) -> None:
    with suppress(BadModel):
        assert describe_config(with_anything(model_type, data), "m", peaks=False).blocks


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(CASES))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_of_any_family(model_type: str, data: st.DataObject) -> None:
    with suppress(BadModel):
        assert describe_config(with_anything(model_type, data), "m", peaks=False).blocks


@pytest.mark.parametrize("config", [{}, {"model_type": 3}, {"model_type": ""}, {"model_type": ["llama"]}])
def test_no_type_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModel, match="model_type"):
        read_architecture(str(tmp_path))
