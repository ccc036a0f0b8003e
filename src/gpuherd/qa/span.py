"""Splits a generation into the thought and the answer after it, for judges, measures and pages.

A reasoning model writes a thought between tags (``<think> … </think>``) and then its answer. If the chat template opens
the thought, the text begins inside it and has only the closing tag; if it has none, the thought was never closed, and
there is no answer.

gpt-oss writes messages, each in a channel: ``final`` is the answer, all others are thought. Texts that were decoded
without special tokens keep only the names of the channels (``analysis…assistantfinal…``); these are taken as names only
if the tokens around them have no text, or if the text begins with one and has ``assistantfinal`` after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gpuherd.lm.backend import Generation
from gpuherd.lm.tokens import THOUGHT_TAGS

Span = Literal["answer", "thought", "both"]
SPANS: tuple[Span, ...] = get_args(Span)

_OPENINGS, _CLOSINGS = (f"(?:{'|'.join(map(re.escape, tags))})" for tags in zip(*THOUGHT_TAGS, strict=True))
_TAG = re.compile(rf"(?P<opening>{_OPENINGS})|{_CLOSINGS}", re.IGNORECASE)
_OPEN_AT_END = re.compile(rf"(?P<opening>{_OPENINGS})\s*\Z", re.IGNORECASE)

_CHANNELS = r"(?P<channel>analysis|commentary|final)"
_HEADER = re.compile(
    rf"(?:<\|start\|>)?(?:assistant)?<\|channel\|>{_CHANNELS}\b[^<]*(?:<\|constrain\|>[^<]*)?(?:<\|message\|>|\Z)"
)
_MESSAGE_END = re.compile(r"<\|(?:end|return|call|start)\|>")
_BARE_HEADER = re.compile(rf"(?:\A(?:assistant)?|assistant){_CHANNELS}")
_BARE_CHANNELS = re.compile(r"\A(?:assistant)?(?:analysis|commentary)(?=[^\s.,:;!?)]).*?assistantfinal", re.DOTALL)
_TURN_AT_END = re.compile(r"<\|start\|>assistant(?P<thought><\|channel\|>(?:analysis|commentary)<\|message\|>)?\s*\Z")

Places = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ThoughtSplit:
    """A text divided at the tags of its thoughts.

    Attributes:
        answer: start and end of each part of the answer, in characters; empty if a thought is open at the end.
        thought: the same for the thoughts, without tags.
        open: the last thought was never closed.
        orderly: tags come in pairs, or there is only a closing one.
    """

    answer: Places
    thought: Places
    open: bool
    orderly: bool


@dataclass(frozen=True, slots=True)
class SpanContent:
    """The part of a generation that a span names.

    Attributes:
        text: stripped.
        tokens: indices of its tokens, in order.
        pieces: the text of each of these tokens; stripped, together they are the text.
        has_end: the token that ended the generation belongs to it.
    """

    text: str
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    has_end: bool


def span_setting(span: Span) -> dict[str, str]:
    """The span as a setting of a statistic; empty for ``both``, so that statistics of answers without a thought keep
    their names."""
    return {} if span == "both" else {"span": span}


def span_in(settings: Mapping[str, Any]) -> Span:
    """The span that ``span_setting`` put into settings."""
    named = settings.get("span", "both")
    return next(each for each in SPANS if each == named)


def split_thoughts(text: str, *, in_thought: bool = False, bare: bool = False) -> ThoughtSplit:
    """The text divided among answer and thought.

    A closing tag makes everything before it a thought, which a template may have opened.

    Args:
        in_thought: the text begins inside a thought.
        bare: the text has the names of channels without the special tokens around them.

    >>> split_thoughts("5 or 6?</think>6").answer, split_thoughts("<think>5").open
    (((15, 16),), True)
    """
    headers = list(_HEADER.finditer(text))
    if not headers and (bare or _BARE_CHANNELS.match(text)):
        headers = list(_BARE_HEADER.finditer(text))
    if headers:
        return _split_channels(text, headers)
    answer: list[tuple[int, int]] = []
    thought: list[tuple[int, int]] = []
    inside, start, tags, unpaired = in_thought, 0, 0, 0
    for tag in _TAG.finditer(text):
        tags += 1
        opening = tag["opening"] is not None
        unpaired += opening is inside
        if opening and not inside:
            answer.append((start, tag.start()))
            inside, start = True, tag.end()
        elif not opening:
            if not inside:
                answer, thought, start = [], [], 0
            thought.append((start, tag.start()))
            inside, start = False, tag.end()
    (thought if inside else answer).append((start, len(text)))
    orderly = unpaired == 0 or (unpaired == tags == 1 and not inside)
    return ThoughtSplit(() if inside else tuple(answer), tuple(thought), inside, orderly)


def _split_channels(text: str, headers: Sequence[re.Match[str]]) -> ThoughtSplit:
    """The text divided at the headers of its messages. The thought is open unless the last message is in the channel
    ``final``."""
    answer: list[tuple[int, int]] = []
    thought = [(0, headers[0].start())]
    limits = (*(header.start() for header in headers[1:]), len(text))
    for header, limit in zip(headers, limits, strict=True):
        ending = _MESSAGE_END.search(text, header.end(), limit)
        part = header.end(), ending.start() if ending else limit
        (answer if header["channel"] == "final" else thought).append(part)
    is_open = headers[-1]["channel"] != "final"
    return ThoughtSplit(() if is_open else tuple(answer), tuple(thought), is_open, True)


def without_thoughts(text: str, *, in_thought: bool = False) -> str | None:
    """A text without its thoughts, with line breaks in their places; None where one is open, or tags make no sense.

    >>> without_thoughts("<think>5?</think>6"), without_thoughts("<think>6") is None
    ('\\n6', True)
    """
    found = split_thoughts(text, in_thought=in_thought)
    if found.open or not found.orderly:
        return None
    return "\n".join(text[start:end] for start, end in found.answer)


def answer_in(text: str) -> str:
    """The answer in a text that may have thoughts before it, as ``part_of`` has it of a generation: the text itself
    where there is none, empty where a thought was never closed.

    >>> answer_in("<think>5 or 6?</think>\\n6"), answer_in("5 or 6?</think>6"), answer_in("<think>5"), answer_in(" 6")
    ('6', '6', '', ' 6')
    """
    whole = split_thoughts(text)
    if not whole.thought:
        return text
    return "\n".join(text[start:end] for start, end in whole.answer).strip()


def opened_by(prompt: str) -> str:
    """The tag of the thought that is open at a prompt's end; empty where there is none."""
    found = _OPEN_AT_END.search(prompt)
    return "" if found is None else found[0].strip()


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with an open thought, so that what follows begins inside it."""
    channel = _TURN_AT_END.search(prompt)
    return _OPEN_AT_END.search(prompt) is not None or (channel is not None and channel["thought"] is not None)


def knows_thoughts(template: str) -> bool:
    """Whether a chat template writes or removes thoughts."""
    return _TAG.search(template) is not None or _HEADER.search(template) is not None


def with_closed_thought(prompt: str) -> str:
    """The prompt with an open thought at its end closed, so that the answer follows."""
    channel = _TURN_AT_END.search(prompt)
    if channel is not None:
        closing = "<|end|><|start|>assistant" if channel["thought"] else ""
        return f"{prompt.rstrip()}{closing}<|channel|>final<|message|>"
    found = _OPEN_AT_END.search(prompt)
    if found is None:
        return prompt
    closing = next(closing for opening, closing in THOUGHT_TAGS if opening.lower() == found["opening"].lower())
    return f"{prompt[: found.start()]}{found['opening']}\n\n{closing}\n\n"


def part_of(generation: Generation, span: Span) -> SpanContent:
    """The part of a generation that a span names: its text and its tokens.

    The answer's tokens are those with a character of it, from its first that is no white space: line breaks after a
    closing tag are the template's. All others are the thought's. Without a thought everything is the answer.
    """
    split = _split(generation)
    every = tuple(range(len(generation.token_ids)))
    if span == "both" or (span == "answer" and not split.thought):
        return SpanContent(generation.text.strip(), every, generation.pieces, has_end=True)
    places = (
        tuple(_without_leading_space(generation.text, *each) for each in split.answer)
        if split.thought
        else split.answer
    )
    within = _pieces_within(generation, places)
    of_answer = {at: piece for at, piece in enumerate(within) if piece is not None}
    if span == "answer":
        text = "\n".join(generation.text[start:end] for start, end in places).strip()
        return SpanContent(text, tuple(of_answer), tuple(of_answer.values()), has_end=not split.open)
    text = "\n".join(generation.text[start:end] for start, end in split.thought).strip()
    tokens = tuple(at for at in every if at not in of_answer) if split.thought else ()
    return SpanContent(text, tokens, tuple(generation.pieces[at] for at in tokens), has_end=split.open)


def has_thought(generation: Generation) -> bool:
    """Whether it has a thought, closed or not."""
    return bool(_split(generation).thought)


def is_only_thought(generation: Generation) -> bool:
    """Whether its thought was never closed, so that there is no answer."""
    return _split(generation).open


def _split(generation: Generation) -> ThoughtSplit:
    """Its text divided. A bare channel name counts if it is the first text, between tokens without any."""
    first = next((at for at, end in enumerate(generation.ends) if end), 0)
    around = generation.ends[first : first + 2]
    bare = first > 0 and len(set(around)) == 1 and _BARE_HEADER.fullmatch(generation.text, 0, around[0]) is not None
    return split_thoughts(generation.text, in_thought=generation.in_thought, bare=bare)


def _without_leading_space(text: str, start: int, end: int) -> tuple[int, int]:
    """The place without white space at its beginning."""
    return end - len(text[start:end].lstrip()), end


def _pieces_within(generation: Generation, places: Places) -> list[str | None]:
    """The part of each token's text within these places; None for a token outside all of them.

    A token without a character of its own (half of a letter) belongs to the place in which it stands.
    """
    found: list[str | None] = []
    for start, end in zip((0, *generation.ends), generation.ends, strict=False):
        within = [(max(start, low), min(end, high)) for low, high in places if low < high]
        inside = [(low, high) for low, high in within if low < high or start == end == low == high]
        found.append("".join(generation.text[low:high] for low, high in inside) if inside else None)
    return found
