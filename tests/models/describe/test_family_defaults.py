"""``family_defaults.json`` says what transformers' config classes have."""

from __future__ import annotations

import pytest
from tests.models.describe.family_defaults import defaults_of
from tests.models.describe.formulas.fields import family_defaults
from tests.models.describe.formulas.from_config import FAMILIES
from tests.models.describe.formulas.wrapped import PARTS


@pytest.mark.parametrize("model_type", sorted({*FAMILIES, *PARTS}))
def test_the_file_is_what_transformers_has(model_type: str) -> None:
    assert family_defaults()[model_type] == defaults_of(model_type)
