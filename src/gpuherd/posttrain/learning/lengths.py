"""How many tokens stand before what is learnt, and how many that has: of the data, for plans of memory. No torch.

The longest texts are taken apart by the model's own tokenizer.json. Where there is none, a token has a byte or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import naming_extras
from gpuherd.qa.working.model_files import model_files

_ASSUMED = 512
_TEMPLATE = 64  # what a chat template adds, at most
_TRIED = 64  # texts: the one with the most bytes need not be the one with the most tokens
_MARKS = 2  # of a beginning and an end


@dataclass(frozen=True, slots=True)
class Lengths:
    """The most tokens of a sequence.

    Attributes:
        prompt: before what is learnt.
        answer: of what is learnt; None: it is drawn, and as long as the sampling allows.
        turns: so many answers are drawn in an episode, at most.
        said: how that is known, for people.
    """

    prompt: int
    answer: int | None
    turns: int
    said: str


UNKNOWN = Lengths(_ASSUMED, None, 1, f"prompts taken to have {_ASSUMED} tokens: they are not known before it runs")


@dataclass(frozen=True, slots=True)
class Texts:
    """What is learnt from.

    Attributes:
        prompts: before what is learnt.
        answers: what is learnt; None: it is drawn.
        turns: so many answers are drawn in an episode, at most.
    """

    prompts: Sequence[str]
    answers: Sequence[str] | None = None
    turns: int = 1


def lengths_of(texts: Texts | None, model: str, *, chat: bool) -> Lengths:
    """The longest of these texts; of None UNKNOWN. Raises MissingModel, BadModel, MissingExtra."""
    if texts is None:
        return UNKNOWN
    tokenizer = Path(model_files(model).tokenizer_folder) / "tokenizer.json"
    prompt, known = _longest(texts.prompts, tokenizer)
    answer = None if texts.answers is None else _longest(texts.answers, tokenizer)[0] + _MARKS
    prompt += _TEMPLATE if chat else _MARKS
    how = "" if known else ", a token taken for a byte"
    drawn = "" if texts.turns == 1 else f", and of up to {texts.turns} turns the answers alone are counted"
    answers = "" if answer is None else f" and answers of {answer}"
    return Lengths(prompt, answer, texts.turns, f"with prompts of {prompt} tokens at most{answers}{how}{drawn}")


def _longest(texts: Iterable[str], tokenizer: Path) -> tuple[int, bool]:
    """The most tokens, and whether they were counted."""
    longest = sorted((each.encode("utf-8", "replace") for each in texts), key=len, reverse=True)[:_TRIED]
    if not longest:
        return 1, True
    if tokenizer.is_file():
        with naming_extras({"tokenizers": "posttrain"}, "reading a tokenizer takes"):
            from tokenizers import Tokenizer
        try:
            found = Tokenizer.from_file(str(tokenizer))
        except Exception:  # of Rust: of no other kind
            found = None
        if found is not None:
            found.no_truncation()
            counted = found.encode_batch([each.decode("utf-8") for each in longest], add_special_tokens=False)
            return max(1, *(len(each.ids) for each in counted)), True
    return max(1, len(longest[0])), False
