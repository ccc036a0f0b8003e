"""What an engine gave becomes a run's records. Pure."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpuherd.lm.asked import Decoded, GuidedTokens, Tokens
from gpuherd.qa.record import Answered, Finish, Generation, Guided, Prompted, Question


def generation_of(tokens: Tokens) -> Generation:
    """A decoded answer as it is recorded."""
    finish = Finish.EOS if tokens.end_id is not None else Finish.STOP if tokens.stopped else Finish.LENGTH
    return Generation(
        token_ids=tokens.token_ids,
        log_probs=tokens.log_probs,
        text=tokens.text,
        ends=tokens.ends,
        finish=finish,
        end_id=tokens.end_id,
        end_log_prob=tokens.end_log_prob,
        guided=None if tokens.guided is None else _guided_of(tokens.guided),
    )


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


def answered_of(number: int, question: Question, prompt: Prompted, decoded: Decoded) -> Answered:
    """The record of a question that was answered."""
    return Answered(
        number=number,
        question=question,
        prompt=prompt,
        greedy=None if decoded.greedy is None else generation_of(decoded.greedy),
        samples=tuple(generation_of(each) for each in decoded.samples),
    )


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run has: ``tokens`` of all answers, end tokens counted; answers by why they ended; answers without any
    text; log-probs that were not finite; of answers that were guided ``kl``: the mean of their KL divergences from the
    model, an answer's being the sum over its tokens, in nats."""

    questions: int
    answers: int
    tokens: int
    finish: dict[str, int]
    empty: int
    not_finite: int
    kl: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return ({} if self.kl is None else {"kl_per_answer": self.kl}) | {
            "answers": self.answers,
            "tokens": self.tokens,
            "finish": self.finish,
            "empty": self.empty,
            "log_probs_not_finite": self.not_finite,
        }


def counted(answers: Iterable[Answered]) -> Counts:
    """What these answers are in numbers."""
    questions = total = tokens = empty = not_finite = 0
    finish: Counter[str] = Counter()
    divergences: list[float] = []
    for answered in answers:
        questions += 1
        for each in answered.which.values():
            total += 1
            tokens += len(each.token_ids) + (each.end_id is not None)
            finish[each.finish.value] += 1
            empty += not each.text.strip()
            ended = each.end_id is not None and each.end_log_prob is None
            not_finite += sum(value is None for value in each.log_probs) + ended
            if each.guided is not None:
                divergences.append(math.fsum(kl for kl in (*each.guided.kl, each.guided.end_kl) if kl is not None))
    kinds = {kind.value: finish[kind.value] for kind in Finish}
    mean = math.fsum(divergences) / len(divergences) if divergences else None
    return Counts(questions, total, tokens, kinds, empty, not_finite, mean)
