"""Styles of prompts: their wording is data, in files, and known by its hash. Pure but for reading these files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import UsageError
from gpuherd.options import did_you_mean
from gpuherd.qa.data.question_set import Example
from gpuherd.qa.record import Question

STYLES = ("short", "sentence", "detailed")
_NAMES = ("question", "context", "examples")
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")
_ALONE = re.compile(r"(?<![\w\\^}])" + _PLACE.pattern)  # not \boxed{answer}, x_{n} or \frac{a}{b}
_BETWEEN = "\n\n"  # an example and the next


@dataclass(frozen=True, slots=True)
class Style:
    """How is asked.

    Attributes:
        name: ``short``, or the file.
        instruction: what comes first; None where the whole is a template of the user's.
        template: with ``{question}``, ``{context}``, ``{examples}``: of the user's file; else None.
        context: how a context is put, with ``{context}``.
        question: how a question is put, with ``{question}``; an answer follows it behind a space.
        turn: how a question is put as a turn of a conversation, with ``{question}``.
        worked: whether examples are shown with the derivation of their answer, where they have one.
        stop: what ends an answer where the prompt is no conversation.
        sha256: of the file with all this, in hex.
    """

    name: str
    instruction: str | None
    template: str | None
    context: str
    question: str
    turn: str
    worked: bool
    stop: tuple[str, ...]
    sha256: str

    def asked(self, question: Question) -> str:
        """A question with its context, as it stands in front of its answer."""
        return self._context(question) + filled(self.question, {"question": question.question})

    def turn_of(self, question: Question) -> str:
        """A question with its context, as a turn of a conversation."""
        if self.template is not None:
            return self.of_template(question, "")
        return self._context(question) + filled(self.turn, {"question": question.question})

    def _context(self, question: Question) -> str:
        return "" if question.context is None else filled(self.context, {"context": question.context})

    def answered(self, example: Example) -> str:
        """The answer of an example."""
        return example.worked if self.worked and example.worked is not None else example.answer

    def shown(self, example: Example) -> str:
        """An example as plain text."""
        return f"{self.asked(example.question)} {self.answered(example)}"

    def plain(self, question: Question, examples: tuple[Example, ...]) -> str:
        """The whole prompt as plain text."""
        blocks = [self.shown(example) for example in examples]
        if self.instruction is not None:
            return _BETWEEN.join([self.instruction, *blocks, self.asked(question)])
        return self.of_template(question, _BETWEEN.join(blocks))

    @property
    def places_examples(self) -> bool:
        """Whether there is a place for examples in the text itself."""
        return self.template is None or "{examples}" in self.template

    def of_template(self, question: Question, examples: str) -> str:
        """The user's template, filled in."""
        values = {"question": question.question, "context": question.context or "", "examples": examples}
        return filled(self.template or "", values)


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with ``{name}`` replaced, in one pass: what is put in is never looked at for names again.

    >>> filled("{question} {}", {"question": "what is {context}?"})
    'what is {context}? {}'
    """
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), template)


def style_named(name: str) -> Style:
    """The style of this name, or that of a file. Raises UsageError."""
    if name in STYLES:
        data = (Path(__file__).with_name("styles") / f"{name}.json").read_bytes()
        said = json.loads(data)
        return Style(
            name,
            said["instruction"],
            None,
            said["context"],
            said["question"],
            said["turn"],
            said["worked"],
            tuple(said["stop"]),
            hashlib.sha256(data).hexdigest(),
        )
    return _of_file(Path(name).expanduser())


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
    blocks = style_named("short")
    sha256 = hashlib.sha256(data).hexdigest()
    return Style(str(path), None, text.rstrip("\n"), blocks.context, blocks.question, blocks.turn, False, (), sha256)
