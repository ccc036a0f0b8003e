"""A beginning that all rows share is kept once, changes no figure, and is left to models that can do so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.lm.test_architectures import KINDS, random_module

from gpuherd.lm.backend import Decoding, PromptTokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gpuherd.lm.cache import Beginning  # noqa: E402
from gpuherd.lm.forward import BatchReading, causal_model, padded  # noqa: E402
from gpuherd.lm.model import LanguageModel  # noqa: E402


@pytest.mark.parametrize(
    ("kind", "once"),
    [
        ("mixtral", True), ("gpt_neox", True), ("gemma3_text", True),
        ("bloom", False),  # attention of its own
        ("mistral", False),  # sliding windows alone
        ("mamba", False),
    ],
)  # fmt: skip
def test_models_whose_layers_call_the_attention_they_are_told_keep_it_once(kind: str, once: bool) -> None:
    module = random_module(kind, KINDS[kind])
    assert causal_model(module).shares_prefix is once
    assert module.config._attn_implementation != "gpuherd_shared_beginning"


def test_an_attention_that_was_asked_for_is_not_replaced() -> None:
    module = random_module("mixtral", KINDS["mixtral"])
    module.set_attn_implementation("eager")
    assert not causal_model(module).shares_prefix


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_what_a_token_takes_is_that_of_plain_attention(key_heads: int) -> None:
    draw = torch.Generator().manual_seed(key_heads)
    query = torch.randn(5, 4, 1, 16, generator=draw)
    first = torch.randn(2, 1, key_heads, 7, 16, generator=draw)
    own = torch.randn(2, 5, key_heads, 3, 16, generator=draw)
    mask = torch.rand(5, 1, 1, 10, generator=draw) > 0.3
    keys, values = torch.cat([first.expand(2, 5, -1, -1, -1), own], dim=3).repeat_interleave(4 // key_heads, dim=2)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.3)
    found = Beginning(first[0], first[1]).attend(query, own[0], own[1], mask, 0.3)
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-6)


def test_a_cache_has_the_beginning_once_and_rows_of_their_own(trained: Path) -> None:
    model = causal_model(transformers.AutoModelForCausalLM.from_pretrained(trained).eval())
    reading = BatchReading(model, 1)
    with torch.inference_mode():
        reading.read(*padded(model, [list(range(10, 60))]))
        reading.repeat(8)
        reading.read(*padded(model, [list(range(20, 24 + row)) for row in range(8)]))
        reading.select([7, 0, 0])
        again = reading.read(*padded(model, [[30], [31], [31]]))[:, -1]
        whole: list[Any] = [[*range(10, 60), *range(20, 31), 30], [*range(10, 60), *range(20, 24), 31]]
        expected = [model.module(torch.tensor([row])).logits[0, -1] for row in whole]
    for layer in reading.layers:
        assert layer.beginning.keys.shape[0] == 1
        assert layer.keys.shape[-2] == 12
        assert layer.get_seq_length() == 62
    assert torch.allclose(again, torch.stack([expected[0], expected[1], expected[1]]), atol=1e-5)


def test_samples_of_one_prompt_share_all_of_it(trained: Path) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(trained).eval()
    lm = LanguageModel(module, transformers.AutoTokenizer.from_pretrained(trained))
    prompt = PromptTokens("a", tuple(range(10, 50)))
    how = Decoding(samples=3, max_new_tokens=6)
    caches: list[Any] = []
    hook = module.register_forward_pre_hook(
        lambda _module, _args, words: caches.append(words["past_key_values"]), with_kwargs=True
    )
    one = lm.decode([prompt], how)[0]
    hook.remove()
    assert all(layer.beginning.length == 40 for layer in caches[-1].layers)
    for each in one.samples:
        assert each.log_probs == pytest.approx(lm.log_probs([prompt], [each.token_ids])[0], abs=1e-5)
