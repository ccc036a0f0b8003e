"""The tokens that end an answer are all that anything about the model names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.qa.small_models import make_tokenizer

from gpuherd.lm.tokens import end_tokens, end_tokens_in, template_end

pytest.importorskip("transformers")


def test_all_that_are_named_are_found_and_who_named_them(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 40}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [40, 41]}))
    found = end_tokens_in(tmp_path, tokenizer)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|end|>")
    assert found.ids == (1, end_of_turn, 40, 41)
    assert found.named_by[40] == ("config", "generation_config")
    assert found.named_by[1] == ("tokenizer", "a token's name")
    assert found.named_by[end_of_turn] == ("a token's name",)
    assert json.loads(json.dumps(found.values()))["named_by"]["41"] == ["generation_config"]


def test_a_word_of_the_same_name_ends_nothing(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.add_tokens(["<|im_end|>"])  # an ordinary token
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in end_tokens(tokenizer).ids
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot_id|>"]})
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") in end_tokens(tokenizer).ids


@pytest.mark.parametrize("value", [None, -1, "2", True, [None]])
def test_what_is_no_token_is_none(tmp_path: Path, value: object) -> None:
    tokenizer = make_tokenizer(tmp_path)
    plain = end_tokens(tokenizer).ids
    assert end_tokens(tokenizer, {"eos_token_id": value}, {"text_config": {}}).ids == plain


def test_a_config_of_several_models_names_the_inner_ones(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    assert 77 in end_tokens(tokenizer, {"text_config": {"eos_token_id": [77]}}).ids


def test_a_folder_without_configs_has_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert end_tokens_in(tmp_path, tokenizer).ids == end_tokens(tokenizer).ids


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<stop>\n{% endfor %}", "<stop>"),
        ("{% for m in messages %}{{ m['content'] }} \n <stop>{% endfor %}", "<stop>"),
        ("{% for m in messages %}{{ m['content'] }}</s>{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", None),
        ("{% for m in messages %}{{ m['content'] }}stop{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        (None, None),
    ],
)
def test_the_chat_template_says_what_ends_a_turn(tmp_path: Path, template: str | None, end: str | None) -> None:
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", "<stop>"]})
    tokenizer.chat_template = template
    found = None if end is None else tokenizer.convert_tokens_to_ids(end)
    assert template_end(tokenizer) == found
    ends = end_tokens(tokenizer)
    assert found is None or found in ends.ids
    assert (ends.named_by.get(tokenizer.convert_tokens_to_ids("<stop>")) == ("chat template",)) == (end == "<stop>")
