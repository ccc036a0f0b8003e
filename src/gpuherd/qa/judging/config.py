"""The options of a judging: one dataclass for the command line and Python callers. Light; knows what goes together."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from gpuherd.errors import UsageError
from gpuherd.models.load.job_options import WorkOptions
from gpuherd.options import option
from gpuherd.qa.judging.form import MODES, Mode, Way
from gpuherd.qa.judging.judges import Judge
from gpuherd.qa.judging.meta import ANSWERS, Answers, Kind
from gpuherd.units import count, positive_int, seconds

Chat = Literal["auto", "yes", "no"]
CHATS: tuple[Chat, ...] = get_args(Chat)

# More likely than not a judge that decoded greedily would have said one of the words.
MIN_MASS = 0.5
TEXT_TOKENS = 512

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def share(word: str) -> float:
    """A number from 0 to 1."""
    value = float(word)
    if not 0 <= value <= 1:
        raise ValueError(f"{word!r} is not between 0 and 1")
    return value


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(WorkOptions):
    """How answers are judged. Raises UsageError for values that are not allowed, or not together."""

    answers: Answers | None = option(
        None,
        help="which answers: the greedy ones, the samples, or all (default: greedy, or samples where there is none)",
        choices=ANSWERS,
        group="judging",
    )
    threshold: float | None = option(
        None,
        help="from which score (squad: F1, default 0.5; rouge: ROUGE-L, 0.3) or probability of correct (models: 0.5 "
        "with two verdicts; with three the most probable counts) an answer is correct",
        parse=share,
        metavar="X",
        group="judging",
    )
    prompt: str | None = option(
        None,
        help="a form of your own: a text file with {question}, {references} and {answer}, each alone on its line",
        metavar="FILE",
        group="judging",
    )
    mode: Mode = option(
        "tokens",
        help="how a model's verdict is read: from the probabilities of the verdict words, in one pass, or from a "
        "written reply, by a strict parser (for models that think first)",
        choices=MODES,
        group="judging",
    )
    three_way: bool = option(False, help="three grades: correct, incorrect, not attempted; of models", group="judging")
    two_way: bool = option(False, help="yes or no; of models (the default)", group="judging")
    min_mass: float | None = option(
        None,
        help="the least probability that the verdict words must have together; below, the verdict is unparsed "
        f"(default: {MIN_MASS})",
        parse=share,
        metavar="X",
        group="judging",
    )
    reply_tokens: int | None = option(
        None,
        help=f"the most tokens of a written reply (default: {TEXT_TOKENS})",
        parse=positive_int,
        metavar="N",
        group="judging",
    )
    chat: Chat = option(
        "auto",
        help="put the form into the chat template of the judge's tokenizer: where it has one, always, or never",
        choices=CHATS,
        group="judging",
    )
    judge_model: str | None = option(
        None,
        help="the model behind an address, as the server names it",
        metavar="NAME",
        group="a judge behind an address",
    )
    api_key_env: str | None = option(
        None,
        help="the environment variable that holds the key; the key itself is never written anywhere",
        metavar="VARIABLE",
        group="a judge behind an address",
    )
    concurrency: int = option(
        8, help="requests at once", parse=positive_int, metavar="N", group="a judge behind an address"
    )
    request_timeout: float = option(
        120.0, help="seconds that a reply may take", parse=seconds, metavar="S", group="a judge behind an address"
    )
    request_retries: int = option(
        6,
        help="further tries of a request after a failure that may pass, each after a longer wait",
        parse=count,
        metavar="N",
        group="a judge behind an address",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.two_way and self.three_way:
            raise UsageError("--two-way or --three-way, not both")
        for name in ("threshold", "min_mass"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and 0 <= value <= 1):
                raise UsageError(f"{name}={value}; it is between 0 and 1")
        if self.mode == "text" and (self.threshold is not None or self.min_mass is not None):
            raise UsageError("--threshold and --min-mass are for probabilities; --mode text reads a written verdict")
        if self.api_key_env is not None and not _VARIABLE.fullmatch(self.api_key_env):
            # A person who gives the key itself must not find it in a message or a file.
            raise UsageError("--api-key-env takes the name of an environment variable, not the key")

    @property
    def way(self) -> Way:
        """Two verdicts or three."""
        return "three-way" if self.three_way else "two-way"

    @property
    def least_mass(self) -> float:
        """The least mass of the verdict words."""
        return MIN_MASS if self.min_mass is None else self.min_mass

    @property
    def most_reply_tokens(self) -> int:
        """The most tokens of a written reply."""
        return self.reply_tokens or TEXT_TOKENS

    @property
    def model_threshold(self) -> float | None:
        """From which probability on a model's verdict is correct; None: the most probable verdict counts."""
        if self.mode == "text":
            return None
        return self.threshold if self.threshold is not None or self.three_way else 0.5


# What each kind of judge looks at, beside which answers and --dry-run; models of ours at all but an address's.
_OF_VERDICTS = frozenset({"threshold", "prompt", "mode", "three_way", "two_way", "min_mass", "reply_tokens"})
_OF_ADDRESSES = frozenset({"judge_model", "api_key_env", "concurrency", "request_timeout", "request_retries"})


def refuse_idle(judge: Judge, config: JudgeConfig, given: Mapping[str, Any]) -> None:
    """Raises UsageError where an option was given that this judge would not look at.

    Args:
        given: the options that the user gave, by field.
    """
    everything = frozenset(each.name for each in fields(JudgeConfig))
    if judge.kind is Kind.MODEL:
        used = everything - _OF_ADDRESSES - (frozenset() if config.mode == "text" else {"reply_tokens"})
    elif judge.kind is Kind.URL:
        used = _OF_VERDICTS | _OF_ADDRESSES
    else:
        used = frozenset({"threshold"} if judge.kind in (Kind.SQUAD, Kind.ROUGE) else ())
    for name in given:
        if name not in used | {"answers", "dry_run"}:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} means nothing to the judge {judge.said!r}; leave it out")
