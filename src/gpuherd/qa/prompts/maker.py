"""From a question to the token ids that a model is given: styles, examples, contexts that are cut.

Needs a tokenizer, no model. The wording of styles is in files, and each style is known by its hash.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.models.names import user_path
from gpuherd.options import did_you_mean, option
from gpuherd.qa.data.questions import FewShotExample
from gpuherd.qa.prompts.conversation import Turn, control_texts, defused, template_sha256, templated, token_ids
from gpuherd.qa.record import Prompted, Question
from gpuherd.qa.span import knows_thoughts

ChatRule = Literal["auto", "yes", "no"]
LongContext = Literal["cut", "cut-start", "cut-middle", "refuse"]


# An option of a group.
_prompt = partial(option, group="prompt")


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How a question becomes a prompt."""

    prompt: str = _prompt(
        "short",
        help="style of the prompt: short, sentence or detailed; or a text file with {question}, and optionally "
        "{context} and {examples}",
        metavar="STYLE|FILE",
    )
    chat: ChatRule = _prompt(
        "auto",
        help="apply the tokenizer's chat template; auto: if it has one",
        choices=("auto", "yes", "no"),
        alone="yes",
    )
    long_context: LongContext = _prompt(
        "cut",
        help="a context that is too long for the model: cut drops its end, cut-start its beginning, cut-middle its "
        "middle; refuse: the question is not asked. Each is counted",
        choices=("cut", "cut-start", "cut-middle", "refuse"),
    )


# ---- styles ----------------------------------------------------------------------------------------------------------

STYLES = ("short", "sentence", "detailed")
_NAMES = ("question", "context", "examples")
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")
_ALONE = re.compile(r"(?<![\w\\^}])" + _PLACE.pattern)  # not \boxed{answer}, x_{n} or \frac{a}{b}
_BETWEEN = "\n\n"  # an example and the next


@dataclass(frozen=True, slots=True)
class Style:
    """The wording of a prompt.

    Attributes:
        name: ``short``, or the file.
        instruction: the beginning; None if the whole prompt is a template of the user's.
        context: the form of a context, with ``{context}``.
        question: the form of a question, with ``{question}``; the answer follows it after a space.
        turn: the form of a question in a conversation, with ``{question}``.
        worked: whether examples have the derivation of their answer, if there is one.
        stop: strings that end an answer unless the prompt is a conversation.
        sha256: of the style's file, in hex.
        template: the user's file with ``{question}``, ``{context}``, ``{examples}``, or None.
    """

    name: str
    instruction: str | None
    context: str
    question: str
    turn: str
    worked: bool
    stop: tuple[str, ...]
    sha256: str
    template: str | None = None

    def question_text(self, question: Question) -> str:
        """A question with its context, as it precedes its answer."""
        return self._context(question) + filled(self.question, {"question": question.question})

    def turn_of(self, question: Question) -> str:
        """A question with its context, as a turn of a conversation."""
        if self.template is not None:
            return self.of_template(question, "")
        return self._context(question) + filled(self.turn, {"question": question.question})

    def _context(self, question: Question) -> str:
        return "" if question.context is None else filled(self.context, {"context": question.context})

    def answer_text(self, example: FewShotExample) -> str:
        """The answer of an example."""
        return example.worked if self.worked and example.worked is not None else example.answer

    def example_text(self, example: FewShotExample) -> str:
        """An example as plain text."""
        return f"{self.question_text(example.question)} {self.answer_text(example)}"

    def prompt_text(self, question: Question, examples: tuple[FewShotExample, ...]) -> str:
        """The prompt as plain text."""
        blocks = [self.example_text(example) for example in examples]
        if self.instruction is not None:
            return _BETWEEN.join([self.instruction, *blocks, self.question_text(question)])
        return self.of_template(question, _BETWEEN.join(blocks))

    @property
    def places_examples(self) -> bool:
        """Whether the text has a place for examples."""
        return self.template is None or "{examples}" in self.template

    def of_template(self, question: Question, examples: str) -> str:
        """The user's template, filled in."""
        values = {"question": question.question, "context": question.context or "", "examples": examples}
        return filled(self.template or "", values)


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with ``{name}`` replaced, in one pass: names inside the values are not replaced.

    >>> filled("{question} {}", {"question": "what is {context}?"})
    'what is {context}? {}'
    """
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), template)


def style_named(name: str) -> Style:
    """The style of this name, or of this file. Raises UsageError."""
    if name in STYLES:
        data = (Path(__file__).with_name("styles") / f"{name}.json").read_bytes()
        parts = json.loads(data)
        return Style(name, **{**parts, "stop": tuple(parts["stop"])}, sha256=hashlib.sha256(data).hexdigest())
    return _of_file(user_path(name))


def _of_file(path: Path) -> Style:
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        hint = did_you_mean(str(path), STYLES, f"it is one of {', '.join(STYLES)}, or a file")
        raise UsageError(f"--prompt {path}: there is no such style or file{hint}") from None
    except UnicodeDecodeError as problem:
        raise UsageError(f"--prompt {path}: bytes that are no UTF-8 (byte {problem.start + 1})") from None
    except OSError as problem:
        raise UsageError(f"--prompt {path} can't be read: {problem.strerror}") from None
    names = set(_PLACE.findall(text))
    unknown = sorted(set(_ALONE.findall(text)) - set(_NAMES))
    if unknown:
        raise UsageError(f"--prompt {path}: {{{unknown[0]}}} is none of {{question}}, {{context}} and {{examples}}")
    if "question" not in names:
        raise UsageError(f"--prompt {path}: there is no {{question}} in it")
    sha256, template = hashlib.sha256(data).hexdigest(), text.rstrip("\n")
    plain = replace(style_named("short"), instruction=None, worked=False, stop=())
    return replace(plain, name=str(path), sha256=sha256, template=template)


# ---- contexts that are too long --------------------------------------------------------------------------------------

_LEFT_OUT = "\n[…]\n"  # in place of the middle
_LONGEST_WORD = 40  # most characters that are dropped so as not to cut a word in two


def cut_context(context: str, characters: int, rule: LongContext) -> str:
    """This many characters of a context, or a few fewer so that no word is cut.

    >>> cut_context("one two three", 9, "cut"), cut_context("one two three", 9, "cut-start")
    ('one two', 'two three')
    """
    if characters >= len(context):
        return context
    if rule == "cut-start":
        return _end(context, characters)
    if rule == "cut-middle":
        beginning, end = _beginning(context, (characters + 1) // 2), _end(context, characters // 2)
        return f"{beginning}{_LEFT_OUT}{end}" if beginning or end else ""
    return _beginning(context, characters)


def largest(fits: Callable[[int], bool], most: int, guess: int) -> int:
    """A number n that fits while n + 1 does not, by bisection; 0 is assumed to fit, and ``most`` not to.

    The search starts around the guess, so that no trial is much larger than the result. If fitting is not quite
    monotone, as with tokens, the result still fits.
    """
    low, high = 0, most
    trial = min(max(guess, 1), most - 1)
    step = max(trial // 8, 1)
    while high - low > 1:
        if fits(trial):
            low = trial
        else:
            high = trial
        if low == 0 or high == most:  # one side of the guess is still open: move towards it, in growing steps
            trial = max(high - step, 1) if low == 0 else min(low + step, most - 1)
            step *= 2
        if (low > 0 and high < most) or not low < trial < high:
            trial = (low + high) // 2
    return low


def _beginning(text: str, characters: int) -> str:
    part = text[:characters]
    if part and not text[characters].isspace():
        words, space, last = part.rpartition(" ")
        part = words if space and len(last) < _LONGEST_WORD else part
    return part.rstrip()


def _end(text: str, characters: int) -> str:
    part = text[len(text) - characters :] if characters else ""
    if part and not text[-characters - 1].isspace():
        first, space, words = part.partition(" ")
        part = words if space and len(first) < _LONGEST_WORD else part
    return part.lstrip()


# ---- prompts ---------------------------------------------------------------------------------------------------------


class PromptTooLong(GpuherdError):
    """A question that is too long for the model: it has no context that may be cut."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt, ready for a model.

    Attributes:
        text: as it was given to the tokenizer.
        token_ids: special tokens included.
        cut: how many tokens of the context were left out.
    """

    text: str
    token_ids: tuple[int, ...]
    cut: int = 0

    @property
    def prompted(self) -> Prompted:
        """The prompt as the record of an answer has it."""
        ids = struct.pack(f"<{len(self.token_ids)}i", *self.token_ids)
        return Prompted(hashlib.sha256(ids).hexdigest(), len(self.token_ids), self.cut)


class PromptMaker:
    """Makes the prompts of a run.

    Attributes:
        style: the wording.
        chat: whether prompts are conversations by the tokenizer's template.
        stop: default strings that end an answer of this style; none in a conversation.
    """

    def __init__(
        self, options: PromptOptions, examples: Sequence[FewShotExample], tokenizer: Any, most_tokens: int | None = None
    ):
        """Raises UsageError if the style, the examples and the tokenizer contradict each other.

        Args:
            most_tokens: maximum tokens of a prompt: the model's positions less the new tokens. None: no limit.
        """
        if most_tokens is not None and most_tokens < 1:
            raise UsageError(f"no room for a prompt: {most_tokens} tokens are left of the model's positions")
        self.style = style_named(options.prompt)
        self.chat = _is_chat(options, tokenizer)
        self.stop = () if self.chat else self.style.stop
        self._options = options
        self._tokenizer = tokenizer
        self._most_tokens = most_tokens
        self._controls = control_texts(tokenizer)
        self._examples = tuple(self._defused_example(each) for each in examples)
        if examples and not self.chat and not self.style.places_examples:
            raise UsageError(f"--prompt {self.style.name} has no place for examples: write {{examples}} where they go")

    @property
    def thinks(self) -> bool:
        """Whether these prompts are conversations by a template that has thoughts."""
        return self.chat and knows_thoughts(str(self._tokenizer.chat_template))

    @property
    def identity(self) -> dict[str, Any]:
        """Everything but the questions and the vocabulary on which prompts depend, as JSON values."""
        return {
            "style": self.style.name,
            "style_sha256": self.style.sha256,
            "chat": self.chat,
            "chat_template_sha256": template_sha256(self._tokenizer) if self.chat else None,
            "examples": [each.question.id for each in self._examples],
            "long_context": self._options.long_context,
            "most_tokens": self._most_tokens,
        }

    def prompt(self, question: Question) -> TokenizedPrompt:
        """The prompt of a question, its context cut as the options say. Raises PromptTooLong."""
        question = self._defused(question)
        full = self._tokenized(question)
        most = self._most_tokens
        if most is None or len(full.token_ids) <= most:
            return full
        if question.context is None or self._options.long_context == "refuse":
            raise PromptTooLong(f"its prompt has {len(full.token_ids)} tokens, and there is room for {most}")
        bare = self._tokenized(replace(question, context=None))
        if len(bare.token_ids) > most:
            raise PromptTooLong(
                f"even without its context its prompt has {len(bare.token_ids)} tokens, and there is room for {most}"
            )
        room = (most - len(bare.token_ids)) / (len(full.token_ids) - len(bare.token_ids))
        return self._cut(question, question.context, full, most, round(room * len(question.context)))

    def _cut(self, question: Question, context: str, full: TokenizedPrompt, most: int, guess: int) -> TokenizedPrompt:
        """The prompt with as much of the context as fits: about ``guess`` characters."""

        def with_part(characters: int) -> TokenizedPrompt:
            part = cut_context(context, characters, self._options.long_context)
            return self._tokenized(replace(question, context=part or None))

        kept = largest(lambda characters: len(with_part(characters).token_ids) <= most, len(context), guess)
        fitting = with_part(kept)
        return replace(fitting, cut=len(full.token_ids) - len(fitting.token_ids))

    def _tokenized(self, question: Question) -> TokenizedPrompt:
        if self.chat:
            text = templated(self._tokenizer, turns(self.style, question, self._examples))
        else:
            text = self.style.prompt_text(question, self._examples)
        return TokenizedPrompt(text, token_ids(self._tokenizer, text, conversation=self.chat))

    def _defused(self, question: Question) -> Question:
        context = None if question.context is None else defused(question.context, self._controls)
        return replace(question, question=defused(question.question, self._controls), context=context)

    def _defused_example(self, example: FewShotExample) -> FewShotExample:
        question = self._defused(example.question)
        answers = tuple(defused(answer, self._controls) for answer in question.answers)
        worked = None if example.worked is None else defused(example.worked, self._controls)
        return FewShotExample(replace(question, answers=answers), worked)


def turns(style: Style, question: Question, examples: Sequence[FewShotExample]) -> list[Turn]:
    """The conversation up to the answer: instruction, examples as turns, question.

    A user's template with ``{examples}`` in it is one turn.
    """
    if style.template is not None and style.places_examples:
        return [{"role": "user", "content": style.prompt_text(question, tuple(examples))}]
    conversation: list[Turn] = [] if style.instruction is None else [{"role": "system", "content": style.instruction}]
    for example in examples:
        conversation.append({"role": "user", "content": style.turn_of(example.question)})
        conversation.append({"role": "assistant", "content": style.answer_text(example)})
    return [*conversation, {"role": "user", "content": style.turn_of(question)}]


def _is_chat(options: PromptOptions, tokenizer: Any) -> bool:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if options.chat == "yes" and not has_template:
        raise UsageError("--chat yes: this model's tokenizer has no chat template; --chat no asks in plain text")
    return has_template and options.chat != "no"
