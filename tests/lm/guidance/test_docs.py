"""docs/guided-decoding.md: its Python runs, in its order, on tiny models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.lm.guidance.conftest import MakeClassifier

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

PAGE = Path(__file__).parents[3] / "docs" / "guided-decoding.md"


def test_the_pages_python_runs(
    policy: Any, tokenizer: Any, make: MakeClassifier, value_model: Path, tmp_path: Path
) -> None:
    make().save(tmp_path / "classifier")
    text = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
    for word, ours in (
        ("cuda:0", "cpu"), ("./classifier", str(tmp_path / "classifier")), ("Qwen/Qwen3-0.6B", str(value_model)),
        ("**batch,", "**batch, pad_token_id=1, max_new_tokens=3,"), ("end_ids=(2,)", "end_ids=(0,), max_new_tokens=3"),
    ):  # fmt: skip
        assert word in text
        text = text.replace(word, ours)
    ids = torch.tensor([[5, 6, 7]])
    names: dict[str, Any] = {
        "model": policy, "tokenizer": tokenizer, "prompts": ["a", "bcd"], "ids": ids, "mask": torch.ones_like(ids),
    }  # fmt: skip
    exec(compile(text, str(PAGE), "exec"), names)
    assert names["values"].shape == (1, 3, 3) and not names["values"].any()
    assert len(names["decoded"][0].samples) == 8
    assert names["decoded"][0].samples[0].guided.kl
