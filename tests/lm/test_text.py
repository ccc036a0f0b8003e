"""A text is divided among its tokens without anything lost, whatever the tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.qa.small_models import make_tokenizer

from gpuherd.lm.tokens import Detokenizer, cut, decode_tokens

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("byte-level"))


@pytest.fixture(scope="module")
def sentence_pieces() -> Any:
    """A tokenizer as Llama-2's: spaces are ▁, unknown characters bytes, and the first space is taken away."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁New", "▁York", "York", "▁", "a", "b", ".", "▁a", "\n"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def grown(tokenizer: Any, token_ids: list[int]) -> Detokenizer:
    growing = Detokenizer(tokenizer)
    for each in token_ids:
        growing.add(each)
    return growing


def pieces(text: str, ends: tuple[int, ...]) -> list[str]:
    return [text[start:end] for start, end in zip((0, *ends), ends, strict=False)]


@pytest.mark.parametrize("kind", ["byte_level", "sentence_pieces"])
@given(st.lists(st.integers(0, 260), max_size=12))
def test_any_tokens_divide_their_text(kind: str, request: pytest.FixtureRequest, token_ids: list[int]) -> None:
    tokenizer = request.getfixturevalue(kind)
    text, ends = grown(tokenizer, token_ids).divided()
    assert text == decode_tokens(tokenizer, token_ids)
    assert len(ends) == len(token_ids)
    assert list(ends) == sorted(ends)
    assert "".join(pieces(text, ends)) == text


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=12))
def test_any_text_comes_back_and_a_token_taken_out_is_its_piece_taken_out(byte_level: Any, text: str) -> None:
    token_ids = byte_level(text, add_special_tokens=False)["input_ids"]
    whole, ends = grown(byte_level, token_ids).divided()
    assert whole == text
    for place, piece in enumerate(pieces(whole, ends)):
        without = decode_tokens(byte_level, [*token_ids[:place], *token_ids[place + 1 :]])
        if "\N{REPLACEMENT CHARACTER}" not in without:  # no character was cut in half
            others = pieces(whole, ends)
            assert without == "".join(others[:place] + others[place + 1 :]), piece


def test_the_token_that_completes_a_character_brings_it(byte_level: Any) -> None:
    token_ids = byte_level("a🦙b", add_special_tokens=False)["input_ids"]
    assert len(token_ids) == 6
    text, ends = grown(byte_level, token_ids).divided()
    assert pieces(text, ends) == ["a", "", "", "", "🦙", "b"]


def test_half_a_character_at_the_end_is_the_last_tokens(byte_level: Any) -> None:
    token_ids = byte_level("ab🦙", add_special_tokens=False)["input_ids"][:-1]
    text, ends = grown(byte_level, token_ids).divided()
    assert text.rstrip("\N{REPLACEMENT CHARACTER}") == "ab"
    assert ends[-1] == len(text) > 2


def test_special_tokens_bring_nothing(byte_level: Any) -> None:
    paris = byte_level(" Paris", add_special_tokens=False)["input_ids"]
    text, ends = grown(byte_level, [0, *paris, 5, *paris]).divided()
    assert text == " Paris Paris"
    assert ends[0] == 0
    assert ends[len(paris)] == ends[len(paris) + 1] == 6


def test_the_space_that_a_decoder_takes_away_is_the_first_alone(sentence_pieces: Any) -> None:
    new, york = sentence_pieces.convert_tokens_to_ids(["▁New", "▁York"])
    text, ends = grown(sentence_pieces, [new, york, york]).divided()
    assert pieces(text, ends) == ["New", " York", " York"]


def test_long_answers_take_time_in_proportion(byte_level: Any) -> None:
    class Counting:
        tokens = 0

        def decode(self, token_ids: list[int], **how: Any) -> Any:
            self.tokens += len(token_ids)
            return byte_level.decode(token_ids, **how)

    counting = Counting()
    token_ids = byte_level("What is the capital of France? " * 60, add_special_tokens=False)["input_ids"]
    text, _ = grown(counting, token_ids).divided()
    assert text == "What is the capital of France? " * 60
    assert counting.tokens < 10 * len(token_ids)


@pytest.mark.parametrize(
    ("text", "stop", "place"),
    [("a b\n\nQ", ("\n\n",), 3), ("ab Question: c", ("\nQuestion:", "Question:"), 3), ("a.b.", (".",), 1)],
)
def test_a_stop_string_is_found_when_its_last_token_comes(
    byte_level: Any, text: str, stop: tuple[str, ...], place: int
) -> None:
    growing = Detokenizer(byte_level)
    found = None
    for each in byte_level(text, add_special_tokens=False)["input_ids"]:
        growing.add(each)
        found = growing.find(stop)
        if found is not None:
            break
        assert not any(string in growing.text for string in stop)
    assert found == place


def test_a_stop_string_is_found_before_half_a_character(byte_level: Any) -> None:
    growing = Detokenizer(byte_level)
    half = byte_level("🦙", add_special_tokens=False)["input_ids"][0]
    for each in (*byte_level("a\n", add_special_tokens=False)["input_ids"], half):
        growing.add(each)
        if growing.find(("\n",)) is not None:
            break
    assert growing.find(("\n",)) == 1


@given(st.lists(st.integers(0, 4), max_size=8), st.integers(0, 40))
def test_a_cut_keeps_the_tokens_that_have_a_character_before_it(widths: list[int], length: int) -> None:
    ends = tuple(sum(widths[: count + 1]) for count in range(len(widths)))
    text = "x" * sum(widths)
    short, kept = cut(text, ends, length)
    assert short == text[:length]
    assert "".join(pieces(short, kept)) == short
    assert len(kept) == sum(start < length for start, _ in zip((0, *ends), ends, strict=False))
