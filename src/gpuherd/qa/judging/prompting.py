"""From filled-in forms to the very tokens that a judge is given. Knows the judge's tokenizer, no model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd.errors import MissingModel, UsageError, naming_extras
from gpuherd.models.load.identity import files_digest
from gpuherd.models.load.options import LoadRequest, ModelOptions
from gpuherd.models.load.prepare import located, tokenizer_folder
from gpuherd.models.names import shown
from gpuherd.qa.judging.config import Chat
from gpuherd.qa.judging.task import Task
from gpuherd.qa.judging.template import Case, JudgeTemplate, filled
from gpuherd.qa.judging.verdicts import verdict_tokens
from gpuherd.qa.prompts.conversation import templated
from gpuherd.qa.prompts.special_tokens import control_texts
from gpuherd.qa.span import opens_thought, with_closed_thought
from gpuherd.runs.console import track

# --- The judge, before any GPU ----------------------------------------------------------------------------------------
#
# A judge as far as it is needed before any GPU: its tokenizer, its limits, and what tells it from another model.
#
# Reads weights only for their digest; loads no model.

_EXTRAS = dict.fromkeys(("transformers", "tokenizers", "torch", "jinja2"), "qa")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True, slots=True)
class JudgeModel:
    """A model that will judge.

    Attributes:
        tokenizer: transformers' tokenizer.
        most_positions: the most tokens of form and reply together, None where the config does not say.
        end_ids: tokens that end a reply.
        chat: whether the form goes into the tokenizer's chat template.
        sha256: of its files, as ``files_digest``.
    """

    tokenizer: Any
    most_positions: int | None
    end_ids: tuple[int, ...]
    chat: bool
    sha256: str


def open_judge(model: str, options: ModelOptions, chat: Chat) -> JudgeModel:
    """The judge of this name, fetched if it is not here.

    Raises:
        MissingModel, BadModel: it, its adapter or its tokenizer is not to be had.
        UsageError: a chat template is asked for, and there is none.
        MissingExtra: transformers is not installed.
    """
    with naming_extras(_EXTRAS, "judging with a model takes"):
        from transformers import AutoTokenizer

        from gpuherd.lm.tokens import end_tokens_in
    asked = LoadRequest(
        model=model,
        adapter=options.adapter,
        merge_adapter=options.merge_adapter,
        trust_remote_code=options.trust_remote_code,
    )
    path, adapter = located(asked)
    folder = path if path.is_dir() else path.parent
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_folder(path, adapter), trust_remote_code=options.trust_remote_code, local_files_only=True
        )
    except Exception as problem:  # the library raises what it likes at a file that is damaged
        raise MissingModel(f"judge {shown(model)} has no tokenizer that transformers can use: {problem}") from None
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat == "yes" and not has_template:
        raise UsageError(f"judge {shown(model)} has no chat template; leave out --chat yes")
    return JudgeModel(
        tokenizer=tokenizer,
        most_positions=_most_positions(folder),
        end_ids=end_tokens_in(folder, tokenizer).ids,
        chat=has_template and chat != "no",
        sha256=files_digest(*([folder] if adapter is None else [folder, adapter])),
    )


def _most_positions(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    inner = config.get("text_config") if isinstance(config, Mapping) else None
    for values in (inner, config):
        for name in _POSITIONS:
            value = values.get(name) if isinstance(values, Mapping) else None
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


# --- Prompts ----------------------------------------------------------------------------------------------------------

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


def make_prompts(cases: Sequence[Case], form: JudgeTemplate, judge: JudgeModel, room: int, console: Console) -> Prompts:
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


def make_task(form: JudgeTemplate, judge: JudgeModel, reply_tokens: int) -> Task:
    """What is done with each prompt. Raises UsageError where verdict words can't be told apart as tokens."""
    if form.mode == "tokens":

        def encode(text: str) -> Sequence[int]:
            ids: list[int] = judge.tokenizer.encode(text, add_special_tokens=False)
            return ids

        return Task("tokens", verdict_tokens(form.way, form.cue, encode))
    # A model that only goes on with a text would go on with the next case; one that converses ends its turn.
    return Task("text", {}, judge.end_ids, () if judge.chat else ("\n",), reply_tokens)


def _token_ids(texts: Sequence[str], form: JudgeTemplate, judge: JudgeModel) -> list[tuple[int, ...]]:
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


def _in_conversation(text: str, form: JudgeTemplate, judge: JudgeModel) -> str:
    whole = templated(judge.tokenizer, [{"role": "user", "content": text}])
    if form.mode == "text":
        return whole
    # Where the template opens a thought the verdict would else be weighed in the middle of it.
    return with_closed_thought(whole) + form.cue
