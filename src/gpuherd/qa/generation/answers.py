"""What an engine gave becomes a run's records. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpuherd.lm.asked import Decoded, Tokens
from gpuherd.qa.record import Answered, Finish, Generation, Prompted, Question


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
    )


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
    text; log-probs that were not finite."""

    questions: int
    answers: int
    tokens: int
    finish: dict[str, int]
    empty: int
    not_finite: int

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
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
    for answered in answers:
        questions += 1
        for each in answered.which.values():
            total += 1
            tokens += len(each.token_ids) + (each.end_id is not None)
            finish[each.finish.value] += 1
            empty += not each.text.strip()
            ended = each.end_id is not None and each.end_log_prob is None
            not_finite += sum(value is None for value in each.log_probs) + ended
    return Counts(questions, total, tokens, {kind.value: finish[kind.value] for kind in Finish}, empty, not_finite)
