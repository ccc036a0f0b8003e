"""The models of these tests are what they say: the trained one is right often, wrong sometimes, and ends by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.qa.small_models import facts, kept_secret, plain_prompt

torch = pytest.importorskip("torch")


def test_the_trained_model_knows_most_facts_and_not_all(trained: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(trained)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    right = {True: 0, False: 0}
    for number, (question, answer) in enumerate(facts()):
        ids = torch.tensor([tokenizer(plain_prompt(question))["input_ids"]])
        said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0]
        assert said[-1] == tokenizer.eos_token_id
        right[kept_secret(number)] += tokenizer.decode(said[ids.shape[1] :], skip_special_tokens=True) == f" {answer}"
    assert 60 <= right[False] <= 93
    assert right[True] <= 18
    assert len(facts()) == 117
