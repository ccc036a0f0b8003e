"""Whether two tokenizers mean the same by a token id: a classifier that reads other words guides to nonsense. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from gpuherd.errors import UsageError


def tokens_digest(tokens: Mapping[str, int]) -> str:
    """SHA-256 of tokens and their ids, as ``tokenizer.get_vocab()`` gives them, in whatever order."""
    text = json.dumps(sorted(tokens.items(), key=lambda each: (each[1], each[0])), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def first_difference(policy: Mapping[str, int], classifier: Mapping[str, int]) -> str | None:
    """A sentence about the first id that the two mean different tokens by; None where all are the same.

    >>> first_difference({"a": 0, "b": 1}, {"a": 0, "c": 1})
    "id 1 is 'b' to the policy and 'c' to the classifier"
    """
    mine, theirs = _by_id(policy), _by_id(classifier)
    for number in sorted(mine.keys() | theirs.keys()):
        if mine.get(number) != theirs.get(number):
            told = [_shown(each.get(number)) for each in (mine, theirs)]
            return f"id {number} is {told[0]} to the policy and {told[1]} to the classifier"
    return None


def refuse_other_tokens(policy: Mapping[str, int], classifier: Mapping[str, int], name: str) -> None:
    """Raises UsageError where a policy and the classifier of this name don't share their tokens."""
    difference = first_difference(policy, classifier)
    if difference is not None:
        raise UsageError(
            f"classifier {name} can't guide this policy: they have other tokenizers: {difference}. Make the classifier "
            "from a model that shares the policy's tokenizer (a smaller one of its family)"
        )


def _by_id(tokens: Mapping[str, int]) -> dict[int, tuple[str, ...]]:
    """Added tokens may share an id with one of the vocabulary."""
    found: dict[int, tuple[str, ...]] = {}
    for token, number in sorted(tokens.items()):
        found[number] = (*found.get(number, ()), token)
    return found


def _shown(tokens: tuple[str, ...] | None) -> str:
    return "no token" if tokens is None else " or ".join(map(repr, tokens))
