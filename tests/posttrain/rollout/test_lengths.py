"""Contexts that are longer than a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuherd.errors import UsageError
from gpuherd.posttrain.rollout.lengths import Texts, check_lengths


def test_prompts_and_rows_that_are_longer_than_the_model_are_refused(policy_model: Path) -> None:
    """A character is a token, and the model has 256 places."""
    model = str(policy_model)
    assert check_lengths(Texts(["a" * 200, "b"]), model, 56) is None
    warning = check_lengths(Texts(["a" * 200, "b"]), model, 57)
    assert warning is not None and warning.startswith("a prompt of 200 tokens and 57 new ones are more than the 256")
    with pytest.raises(UsageError, match=r"a prompt has 256 tokens, and .* has places for 256"):
        check_lengths(Texts(["b", "a" * 256]), model, 1)
    assert check_lengths(Texts(["a" * 200, "b"], ["c", "d" * 200]), model, 999) is None  # no row has both
    with pytest.raises(UsageError, match="a row has 257 tokens"):
        check_lengths(Texts(["a" * 200, "b"], ["c" * 57, "d"]), model, 1)
    with pytest.raises(UsageError, match="a row has 260 tokens"):  # of comparisons
        check_lengths(Texts(["a" * 200, "b"], ["c", "c" * 60, "d", "d"]), model, 1)


def test_a_text_of_megabytes_is_counted_in_pieces(policy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded at once, 100 MB take 30 GB."""
    import tokenizers

    encoded: list[int] = []

    class Watched:
        def __init__(self, tokenizer: tokenizers.Tokenizer):
            self.no_truncation, self._whole = tokenizer.no_truncation, tokenizer

        @classmethod
        def from_file(cls, path: str) -> Watched:
            return cls(from_file(path))

        def encode_batch(self, texts: list[str], **options: bool) -> list[tokenizers.Encoding]:
            encoded.append(sum(map(len, texts)))
            return self._whole.encode_batch(texts, **options)

    from_file = tokenizers.Tokenizer.from_file
    monkeypatch.setattr(tokenizers, "Tokenizer", Watched)
    with pytest.raises(UsageError, match="a prompt has 3000000 tokens"):
        check_lengths(Texts(["b", "a" * 3_000_000]), str(policy_model), 1)
    assert len(encoded) > 1 and max(encoded) <= 2**20 and sum(encoded) == 2**21 + 1


def test_what_is_not_known_is_not_refused(tmp_path: Path) -> None:
    assert check_lengths(Texts(["a" * 10_000]), str(tmp_path / "nowhere"), 1) is None
    assert check_lengths(Texts([]), "gpt2", 1) is None
