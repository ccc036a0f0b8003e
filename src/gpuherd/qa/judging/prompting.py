"""From filled-in forms to the very tokens that a judge is given. Knows the judge's tokenizer, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from gpuherd.qa.judging.form import Case, Form, filled
from gpuherd.qa.judging.judge_model import JudgeModel
from gpuherd.qa.judging.task import Task
from gpuherd.qa.judging.words import verdict_tokens
from gpuherd.qa.prompts.conversation import templated
from gpuherd.qa.prompts.special_tokens import control_texts
from gpuherd.qa.span import opens_thought, with_closed_thought
from gpuherd.runs.console import track

_AT_ONCE = 256  # texts that the tokenizer is given, over which its threads divide themselves


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of all cases.

    Attributes:
        fitting: token ids of those for which the judge has room, in order.
        of_case: for each case its place among these; None where the judge can't be asked.
        unasked: for each case why it can't, None where it can.
        most: the most that a prompt may have; None where the judge does not say.
        in_thought: the judge's template opens a thought, in which its reply begins.
    """

    fitting: tuple[tuple[int, ...], ...]
    of_case: tuple[int | None, ...]
    unasked: tuple[str | None, ...]
    most: int | None
    in_thought: bool = False


def make_prompts(cases: Sequence[Case], form: Form, judge: JudgeModel, room: int, console: Console) -> Prompts:
    """The prompts of these cases.

    Args:
        room: positions that are left for what follows the prompt.
        console: shows how far it is, where it takes long.
    """
    control = control_texts(judge.tokenizer)
    most = None if judge.most_positions is None else judge.most_positions - room
    fitting: list[tuple[int, ...]] = []
    of_case: list[int | None] = []
    unasked: list[str | None] = []
    special = _special_ids(judge.tokenizer, control)
    nothing = filled(form, Case("", ("",), ""))
    (plain,) = _token_ids([nothing], form, judge)
    ours = sum(each in special for each in plain)
    pieces = [cases[at : at + _AT_ONCE] for at in range(0, len(cases), _AT_ONCE)]
    for piece in track(console, pieces, "filling in forms"):
        for ids in _token_ids([filled(form, case, control) for case in piece], form, judge):
            reason = None
            if most is not None and len(ids) > most:
                reason = f"the judge has room for {most} tokens, and this case takes {len(ids)}"
            elif sum(each in special for each in ids) != ours:
                # Some tokenizers make one of other signs too: of those that look like its own, or of other capitals.
                reason = "the judge would read a control word in this case, however it is written there"
            unasked.append(reason)
            of_case.append(None if reason else len(fitting))
            if reason is None:
                fitting.append(ids)
    in_thought = judge.chat and opens_thought(_in_conversation(nothing, form, judge))
    return Prompts(tuple(fitting), tuple(of_case), tuple(unasked), most, in_thought)


def _special_ids(tokenizer: Any, control: Sequence[str]) -> frozenset[int]:
    """The tokens that no text of a case may become: all special ones but the one for what is not known."""
    ids = {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids(list(control))}
    unknown = tokenizer.unk_token_id
    return frozenset(ids - ({unknown} - {tokenizer.bos_token_id, tokenizer.eos_token_id}))


def make_task(form: Form, judge: JudgeModel, reply_tokens: int) -> Task:
    """What is done with each prompt. Raises UsageError where verdict words can't be told apart as tokens."""
    if form.mode == "tokens":

        def encode(text: str) -> Sequence[int]:
            ids: list[int] = judge.tokenizer.encode(text, add_special_tokens=False)
            return ids

        return Task("tokens", verdict_tokens(form.way, form.cue, encode))
    # A model that only goes on with a text would go on with the next case; one that converses ends its turn.
    return Task("text", {}, judge.end_ids, () if judge.chat else ("\n",), reply_tokens)


def _token_ids(texts: Sequence[str], form: Form, judge: JudgeModel) -> list[tuple[int, ...]]:
    """Token ids of filled-in forms. The cue stands where the reply begins, but for a written reply to a conversation,
    before which a judge may think."""
    if judge.chat:
        whole = [_in_conversation(text, form, judge) for text in texts]
    else:
        whole = [f"{text}\n{form.cue}" for text in texts]
    # A conversation brings its special tokens; other texts get what this tokenizer puts before any (BOS, in most), and
    # lose what a few put behind it. Not verbose: that a text is too long is told as a verdict, not as a warning.
    rows = judge.tokenizer(whole, add_special_tokens=not judge.chat, verbose=False)["input_ids"]
    eos = judge.tokenizer.eos_token_id
    return [tuple(row[:-1] if row[-1] == eos and not judge.chat else row) for row in rows]


def _in_conversation(text: str, form: Form, judge: JudgeModel) -> str:
    whole = templated(judge.tokenizer, [{"role": "user", "content": text}])
    if form.mode == "text":
        return whole
    # Where the template opens a thought the verdict would else be weighed in the middle of it.
    return with_closed_thought(whole) + form.cue
