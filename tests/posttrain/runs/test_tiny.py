"""The model that ships with gpuherd, and the settings that go with it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.composing import compose, groups, shipped
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.runs.settings import settings_of
from gpuherd.posttrain.types import Split

ROOT = Path(__file__).parents[3]
WORDS = ["experiment.name=first", "models=[tiny]", "training.datasets=[arithmetic]"]


def test_the_pair_is_there_without_a_network() -> None:
    settings = settings_of(compose([*WORDS, "algos=[GRPO,QSharp,PPO,SFT]", "algos.PPO.lr=5e-5"]))
    family = settings.families()["tiny"]
    assert family.reference == family.value == shipped("tiny_model")
    files = list(Path(family.reference).iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {each.name for each in files}
    assert sum(each.stat().st_size for each in files) < 1_000_000
    assert {each.name: each.options.lr for each in settings.choices()} == {
        "GRPO": 1e-4, "QSharp": 1e-4, "PPO": 5e-5, "SFT": 1e-4
    }  # fmt: skip
    assert settings.system.dtype == "fp32" and settings.generation.max_new_tokens == 4
    assert compose([*WORDS, "generation.max_new_tokens=6"])["generation"]["max_new_tokens"] == 6
    with pytest.raises(UsageError, match="no model other ships"):
        compose([*WORDS, "models.mine.reference=${shipped:other}"])


def test_every_model_and_data_set_that_the_documents_choose_is_there() -> None:
    texts = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    lines = [line.removeprefix("$ ") for path in texts for line in path.read_text().splitlines()]
    found = [line for line in lines if re.match(r"gpuherd .*posttrain .*experiment\.name=", line)]
    assert len(found) > 5
    for line in found:
        words = shlex.split(line.partition("posttrain ")[2], comments=True)
        chosen = [word for word in words if re.fullmatch(r"(models|algos|datasets|training\.datasets)=.*", word)]
        values = compose(chosen)
        assert set(values["training"].get("datasets") or ()) <= {*groups()["datasets"], *values["datasets"]}, line


@pytest.mark.slow
def test_it_answers_half_of_the_sums_right() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (each.from_pretrained(shipped("tiny_model")) for each in (AutoModelForCausalLM, AutoTokenizer))
    problems = make_task("arithmetic").problems(Split.TEST, 300, 0)
    right = 0.0
    for each in problems:
        prompt = tokenizer(each.prompt)["input_ids"]
        answer = [*tokenizer(each.answers[0])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        right += float(logits.log_softmax(-1)[range(len(answer)), answer].sum().exp())
    assert 0.45 < right / len(problems) < 0.58
