"""SFT on conversations, from a file to a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.posttrain.learning.test_main import _signals, written  # noqa: F401 - a fixture
from tests.qa import small_models
from tests.qa.conftest import made_once

from gpuherd.errors import ExitCode, UsageError
from gpuherd.posttrain.engine.curves import read_curves
from gpuherd.posttrain.learning.__main__ import main
from gpuherd.posttrain.learning.prepare import check_data
from gpuherd.posttrain.learning.settings import read_settings


@pytest.fixture(scope="session")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose tokenizer has a chat template. Read only."""
    return made_once(
        tmp_path_factory, "chatting", lambda folder: small_models.random_llama(folder, chat=small_models.CHAT_TEMPLATE)
    )


def rows(count: int = 8) -> list[dict[str, Any]]:
    said = ("What is it?", "Paris.", "Sure?", "Yes.")
    return [
        {
            "messages": [
                {"role": ("user", "assistant")[place % 2], "content": text * (1 + number % 3)}
                for place, text in enumerate(said)
            ]
        }
        for number in range(count)
    ]


def test_it_learns_every_turn_packed_or_not(tmp_path: Path, chatting: Path) -> None:
    file = tmp_path / "talks.jsonl"
    bad = [{"messages": [{"role": "bot", "content": "x"}]}]
    file.write_text("".join(f"{json.dumps(each)}\n" for each in [*rows(), *bad]))
    curves = []
    for packing in (False, True):
        place = tmp_path / str(packing)
        place.mkdir()
        training = {"data_file": str(file), "num_iterations": 3, "micro_batch_size": 4}
        assert main(written(place, chatting, "sft", training=training, sft={"packing": packing})) == ExitCode.OK
        curves.append(read_curves(place / "sft"))
        log = next((place / "sft").rglob("run.log")).read_text()
        assert f"learning from {file}: 16 answers of 8 of 9 rows" in log
        assert "line 9: messages[0].role is 'bot'" in log
    alone, packed = curves
    assert len(alone) == 3 and alone[-1]["loss"] < alone[0]["loss"]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in packed] == pytest.approx([line[name] for line in alone], abs=1e-5, rel=1e-5)


def test_a_model_without_a_template_is_refused_before_it_is_loaded(
    tmp_path: Path, policy_model: Path, chatting: Path
) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in rows(2)))
    with pytest.raises(UsageError, match=r"training.data_file: .*talks.jsonl holds conversations: .* no chat template"):
        check_data(read_settings(written(tmp_path, policy_model, "sft", training={"data_file": str(file)})[1]))
    found = check_data(read_settings(written(tmp_path, chatting, "sft", training={"data_file": str(file)})[1]))
    assert found is not None and len(found.prompts) == 4
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "a", "completion": "b"}\n')
    assert check_data(read_settings(written(tmp_path, policy_model, "sft", training={"data_file": str(plain)})[1]))
