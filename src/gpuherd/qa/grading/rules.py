"""Judges that only compare words: exact, contains, squad (F1), rouge (ROUGE-L). Pure functions, no model.

Each compares with every reference and takes the best; a reference that is a number is compared as one: 1500 is 1500.00,
and 1.5 is not 15. An answer that says nothing, or only that it doesn't know, is
not attempted; but a reference that says so ("unknown") is a reference like any other.
"""

from __future__ import annotations

import logging
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gpuherd.errors import GpuherdError
from gpuherd.qa.grading.verdicts import Ruling, Verdict
from gpuherd.qa.measures import rouge
from gpuherd.qa.numbers import number_of, spelt
from gpuherd.qa.record import Question
from gpuherd.runs.console import warn_once

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LexicalRule:
    """A judge by words.

    Attributes:
        name: as the user says it.
        threshold: the score from which an answer is correct, where no other is given; None: the rule has no score.
        judge: answer, question, threshold -> ruling.
    """

    name: str
    threshold: float | None
    judge: Callable[[str, Question, float], Ruling]

    def __call__(self, answer: str, question: Question, threshold: float | None = None) -> Ruling:
        """The ruling on an answer; ``threshold`` None is the rule's own.

        An answer that the rule did not foresee is unparsed, and ends no judging. Raises GpuherdError for faults that
        are not the answer's.
        """
        try:
            return self.judge(answer, question, threshold if threshold is not None else self.threshold or 0.0)
        except GpuherdError:
            raise
        except Exception as problem:
            message = "the rule %s failed for an answer to %s; it is unparsed"
            warn_once(logger, f"rule {self.name}", problem, message, self.name, question.id)
            return Ruling(Verdict.UNPARSED, None, f"the rule {self.name} failed: {type(problem).__name__}: {problem}")


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
# Whole answers that attempt nothing, in lower case, without punctuation and with straight words ("dont").
_OPENING = r"(?:(?:(?:i am |im )?(?:sorry|afraid)|unfortunately|well|hmm)(?: but)? )?"
_KNOWING = "|".join(
    (
        r"i (?:really |just |honestly )?(?:dont|do not) (?:really )?know|dont know|idk",
        r"(?:i have )?no idea",
        r"(?:(?:i am|im) )?(?:not sure|unsure|uncertain|not certain)",
        r"i (?:cannot|cant|can not) (?:say|tell|answer)",
        # "the" is gone by then
        r"(?:(?:it is|its|answer is) )?(?:unknown|not known|unanswerable)",
        r"(?:(?:there is|theres) )?no answer|(?:(?:it|answer) )?cannot be (?:determined|answered)",
    )
)
_WHAT = r"(?:that|this|it|answer|question|(?:this|that) question)"
_OBJECT = rf"(?:(?: about| of)?(?: to)?(?: answer)?(?: to)? {_WHAT})?(?: sorry)?"
_NO_ATTEMPT = re.compile(rf"{_OPENING}(?:{_KNOWING}){_OBJECT}")


def normalised(text: str) -> str:
    """A text as SQuAD compares it: lower case, without ASCII punctuation and English articles, single spaces.

    Rajpurkar et al. 2016, the official evaluation script. Where nothing is left (the answer "A", or "?"), that much of
    the text is kept that isn't nothing: the script would find "A" and "the" equal. Letters with accents are the same
    however they are put together (Unicode's form NFC), which the script does not see to.

    >>> normalised("The  Eiffel Tower!"), normalised("A"), normalised("?")
    ('eiffel tower', 'a', '?')
    """
    lowered = unicodedata.normalize("NFC", text).lower()
    plain = " ".join(lowered.translate(_PUNCTUATION).split())
    return " ".join(_ARTICLE.sub(" ", plain).split()) or plain or " ".join(lowered.split())


def attempts_nothing(answer: str, question: Question) -> bool:
    """Whether an answer is empty or only says that it doesn't know, where no reference says the same.

    The whole answer has to be of such a form: "I don't know, perhaps Paris" is an attempt.
    """
    words = normalised(answer)
    if not words or words in {normalised(each) for each in question.answers}:
        return not words
    return _NO_ATTEMPT.fullmatch(words.replace("’", "")) is not None or answer.strip().lower().rstrip(".") == "n/a"


def exact(answer: str, question: Question, threshold: float = 0.0) -> Ruling:  # noqa: ARG001
    """Correct where the normalised answer is a normalised reference."""
    right = any(normalised(own) == normalised(each) for own, each in _pairs(answer, question))
    return _ruled(answer, question, right)


def contains(answer: str, question: Question, threshold: float = 0.0) -> Ruling:  # noqa: ARG001
    """Correct where a reference's words stand in the answer, whole and in this order. "Not Paris" contains "Paris"."""
    right = any(f" {normalised(each)} " in f" {normalised(own)} " for own, each in _pairs(answer, question))
    return _ruled(answer, question, right)


def squad(answer: str, question: Question, threshold: float = 0.5) -> Ruling:
    """Correct where the best F1 of words is at least the threshold."""
    score = max(f1(own, each) for own, each in _pairs(answer, question))
    return _ruled(answer, question, score >= threshold, score)


def rouge_judge(answer: str, question: Question, threshold: float = 0.3) -> Ruling:
    """Correct where the best ROUGE-L F1 is at least the threshold; unparsed where no reference has words for it."""
    pairs = [(rouge.words(own), words) for own, each in _pairs(answer, question) if (words := rouge.words(each))]
    if not pairs:
        return Ruling(Verdict.UNPARSED, None, "ROUGE-L knows ASCII letters and digits; no reference has any")
    score = max(rouge.rouge_l_of_words(own, each) for own, each in pairs)
    return _ruled(answer, question, score >= threshold, score)


def f1(first: str, second: str) -> float:
    """F1 of the normalised words of two texts, each counted as often as it stands there; in [0, 1].

    Rajpurkar et al. 2016, the official evaluation script.
    """
    left, right = normalised(first).split(), normalised(second).split()
    if not left or not right:
        return float(left == right)
    same = sum((Counter(left) & Counter(right)).values())
    return 2 * same / (len(left) + len(right))


def _pairs(answer: str, question: Question) -> Iterator[tuple[str, str]]:
    """The answer with each reference; with a reference that is a number both have their numbers spelt alike."""
    for each in question.answers:
        yield (spelt(answer), spelt(each)) if number_of(each) is not None else (answer, each)


def _ruled(answer: str, question: Question, right: bool, score: float | None = None) -> Ruling:
    if attempts_nothing(answer, question):
        return Ruling(Verdict.NOT_ATTEMPTED, score)
    return Ruling(Verdict.CORRECT if right else Verdict.INCORRECT, score)


RULES: Mapping[str, LexicalRule] = {
    rule.name: rule
    for rule in (
        LexicalRule("exact", None, exact),
        LexicalRule("contains", None, contains),
        LexicalRule("squad", 0.5, squad),
        LexicalRule("rouge", 0.3, rouge_judge),
    )
}
