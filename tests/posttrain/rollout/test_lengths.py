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


def test_what_is_not_known_is_not_refused(tmp_path: Path) -> None:
    assert check_lengths(Texts(["a" * 10_000]), str(tmp_path / "nowhere"), 1) is None
    assert check_lengths(Texts([]), "gpt2", 1) is None
