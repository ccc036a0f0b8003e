"""Token counts of the longest prompts and answers in the data, for memory plans and for a check against the model's
context length. No torch.

The model's own tokenizer.json counts the tokens. Where there is none, each byte counts as a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import BadModel, MissingModel, UsageError, naming_extras
from gpuherd.models.place.resources import read_with_precision

_ASSUMED = 512
_TEMPLATE = 64  # what a chat template adds, at most
_TRIED = 64  # texts: the one with the most bytes need not be the one with the most tokens
_MARKS = 2  # of a beginning and an end
_PIECE = 1 << 16  # characters that are encoded as one text; a tokenizer takes about 300 bytes for each
_AT_ONCE = 16  # pieces
_COUNTED = 1 << 21  # characters of a text: what lies behind them is counted a token a byte, which is the most

Counter = Callable[[Sequence[str]], list[int]]  # the number of tokens of each text


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
    """The texts of a training's data.

    Attributes:
        prompts: before the text to learn.
        answers: the text to learn; None: it is drawn.
        turns: so many answers are drawn in an episode, at most.
        source: how many there are, and what of the data is left out, for people.
    """

    prompts: Sequence[str]
    answers: Sequence[str] | None = None
    turns: int = 1
    source: str = ""


def lengths_of(texts: Texts | None, model: str, *, chat: bool) -> Lengths:
    """The longest of these texts; of None UNKNOWN. Raises MissingModel, BadModel, MissingExtra."""
    if texts is None:
        return UNKNOWN
    counted = _counter(model)
    prompt = _longest(texts.prompts, counted)
    answer = None if texts.answers is None else _longest(texts.answers, counted) + _MARKS
    prompt += _TEMPLATE if chat else _MARKS
    how = "" if counted is not None or not texts.prompts else ", a token taken for a byte"
    drawn = "" if texts.turns == 1 else f", and of up to {texts.turns} turns the answers alone are counted"
    answers = "" if answer is None else f" and answers of {answer}"
    return Lengths(prompt, answer, texts.turns, f"with prompts of {prompt} tokens at most{answers}{how}{drawn}")


def check_lengths(texts: Texts, model: str, new_tokens: int, *, chat: bool = False) -> str | None:
    """Compares the longest of these texts with the model's context length, where its config and tokenizer are readable.

    Args:
        new_tokens: of an answer that is drawn.

    Returns a warning where drawn answers can't have all their tokens. Raises UsageError for a prompt that leaves no
    place for an answer, and for a row to learn from that is longer than the model.
    """
    try:
        places, counted = read_with_precision(model, None)[0].max_tokens, _counter(model)
    except (MissingModel, BadModel):
        return None  # planning or loading the model reports it
    if places is None or counted is None or not texts.prompts:
        return None
    template = _TEMPLATE if chat else 0
    if texts.answers is not None:
        sides = max(1, len(texts.answers) // len(texts.prompts))  # of a comparison both
        rows = _most_bytes([(texts.prompts[place // sides], answer) for place, answer in enumerate(texts.answers)])
        before, behind = (counted([row[side] for row in rows]) for side in (0, 1))
        longest = max(map(sum, zip(before, behind, strict=True)))
        if longest > places:
            raise UsageError(
                f"a row has {longest} tokens, prompt and answer together, and {model} has places for {places}; leave "
                "such rows out, or choose a model with a longer context"
            )
        return None
    longest = max(counted([prompt for prompt, _ in _most_bytes([(prompt, "") for prompt in texts.prompts])]))
    if longest >= places:
        raise UsageError(
            f"a prompt has {longest} tokens, and {model} has places for {places}, prompt and answer together; leave "
            "such problems out, or choose a model with a longer context"
        )
    if longest + template + new_tokens <= places:
        return None
    return (
        f"a prompt of {longest} tokens and {new_tokens} new ones are more than the {places} places of {model}: such "
        "answers end unfinished where there is no place left"
    )


def _most_bytes(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted(rows, key=lambda row: -sum(len(text.encode("utf-8", "replace")) for text in row))[:_TRIED]


def _counter(model: str) -> Counter | None:
    """A function that counts the tokens of texts; None where the model has no readable tokenizer.json. A long text is
    counted in pieces, so that memory stays small: a few tokens more at their borders, and of one of megabytes the most
    that it can have.

    Raises MissingModel, BadModel.
    """
    from gpuherd.models.load.identity import model_files  # numpy, which --help does without

    path = Path(model_files(model).tokenizer_folder) / "tokenizer.json"
    if not path.is_file():
        return None
    with naming_extras({"tokenizers": "posttrain"}, "reading a tokenizer takes"):
        from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # of Rust: of no other kind
        return None
    tokenizer.no_truncation()

    def counted(texts: Sequence[str]) -> list[int]:
        pieces = [
            (number, text[start : start + _PIECE])
            for number, text in enumerate(texts)
            for start in range(0, min(len(text), _COUNTED), _PIECE)
        ]
        counts = [len(text[_COUNTED:].encode("utf-8", "replace")) for text in texts]
        for batch in (pieces[start : start + _AT_ONCE] for start in range(0, len(pieces), _AT_ONCE)):
            whole = [piece.encode("utf-8", "replace").decode("utf-8") for _, piece in batch]  # Rust: no lone surrogates
            found = tokenizer.encode_batch(whole, add_special_tokens=False)
            for (number, _), each in zip(batch, found, strict=True):
                counts[number] += len(each.ids)
        return counts

    return counted


def _longest(texts: Iterable[str], counted: Counter | None) -> int:
    """The most tokens of a text, at least 1; the most bytes where nothing counts tokens."""
    longest = [text for text, _ in _most_bytes([(text, "") for text in texts])]
    if not longest:
        return 1
    return max(1, len(longest[0].encode("utf-8", "replace")) if counted is None else max(counted(longest)))
