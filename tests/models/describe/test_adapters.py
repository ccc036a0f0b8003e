"""An adapter beside its base: as many numbers as PEFT has, in the blocks of the modules that it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.describe.test_families import CASES
from tests.models.describe.test_headers import save
from tests.models.peft_adapters import save_adapter

from gpuherd.errors import BadModel
from gpuherd.models.describe.reading import read_architecture, with_adapter

# PEFT 0.21 asks transformers by a name that is going away.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.:UserWarning"),
]


def adapter(folder: Path, base: Path, **settings: Any) -> Path:
    """An adapter of a saved model, which names its base by path."""
    from transformers import AutoModelForCausalLM

    save_adapter(AutoModelForCausalLM.from_pretrained(base), folder, task_type="CAUSAL_LM", **settings)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("adapters") / "base", "llama", CASES["llama"][0])


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear", "use_dora": True},
        {"target_modules": ["down_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens", "k_proj"]},
    ],
)
def test_as_many_numbers_as_peft_has(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = adapter(tmp_path / "adapter", base, **settings)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), folder)
    ours = read_architecture(str(folder))
    assert ours.parameters == sum(p.numel() for p in loaded.parameters())
    held = {4: 0, 2: 0}
    for tensor in ours.tensors():
        held[4 if tensor.keeps_fp32 else 2] += tensor.numel
    assert held == {size: sum(p.numel() for p in loaded.parameters() if p.itemsize == size) for size in held}
    assert [block.name for block in ours.blocks] == [block.name for block in read_architecture(str(base)).blocks]
    assert "unmerged" in ours.assumptions[-1]


def test_an_adapter_of_another_base_is_refused_by_its_module(base: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    with pytest.raises(BadModel, match="q_proj"):
        with_adapter(read_architecture("gpt2"), folder)
    with pytest.raises(BadModel, match="q_proj"):
        with_adapter(read_architecture("Llama-3.1-8B"), folder)


def test_an_adapter_whose_base_is_not_named_is_refused(base: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace(f'"{base}"', "null"))
    with pytest.raises(BadModel, match="names no base model"):
        read_architecture(str(folder))
