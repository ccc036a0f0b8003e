"""The names of blocks are a device map that transformers takes as it is, and that leaves nothing out."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.describe.formulas.fields import family_defaults
from tests.models.describe.test_families import ALIKE, CASES
from tests.models.describe.test_headers import save

from gpuherd.models.describe.reading import read_architecture


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*CASES} - ALIKE))
def test_transformers_loads_by_them(model_type: str, tmp_path: Path) -> None:
    import transformers

    folder = save(tmp_path / "m", model_type, CASES[model_type][0])
    kind = getattr(transformers, family_defaults()[model_type]["class_name"])
    names = [block.name for block in read_architecture(str(folder)).blocks]
    model = kind.from_pretrained(folder, device_map=dict.fromkeys(names, "cpu"))
    assert all(tensor.device.type == "cpu" for tensor in [*model.parameters(), *model.buffers()])
