"""What a job measures of a batch of questions: a line a question, by an encoder or a language model. Knows no files.

A value that can't be had is null, with the reason in ``why``: a text too long for the model, say.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from gpuherd.lm.backend import PromptTokens
from gpuherd.qa.encoders.entailment import Asked, Entailment
from gpuherd.qa.encoders.relevance import Pieces, relevances, with_question
from gpuherd.qa.encoders.similarity import Similarity
from gpuherd.qa.record import Answered, Generation
from gpuherd.qa.scoring.asking import PTruePrompts
from gpuherd.qa.scoring.weighing import Weigher
from gpuherd.qa.span import Span, is_only_thought, part_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOO_LONG = "a text is too long for the model"
EXAMPLE = "the question is one of the examples"
NO_ANSWER = "there is no answer"
NOT_FINITE = "the model gives no finite number"

Measure = Callable[[Sequence[Answered]], list[str]]


def line(answered: Answered, values: Mapping[str, Any], why: str | None = None) -> str:
    """A question's line."""
    reason = {} if why is None else {"why": why}
    named = {"number": answered.number, "id": answered.question.id, **values, **reason}
    return json.dumps(named, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def measure_relevance(model: Similarity, answered: Sequence[Answered], which: str, span: Span) -> list[str]:
    """``relevance``: for the greedy answer (``which`` is greedy) or each sample a list of a number a token."""
    chosen = [_generations(each, which) for each in answered]
    flat = [
        Pieces(each.question.question, part_of(generation, span).pieces)
        for each, generations in zip(answered, chosen, strict=True)
        for generation in generations
    ]
    unique = list(dict.fromkeys(flat))
    found = dict(zip(unique, relevances(model, unique), strict=True))
    values = iter([found[each] for each in flat])
    lines = []
    for each, generations in zip(answered, chosen, strict=True):
        lists = [next(values) for _ in generations]
        whole = all(relevance is not None for relevance in lists)
        why = None if whole and lists else (TOO_LONG if lists else NO_ANSWER)
        shown = [[_short(value) for value in relevance or ()] for relevance in lists]
        lines.append(line(each, {"relevance": None if why else shown}, why))
    return lines


def measure_similarity(model: Similarity, answered: Sequence[Answered], span: Span, *, question: bool) -> list[str]:
    """``matrix``: g of each pair of samples, the mean of both orders; of equal texts g(a, a)."""
    texts = [_texts(each, span, question) for each in answered]
    pairs = list(dict.fromkeys((one, other) for each in texts for one, other in product(dict.fromkeys(each), repeat=2)))
    found = dict(zip(pairs, model.of_pairs(pairs), strict=True))
    lines = []
    for each, said in zip(answered, texts, strict=True):
        values = [[_mean(found[one, other], found[other, one]) for other in said] for one in said]
        why = _why(said, any(value is None for row in values for value in row))
        lines.append(line(each, {"matrix": None if why else values}, why))
    return lines


def measure_entailment(model: Entailment, answered: Sequence[Answered], span: Span) -> list[str]:
    """``texts``: for each sample the place of its text among the different ones; ``relations``: of each ordered pair of
    these p(entailment), p(neutral), p(contradiction); null of a text with itself."""
    texts = [_texts(each, span, False) for each in answered]
    unique = [list(dict.fromkeys(each)) for each in texts]
    asked = [
        Asked(each.question.question, premise, hypothesis)
        for each, different in zip(answered, unique, strict=True)
        for premise, hypothesis in product(different, repeat=2)
        if premise != hypothesis
    ]
    relations = iter(model.relations(asked))
    lines = []
    for each, said, different in zip(answered, texts, unique, strict=True):
        table: list[list[list[float] | None]] = []
        missing = False
        for premise in different:
            row: list[list[float] | None] = []
            for hypothesis in different:
                relation = None if premise == hypothesis else next(relations)
                missing |= relation is None and premise != hypothesis
                row.append(
                    None
                    if relation is None
                    else [_short(each) for each in (relation.entailment, relation.neutral, relation.contradiction)]
                )
            table.append(row)
        why = _why(said, missing)
        places = [different.index(text) for text in said]
        lines.append(line(each, {"texts": places, "relations": None if why else table}, why))
    return lines


def measure_p_true(
    weigher: Weigher, prompts: PTruePrompts, answered: Sequence[Answered], masses: list[float]
) -> list[str]:
    """``log_p``: log of the probability of the word or letter that says "true"; ``mass``: of it and its opposite, which
    ``masses`` is given too."""
    why_not = [_why_not(prompts, each) for each in answered]
    asked = [prompts.tokens(each) if why is None else None for each, why in zip(answered, why_not, strict=True)]
    found = iter(weigher.weigh([each for each in asked if each is not None], prompts.words))
    lines = []
    for each, prompt, why_none in zip(answered, asked, why_not, strict=True):
        weighed = None if prompt is None else next(found)
        if weighed is None or weighed[0] is None:
            why = why_none or (TOO_LONG if weighed is None else NOT_FINITE)
            lines.append(line(each, {"log_p": None, "mass": None}, why))
            continue
        mass = math.fsum(math.exp(each) for each in weighed if each is not None)
        masses.append(mass)
        lines.append(line(each, {"log_p": min(0.0, weighed[0]), "mass": _short(min(1.0, mass))}))
    return lines


def _why_not(prompts: PTruePrompts, answered: Answered) -> str | None:
    """Why the model is not asked about this answer."""
    if answered.number in prompts.shown:
        return EXAMPLE
    no_answer = prompts.span == "answer" and is_only_thought(answered.main)
    return NO_ANSWER if answered.main.is_nan or no_answer else None


def measure_hidden(
    states: Callable[[Sequence[PromptTokens]], NDArray[np.float32]],
    prompts: Sequence[PromptTokens],
    answered: Sequence[Answered],
) -> list[str]:
    """``state``: the last layer's state of the prompt's last token, little-endian float32 in base64; null where not all
    of it is finite, as where a model overflows its half precision."""
    import numpy as np

    lines = []
    for each, row in zip(answered, states([prompts[each.number] for each in answered]), strict=True):
        finite = bool(np.isfinite(row).all())
        state = base64.b64encode(row.astype("<f4").tobytes()).decode("ascii") if finite else None
        lines.append(line(each, {"state": state}, None if finite else NOT_FINITE))
    return lines


def state_of(text: str) -> NDArray[np.float32]:
    """The state that ``measure_hidden`` wrote, (d,) float32."""
    import numpy as np

    found: NDArray[np.float32] = np.frombuffer(base64.b64decode(text), dtype="<f4")
    return found


def _generations(answered: Answered, which: str) -> tuple[Generation, ...]:
    if which == "samples":
        return answered.samples
    return () if answered.greedy is None else (answered.greedy,)


def _texts(answered: Answered, span: Span, question: bool) -> list[str]:
    stripped = [part_of(each, span).text for each in answered.samples]
    return [with_question(answered.question.question, each) for each in stripped] if question else stripped


def _why(texts: Sequence[str], missing: bool) -> str | None:
    return NO_ANSWER if not texts else TOO_LONG if missing else None


def _mean(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else _short((one + other) / 2)


def _short(value: float) -> float:
    """The same to float32, which is what models compute in, in as few digits as are needed for that."""
    single: float = struct.unpack("<f", struct.pack("<f", value))[0]
    for digits in (6, 7, 8):
        short = float(f"{single:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", short))[0] == single:
            return short
    return single
