"""From what was measured of each case to judgments. Pure: another threshold is another call."""

from __future__ import annotations

from collections.abc import Sequence

from gpuherd.qa.judging.form import Form
from gpuherd.qa.judging.items import Item
from gpuherd.qa.judging.parsing import parse_reply
from gpuherd.qa.judging.prompting import Prompts
from gpuherd.qa.judging.task import log_probs_of, reply_of
from gpuherd.qa.judging.verdict import Judgment, Verdict
from gpuherd.qa.judging.words import weighed


def judgments_of_cases(
    cases: Sequence[Item],
    prompts: Prompts,
    lines: Sequence[bytes],
    form: Form,
    *,
    threshold: float | None,
    min_mass: float,
) -> list[Judgment]:
    """A judgment a case.

    Args:
        lines: what the jobs wrote of each case for which the judge had room, in order.
    """
    found = []
    for item, place, reason in zip(cases, prompts.of_case, prompts.unasked, strict=True):
        if place is None:
            found.append(Judgment(item.question.id, item.which, Verdict.UNPARSED, note=reason))
        elif form.mode == "tokens":
            found.append(_weighed(item, lines[place], threshold, min_mass))
        else:
            found.append(_read(item, lines[place], form, in_thought=prompts.in_thought))
    return found


def _weighed(item: Item, line: bytes, threshold: float | None, min_mass: float) -> Judgment:
    result = weighed(log_probs_of(line), threshold=threshold, min_mass=min_mass)
    return Judgment(
        item.question.id, item.which, result.verdict, p_correct=result.p_correct, mass=result.mass, note=result.note
    )


def _read(item: Item, line: bytes, form: Form, *, in_thought: bool) -> Judgment:
    reply, cut = reply_of(line)
    verdict, note = parse_reply(reply, form.way, in_thought=in_thought)
    if note is not None and cut:
        note += "; the reply was cut off (--reply-tokens allows more)"
    return Judgment(item.question.id, item.which, verdict, reply=reply, note=note)
