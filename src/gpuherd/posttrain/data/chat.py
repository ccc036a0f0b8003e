"""A conversation as token ids, and which of them are learnt: those that the assistant says, in each of its turns.

The text is that of the model's chat template, with tools and their calls and results as it writes them. A turn is
learnt from the place where the template leaves the word to the policy (its generation prompt) to the token that ends
the turn, which is learnt too: else the policy would never stop. Where the template marks what the assistant says itself
(``{% generation %}``), its marks are taken.

A template may write a turn otherwise than it stands in front of the policy: it may open a thought before an answer and
drop it from a conversation, or tell the tools before the last question alone. Training on that would be training on
something else than what the policy sees; such conversations are refused, with the turn.

Needs a tokenizer, no model and no torch.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.lm.tokens import MARKER, end_tokens
from gpuherd.posttrain.data.preference_rows import Conversation
from gpuherd.qa.prompts.conversation import control_texts, defused, rendered, template_of, token_ids, without_system

_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\b")

Turns = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """The tokens of a conversation.

    Attributes:
        ids: all of them.
        learnt: which of them the assistant says in turns that are imitated; as long as ``ids``, some true.
    """

    ids: tuple[int, ...]
    learnt: tuple[bool, ...]


class ChatTokenizer:
    """Makes tokens of conversations by one tokenizer's chat template."""

    def __init__(self, tokenizer: Any):
        """Raises UsageError where there is no chat template, or no token that ends a turn."""
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError("the model's tokenizer has no chat template, and messages are written by one")
        self._tokenizer = tokenizer
        self._ends = [str(each) for each in tokenizer.convert_ids_to_tokens(list(end_tokens(tokenizer).ids))]
        if not self._ends:
            raise UsageError("the model's tokenizer has no token that ends a turn: no answer would end")
        # What others say can't begin or end a turn. What the assistant says may hold the marks of thoughts and calls,
        # which some tokenizers have as tokens of their own; it can't hold a special one.
        self._controls = control_texts(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {str(each) for each in tokenizer.all_special_tokens} | {
            each.content for each in added if each.special
        }
        self._special = tuple(each for each in self._controls if each in {text.strip() for text in special})

    def tokens(self, conversation: Conversation) -> ChatTokens:
        """The conversation as tokens. Raises UsageError with the turn where the template can't write it, or writes it
        otherwise than the policy would see it."""
        tools, turns = self._defused_turns(conversation.messages, conversation.tools)
        places = conversation.imitated
        text, without = self._written(turns, tools)
        if without is not None:  # the system's turn now stands in the user's
            turns, places = without, tuple(place - 1 for place in places)
        if self._tokenizer.is_fast and _MARKS_ANSWERS.search(template_of(self._tokenizer, tools)):
            return self._marked_by_template(turns, tools, places)
        spans = [self._span(turns, tools, text, place) for place in places]
        for (_, end), (begin, _) in itertools.pairwise([*spans, (len(text), 0)]):
            if end > begin:
                raise UsageError("the chat template ends a turn of the assistant by no end token: no answer would end")
        return self._cut(text, spans)

    def prompt(self, messages: Turns, tools: Sequence[Any]) -> tuple[int, ...]:
        """What stands before an answer, as ``tokens`` has it. Raises UsageError where the template can't write it."""
        schemas, turns = self._defused_turns(messages, tools)
        _, without = self._written(turns, schemas)
        return self._ids(self._render(turns if without is None else without, schemas, ready=True))

    def _defused_turns(self, messages: Turns, tools: Sequence[Any]) -> tuple[list[Any], Turns]:
        """Tools and turns with control tokens taken apart that are written out in them."""
        turns = []
        for each in messages:
            controls = self._special if each["role"] == "assistant" else self._controls
            turns.append({**self._defused(each, controls), "role": each["role"]})
        return [self._defused(each, self._controls) for each in tools], turns

    def _defused(self, value: Any, controls: tuple[str, ...]) -> Any:
        """With every control token in its texts taken apart."""
        if isinstance(value, str):
            return defused(value, controls)
        if isinstance(value, Mapping):
            return {key: self._defused(each, controls) for key, each in value.items()}
        return [self._defused(each, controls) for each in value] if isinstance(value, list | tuple) else value

    def _written(self, turns: Turns, tools: Sequence[Any]) -> tuple[str, Turns | None]:
        """The text of a conversation; and its turns without the system's, where the template refuses or drops that.
        Raises UsageError."""
        without = None
        if turns[0]["role"] == "system" and len(turns) > 1:
            with suppress(Exception):  # a template may raise anything
                text = rendered(self._tokenizer, turns, tools=tools, ready=False)
                if turns[0]["content"].strip() in text:
                    return text, None
            without = without_system([dict(each) for each in turns])
        return self._render(turns if without is None else without, tools, ready=False), without

    def _render(self, turns: Turns, tools: Sequence[Any], *, ready: bool) -> str:
        try:
            return rendered(self._tokenizer, turns, tools=tools, ready=ready)
        except Exception as problem:  # a template may raise anything
            reason = f"{type(problem).__name__}: {problem}"
            raise UsageError(f"the tokenizer's chat template can't put this conversation: {reason}") from None

    def _span(self, turns: Turns, tools: Sequence[Any], text: str, place: int) -> tuple[int, int]:
        """The places in the text where this turn begins and ends, its end token included. Raises UsageError."""
        before = self._render(turns[:place], tools, ready=True)
        if not text.startswith(before):
            raise UsageError(
                f"the chat template writes what stands before turn {place + 1} otherwise for an answer than in a "
                "conversation (a thought that it opens, tools, the last question): what would be learnt is not what "
                "the policy sees; give such rows as prompt and completion, or another template"
            )
        marker = MARKER
        while marker in text:
            marker += "s"
        marked = self._render(
            [*turns[:place], _with_marker(turns[place], marker), *turns[place + 1 :]], tools, ready=False
        )
        last = marked.find(marker)
        if last < len(before) or marked.replace(marker, "") != text:
            raise UsageError(f"the chat template does not write turn {place + 1} as it is said; it can't be imitated")
        ends = [(found, len(each)) for each in self._ends if (found := text.find(each, last)) >= 0]
        if not ends:
            raise UsageError(f"the chat template ends turn {place + 1} by no end token: no answer would end")
        found, length = min(ends)
        return len(before), found + length

    def _cut(self, text: str, spans: Sequence[tuple[int, int]]) -> ChatTokens:
        """The text's tokens, with a border wherever a span begins or ends.

        Where the characters at a border would melt into one token, both sides are tokenised apart, as they are when a
        policy answers.
        """
        ids: list[int] = []
        learnt: list[bool] = []
        begun, rest = 0, self._ids(text)
        taken = 0  # of ``rest``
        borders = [border for span in spans for border in span]
        for number, border in enumerate(borders):
            side = self._ids(text[begun:border])
            if rest[: len(side)] == side:
                new = side[taken:]
                taken = len(side)
            else:
                new, begun, taken = side[taken:], border, 0
                rest = self._ids(text[border:])
            ids += new
            learnt += [number % 2 == 1] * len(new)
        return ChatTokens(tuple(ids), tuple(learnt))

    def _ids(self, text: str) -> tuple[int, ...]:
        return token_ids(self._tokenizer, text, conversation=True)

    def _marked_by_template(self, turns: Turns, tools: Sequence[Any], places: Sequence[int]) -> ChatTokens:
        """By the template's own marks of what the assistant says. Raises UsageError."""
        found = self._tokenizer.apply_chat_template(
            list(turns),
            tools=list(tools) or None,
            chat_template=template_of(self._tokenizer, tools),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = tuple(found["input_ids"]), [bool(each) for each in found["assistant_masks"]]
        runs = [place for place, each in enumerate(mask) if each and not (place and mask[place - 1])]
        spoken = [place for place, each in enumerate(turns) if each["role"] == "assistant"]
        if len(runs) != len(spoken):
            raise UsageError(
                f"the chat template marks {len(runs)} turns by {{% generation %}}, and the assistant has {len(spoken)}"
            )
        ends = set(end_tokens(self._tokenizer).ids)
        for run, place in zip(runs, spoken, strict=True):
            turn = itertools.takewhile(lambda pair: pair[1], zip(ids[run:], mask[run:], strict=True))
            if place in places and not any(token in ends for token, _ in turn):
                raise UsageError(
                    f"the chat template leaves the end token of turn {place + 1} out of {{% generation %}}: no answer "
                    "would end"
                )
        begin = runs[spoken.index(places[0])]
        end = max(place for place, each in enumerate(mask) if each) + 1
        return ChatTokens(ids[:end], tuple(each and place >= begin for place, each in enumerate(mask[:end])))


def refuse_without_template(tokenizer_folder: Path, model: str) -> None:
    """Raises UsageError where a tokenizer's files have no chat template. Loads no tokenizer: for checks before anything
    is started. Files that can't be read here are left to loading."""
    if any((tokenizer_folder / name).exists() for name in ("chat_template.jinja", "additional_chat_templates")):
        return
    with suppress(OSError, ValueError):
        values = json.loads((tokenizer_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if isinstance(values, dict) and not values.get("chat_template"):
            raise UsageError(f"{model} has no chat template, and messages are written by one; take a chat model")


def _with_marker(turn: Mapping[str, Any], marker: str) -> dict[str, Any]:
    """The turn with a marker behind the last that it says: the name of its last call, else its content."""
    if calls := turn.get("tool_calls"):
        *others, last = calls
        function = {**last["function"], "name": f"{last['function']['name']}{marker}"}
        return {**turn, "tool_calls": [*others, {**last, "function": function}]}
    said = turn["content"].rstrip()
    return {**turn, "content": f"{said}{marker}{turn['content'][len(said) :]}"}
