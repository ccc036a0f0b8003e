"""Judges that follow a rule: in this process, without a model. Knows which rules there are, not what they say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gpuherd.qa.judging.items import Item, unasked
from gpuherd.qa.judging.lexical import RULES, Rule
from gpuherd.qa.judging.meta import Kind
from gpuherd.qa.judging.verdict import Judgment


@contextmanager
def rule_of(kind: Kind) -> Iterator[Rule]:
    """The rule of this kind of judge, with what it needs to work for as long as the block lasts.

    Applying ``math`` raises MissingExtra where formulas are to be compared and math-verify is not there.
    """
    if kind is not Kind.MATH:
        yield RULES[kind.value]
        return
    from gpuherd.qa.judging.formula_process import FormulaProcess
    from gpuherd.qa.judging.math_answers import math_judge

    with FormulaProcess() as process:
        yield Rule("math", None, lambda answer, question, _: math_judge(answer, question, process.equal))


def judge_by_rule(kind: Kind, items: Iterable[Item], threshold: float | None = None) -> Iterator[Judgment]:
    """What the rule says of each answer; ``threshold`` None is the rule's own."""
    with rule_of(kind) as rule:
        for item in items:
            if item.no_answer is not None:
                yield unasked(item)
                continue
            ruling = rule(item.text, item.question, threshold)
            yield Judgment(item.question.id, item.which, ruling.verdict, score=ruling.score, note=ruling.note)


def own_threshold(kind: Kind) -> float | None:
    """The score from which an answer is correct where no other is asked for; None: the rule has no score."""
    return None if kind is Kind.MATH else RULES[kind.value].threshold
