"""What people are told of a run of answers: before it starts, and when it is done. Pure but for printing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from gpuherd.errors import printable
from gpuherd.lm.backend import beyond_rounding
from gpuherd.models.load.jobs import JobRequest
from gpuherd.qa.data.question_set import Refused
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.generation.config import GenerateConfig
from gpuherd.qa.generation.prepared import Prepared
from gpuherd.qa.numbers import rule_for
from gpuherd.qa.runs import questions_in

_MOST_REFUSED = 10
LEAST_FOR_A_THOUGHT = 1024  # tokens of an answer with a thought before it; many take more


def plan_lines(config: GenerateConfig, prepared: Prepared, asks: JobRequest, shards: int, answered: int) -> list[str]:
    """What would run."""
    how = config.decoding()
    answers = [*(["1 greedy"] if how.greedy else []), *([f"{how.samples} drawn"] if how.samples else [])]
    longest = prepared.longest
    lines = [
        f"run {config.name()} in {config.runs_dir}",
        f"{_many(len(prepared.lengths), 'question')} of {config.dataset}, {len(prepared.refused)} refused; "
        f"{' and '.join(answers)} answer{'s' if how.samples else ''} each, at most {config.max_new_tokens} tokens; "
        f"the longest prompt has {longest} tokens",
        f"{_many(shards, 'job')}: {asks.sentence}; {asks.at_once} at once",
        f"{answered} of {len(prepared.lengths)} are answered already",
    ]
    if prepared.guide is not None:
        guide = prepared.guide
        lines.append(
            f"guided by {guide.classifier}: eta {guide.eta:g} ({guide.mode}), among the {guide.top_k} most probable "
            "tokens"
        )
    if prepared.thinks and config.max_new_tokens < LEAST_FOR_A_THOUGHT:
        lines.append(
            f"warning: the model's chat template has thoughts, and {config.max_new_tokens} tokens may end before a "
            "thought does: then there is no answer; --max-new-tokens 4096 leaves room for both"
        )
    if prepared.cut:
        lines.append(f"{_many(prepared.cut, 'prompt')} had to be shortened: their contexts were cut")
    if prepared.stop:
        lines.append(f"answers end before {', '.join(repr(text) for text in prepared.stop)}, or at {_ends(prepared)}")
    else:
        lines.append(f"answers end at {_ends(prepared)}")
    return [printable(line) for line in lines]


def _ends(prepared: Prepared) -> str:
    ids: Sequence[int] = prepared.record["end_tokens"]["ids"]
    if not ids:
        return "their length alone: the model names no end token"
    return f"end token{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def done_lines(folder: QADirectory, done: Mapping[str, Any]) -> list[str]:
    """What was made."""
    counts = done["counts"]
    finish = counts["finish"]
    ended = f"{finish['eos']} ended by themselves, {finish['stop']} at a stop string, {finish['length']} at the limit"
    if finish.get("nan"):
        ended += f", {finish['nan']} at numbers that are not finite (NaN)"
    things = ((done["questions"], "question"), (counts["answers"], "answer"), (counts["tokens"], "token"))
    lines = [f"{', '.join(_many(count, what) for count, what in things)}{_speed(done['shards'])}: {ended}"]
    remarks = [
        f"{counts[name]} {what}"
        for name, what in (
            ("refused", "rows refused (refused.jsonl says why)"),
            ("prompts_cut", "contexts shortened"),
            ("empty", "answers without text"),
            ("only_thought", "answers ended within a thought and so are none (--max-new-tokens allows more)"),
            ("log_probs_not_finite", "log-probs that are not finite"),
            ("kl_not_finite", "guided answers whose KL divergence is not finite: the mean is without them"),
        )
        if counts.get(name)
    ]
    if remarks:
        lines.append("; ".join(remarks))
    if all_nan(done):
        lines.append(
            "failed  every answer is NaN: the model gives no finite numbers; try another --dtype, or other files"
        )
    if counts.get("kl_per_answer") is not None:
        kl = beyond_rounding(counts["kl_per_answer"])
        lines.append(f"guided away from the model by {kl:.3g} nats an answer on average (KL)")
    name, place = folder.root.name, folder.root.parent
    where = "" if place.name == "runs" and place.parent.samefile(".") else f" --runs-dir {shlex.quote(str(place))}"
    lines += [
        f"answers: {folder.answers}",
        f"next: gpuherd judge {name} {rule_for(questions_in(folder))}{where}   and   gpuherd score {name}{where}",
    ]
    return [printable(line) for line in lines]


def all_nan(done: Mapping[str, Any]) -> bool:
    """Whether there is no answer at all, since the model's numbers broke down in each."""
    counts = done["counts"]
    return bool(counts["answers"]) and counts["finish"].get("nan", 0) == counts["answers"]


def _speed(shards: Sequence[Mapping[str, Any]]) -> str:
    """Tokens a second in each job while it decoded; nothing where no time is known."""
    tokens = sum(each.get("tokens", 0) for each in shards)
    seconds = sum(each.get("seconds", 0.0) for each in shards)
    return f" ({tokens / seconds:.1f} tokens/s in a job)" if tokens and seconds > 0 else ""


def print_refused(console: Console, refused: Sequence[Refused]) -> None:
    """The first refused rows with their reasons, and how many more there are."""
    for each in refused[:_MOST_REFUSED]:
        console.print(Text.assemble(("refused  ", "red"), printable(f"{each.row}: {each.reason}")), soft_wrap=True)
    if len(refused) > _MOST_REFUSED:
        more = len(refused) - _MOST_REFUSED
        console.print(Text(f"and {more} more, which refused.jsonl names"))


def _many(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}s"
