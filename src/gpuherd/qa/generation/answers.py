"""What an engine gave becomes a run's records. Pure."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpuherd.lm.backend import Decoded, GuidedTokens, Tokens
from gpuherd.qa.record import Answered, Finish, Generation, Guided, Prompted, Question
from gpuherd.qa.span import is_only_thought


def generation_of(tokens: Tokens, *, in_thought: bool = False) -> Generation:
    """A decoded answer as it is recorded. ``in_thought``: the prompt ended with an open thought."""
    return Generation(
        token_ids=tokens.token_ids,
        log_probs=tokens.log_probs,
        text=tokens.text,
        ends=tokens.ends,
        finish=_finish(tokens),
        end_id=tokens.end_id,
        end_log_prob=tokens.end_log_prob,
        guided=None if tokens.guided is None else _guided_of(tokens.guided),
        in_thought=in_thought,
    )


def _finish(tokens: Tokens) -> Finish:
    """Why it ended. Decoding ends at the first token whose log-prob is not finite, whatever that token is."""
    if None in tokens.log_probs or (tokens.end_id is not None and tokens.end_log_prob is None):
        return Finish.NAN
    return Finish.EOS if tokens.end_id is not None else Finish.STOP if tokens.stopped else Finish.LENGTH


def _guided_of(tokens: GuidedTokens) -> Guided:
    return Guided(
        log_probs=tuple(map(_as_float32, tokens.log_probs)),
        kl=tuple(map(_as_float32, tokens.kl)),
        end_log_prob=_as_float32(tokens.end_log_prob),
        end_kl=_as_float32(tokens.end_kl),
    )


def _as_float32(value: float | None) -> float | None:
    """As it is written and read again."""
    return None if value is None else float(struct.unpack("<f", struct.pack("<f", value))[0])


def answered_of(
    number: int, question: Question, prompt: Prompted, decoded: Decoded, *, in_thought: bool = False
) -> Answered:
    """The record of a question that was answered. ``in_thought``: the prompt ended with an open thought."""
    return Answered(
        number=number,
        question=question,
        prompt=prompt,
        greedy=None if decoded.greedy is None else generation_of(decoded.greedy, in_thought=in_thought),
        samples=tuple(generation_of(each, in_thought=in_thought) for each in decoded.samples),
    )


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run has.

    Attributes:
        tokens: of all answers, end tokens counted.
        finish: answers by why they ended.
        empty: answers without any text.
        not_finite: log-probs that were not finite.
        only_thought: answers whose thought was not closed, so that there is no answer.
        guided: answers that a classifier guided.
        kl: the mean of their KL divergences from the model, an answer's being the sum over its tokens, in nats; over
            those whose divergence is finite, None where there is none.
        kl_not_finite: how many others there are.
    """

    questions: int
    answers: int
    tokens: int
    finish: dict[str, int]
    empty: int
    not_finite: int
    guided: int = 0
    kl: float | None = None
    kl_not_finite: int = 0
    only_thought: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return ({"kl_per_answer": self.kl, "kl_not_finite": self.kl_not_finite} if self.guided else {}) | {
            "answers": self.answers,
            "tokens": self.tokens,
            "finish": self.finish,
            "empty": self.empty,
            "log_probs_not_finite": self.not_finite,
            "only_thought": self.only_thought,
        }


def counted(answers: Iterable[Answered]) -> Counts:
    """What these answers are in numbers."""
    questions = total = tokens = empty = not_finite = only_thought = 0
    finish: Counter[str] = Counter()
    divergences: list[float | None] = []
    for answered in answers:
        questions += 1
        for each in answered.which.values():
            total += 1
            tokens += len(each.token_ids) + (each.end_id is not None)
            finish[each.finish.value] += 1
            empty += not each.text.strip()
            only_thought += is_only_thought(each)
            ended = each.end_id is not None and each.end_log_prob is None
            not_finite += sum(value is None for value in each.log_probs) + ended
            if each.guided is not None:
                divergences.append(_divergence(each, each.guided))
    known = [kl for kl in divergences if kl is not None]
    return Counts(
        questions,
        total,
        tokens,
        {kind.value: finish[kind.value] for kind in Finish},
        empty,
        not_finite,
        guided=len(divergences),
        kl=math.fsum(known) / len(known) if known else None,
        kl_not_finite=len(divergences) - len(known),
        only_thought=only_thought,
    )


def _divergence(answer: Generation, guided: Guided) -> float | None:
    """Of a guided answer, summed over its tokens, its end token's with them; None where one is not finite."""
    found = [*guided.kl, *([] if answer.end_id is None else [guided.end_kl])]
    known = [kl for kl in found if kl is not None]
    return math.fsum(known) if len(known) == len(found) else None
