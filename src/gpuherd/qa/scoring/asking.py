"""What a language model is asked: whether its answer is true, and whether one answer follows from another.

The wordings are data, with a digest that goes into the name of what is measured by them. Texts of questions and
answers are put on one line each, and what the tokenizer would read as a control token in them is taken apart, so that
no answer can end its line and go on with another. Knows tokenizers, no models.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.lm.backend import PromptTokens
from gpuherd.lm.tokens import spellings, without_longer
from gpuherd.qa.encoders.entailment import Asked, Relation
from gpuherd.qa.prompts.conversation import templated
from gpuherd.qa.prompts.special_tokens import control_texts, defused
from gpuherd.qa.record import Answered, Generation
from gpuherd.qa.scoring.weighing import Weigher, Word
from gpuherd.qa.span import Span, part_of, with_closed_thought

# LM-Polygraph's PTrue asks so and scores the word; jlko/semantic_uncertainty asks so and scores the letter. Both follow
# Kadavath et al. 2022 (arXiv 2207.05221), section 3.
_OPTIONS = {"true": " (A) True\n (B) False", "letter": "A) True\nB) False"}
_IDEAS = {"true": "Here are some ideas that were brainstormed:", "letter": "Brainstormed Answers:"}
_ASK = "Is the possible answer:\n{options}\nThe possible answer is:"
_ENTAILMENT = """\
We are evaluating answers to this question: {question}
Here are two possible answers:
Possible answer 1: {premise}
Possible answer 2: {hypothesis}
Does possible answer 1 semantically entail possible answer 2? Respond with one word: entailment, contradiction, or \
neutral."""
_CUE = "Response:"
ENTAILMENT_SHA256 = hashlib.sha256(f"{_ENTAILMENT}\n{_CUE}".encode()).hexdigest()


def p_true_sha256(form: str) -> str:
    """The digest of the wording of this form."""
    return hashlib.sha256("\0".join((_IDEAS[form], _ASK, _OPTIONS[form])).encode()).hexdigest()


@dataclass(frozen=True)
class PTruePrompts:
    """Prompts that ask whether the main answer is true.

    Attributes:
        tokenizer: of the model that is asked.
        form: ``true`` or ``letter``.
        ideas: show the samples before the answer.
        examples: questions with their label, shown before every other question.
        span: which part of a generation is shown.
    """

    tokenizer: Any
    form: str
    ideas: bool = False
    examples: tuple[tuple[Answered, bool], ...] = ()
    span: Span = "answer"

    @cached_property
    def shown(self) -> frozenset[int]:
        """The numbers of the questions that are examples; they are not asked about."""
        return frozenset(each.number for each, _ in self.examples)

    @cached_property
    def words(self) -> tuple[Word, Word]:
        """The ways to write "true", and its opposite. Raises UsageError where this tokenizer can't tell them apart."""
        if self.form == "true":
            found = spellings(self.tokenizer, "True"), spellings(self.tokenizer, "False")
        else:
            # Not in lower case: "a" is a word.
            found = _as_it_is(self.tokenizer, "A"), _as_it_is(self.tokenizer, "B")
        if len(without_longer((*found[0], *found[1]))) < len(found[0]) + len(found[1]):
            raise UsageError("the tokenizer of this model writes both options of P(True) with the same tokens")
        return found

    @cached_property
    def _controls(self) -> tuple[str, ...]:
        return control_texts(self.tokenizer)

    def text(self, answered: Answered) -> str:
        """The whole prompt; plain text, as in the codes that it follows, also for models that converse."""
        apart = "\n" if self.form == "letter" else "\n\n"  # as jlko has it
        shown = [f"{self._asked(each)} {self._word(label)}{apart}" for each, label in self.examples]
        return "".join((*shown, self._asked(answered)))

    def tokens(self, answered: Answered) -> PromptTokens:
        """The prompt as tokens."""
        return PromptTokens(answered.question.id, plain_ids(self.tokenizer, self.text(answered)))

    def _asked(self, answered: Answered) -> str:
        lines = [f"Question: {self._plain(answered.question.question)}"]
        if self.ideas:
            ideas = [self._said(each) for each in answered.samples]
            if self.form == "letter":
                # jlko's begin on the line of their heading, and have the answer itself among them.
                lines.append(f"{_IDEAS[self.form]} " + "\n".join((*ideas, self._said(answered.main))))
            else:
                lines += [_IDEAS[self.form], *ideas]
        lines += [f"Possible answer: {self._said(answered.main)}", _ASK.format(options=_OPTIONS[self.form])]
        return "\n".join(lines)

    def _word(self, label: bool) -> str:
        return ("True" if label else "False") if self.form == "true" else ("A" if label else "B")

    def _said(self, generation: Generation) -> str:
        return self._plain(part_of(generation, self.span).text)

    def _plain(self, text: str) -> str:
        return one_line(text, self._controls)


class EntailmentPrompts:
    """Prompts that ask whether one answer follows from another, in the tokenizer's chat template where it has one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._controls = control_texts(tokenizer)

    def text(self, asked: Asked) -> str:
        """What is asked, without a chat template around it."""
        question, premise, hypothesis = (one_line(text, self._controls) for text in asked)
        return _filled(_ENTAILMENT, {"question": question, "premise": premise, "hypothesis": hypothesis})

    def tokens(self, asked: Asked) -> tuple[int, ...]:
        """The prompt as token ids."""
        text = self.text(asked)
        if getattr(self._tokenizer, "chat_template", None):
            # Where the template opens a thought the words would else be weighed in the middle of it.
            whole = with_closed_thought(templated(self._tokenizer, [{"role": "user", "content": text}]))
            return tuple(self._tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"])
        return plain_ids(self._tokenizer, f"{text}\n{_CUE}")


class AskedEntailment:
    """Entailment by a language model: it is asked, and its words are weighed; nothing is decoded.

    As Farquhar et al. 2024 (Nature 630) ask GPT-4 or LLaMA, but for the reading: the three words' probabilities,
    divided by what they have together.

    Args:
        masses: is given what they have together, for each that is asked.
    """

    def __init__(self, weigher: Weigher, masses: list[float]) -> None:
        self._weigher = weigher
        tokenizer = weigher.model.tokenizer
        self._prompt = EntailmentPrompts(tokenizer)
        self._words = [spellings(tokenizer, word) for word in ("entailment", "neutral", "contradiction")]
        self._masses = masses

    def relations(self, asked: Sequence[Asked]) -> list[Relation | None]:
        """The relation of each, in the order asked; equal ones are asked once."""
        unique = list(dict.fromkeys(asked))
        prompts = [PromptTokens(str(number), self._prompt.tokens(each)) for number, each in enumerate(unique)]
        weighed = self._weigher.weigh(prompts, self._words)
        found = {each: self._relation(logs) for each, logs in zip(unique, weighed, strict=True)}
        return [found[each] for each in asked]

    def _relation(self, logs: tuple[float | None, ...] | None) -> Relation | None:
        if logs is None or all(each is None for each in logs):
            return None
        highest = max(each for each in logs if each is not None)
        parts = [0.0 if each is None else math.exp(each - highest) for each in logs]
        whole = math.fsum(parts)
        self._masses.append(min(1.0, whole * math.exp(highest)))
        entailment, neutral, contradiction = (part / whole for part in parts)
        return Relation(entailment, neutral, contradiction)


def plain_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The tokens of a text with what the tokenizer puts before any (BOS, in most), without what a few put behind it."""
    ids = tuple(tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids


def one_line(text: str, controls: Sequence[str]) -> str:
    """The text on one line, single spaces, control tokens taken apart.

    >>> one_line("Paris\\nIs it? </s>", ["</s>"])
    'Paris Is it? < /s>'
    """
    return defused(" ".join(text.split()), controls)


def _as_it_is(tokenizer: Any, word: str) -> Word:
    ids = (tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (f" {word}", word))
    return without_longer(each for each in ids if each)


def _filled(form: str, values: Mapping[str, str]) -> str:
    """The form with its slots filled at once: what stands in a value is no slot."""
    import re

    return re.sub(r"\{(\w+)\}", lambda slot: values[slot[1]], form)
