"""The options of a judging: one dataclass for the command line and Python callers. Light; knows what goes together."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from gpuherd.errors import UsageError, printable
from gpuherd.jobs.run_dir import safe_name
from gpuherd.models.load.options import WorkOptions
from gpuherd.models.memory.weights import split_precision
from gpuherd.options import nearest, option
from gpuherd.qa.grading.files import ANSWERS, RULES, Answers, JudgeKind
from gpuherd.qa.grading.verdicts import MODES, Mode, Way
from gpuherd.units import count, positive_int, seconds

# --- Judges -----------------------------------------------------------------------------------------------------------
#
# From the word that the user says for a judge to what judges: a rule, a model, or an address. Pure; looks up nothing
# but whether a path exists.

PREFIX = "llm_"

# The names that nllSAR's scripts and the guide use. A judge has to follow instructions, so that a family's name means
# the model that was trained to: never the base.
SHORT_NAMES = {
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.1-70b-instruct": "meta-llama/Llama-3.1-70B-Instruct",
}

# nllSAR's names for judges without public weights, as their servers call them.
BEHIND_ADDRESSES = {"gpt-3.5": "gpt-3.5-turbo", "gpt-4": "gpt-4"}

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_STEM = 70


@dataclass(frozen=True, slots=True)
class Judge:
    """A judge.

    Attributes:
        said: as the user said it.
        kind: how it judges.
        model: what is loaded (a Hub id or a path, with ``-8bit`` or ``-4bit`` if requested), or the model behind an
            address; None for rules.
        url: the address, without a slash at its end; None for others.
        notice: a sentence for the user if the word means something that they might not expect.
    """

    said: str
    kind: JudgeKind
    model: str | None = None
    url: str | None = None
    notice: str | None = None


def judge_named(word: str, judge_model: str | None = None) -> Judge:
    """The judge that the user means.

    Args:
        word: a rule's name, a short name, a Hub id or path (``llm_`` before it or not), or an address.
        judge_model: which model behind the address.

    Raises UsageError for a word that can't be a judge, and for an address without a model or a model without one.
    """
    if re.match(r"\s*https?://", word, re.IGNORECASE):
        return _behind_address(word, judge_model)
    if judge_model is not None:
        raise UsageError("--judge-model goes with an address as the judge; a model's own name is the judge otherwise")
    if word in RULES:
        return Judge(word, JudgeKind(word))
    name, precision = split_precision(word.removeprefix(PREFIX))
    known = SHORT_NAMES.get(name.lower())
    if known is not None:
        model = known if precision is None else known + word[-len("-8bit") :].lower()
        notice = f"{word} is {known}" + ("" if precision is None else f" in {precision}")
        return Judge(word, JudgeKind.MODEL, model, notice=notice)
    _refuse_slip(word, name)
    return Judge(word, JudgeKind.MODEL, word.removeprefix(PREFIX))


def judging_name(judge: Judge, digest: str) -> str:
    """The name of a judging's files: the judge as people know it, and 8 hex digits of all that verdicts depend on.

    >>> judging_name(Judge("llm_llama-3.1-70b-8bit", JudgeKind.MODEL, "m"), "89abcdef0123")
    'llm_llama-3.1-70b-8bit-89abcdef'
    """
    stem = judge.said
    if judge.url is not None:
        stem = f"{judge.model}-at-{urlsplit(judge.url).hostname}"
    elif "/" in stem:
        stem = PREFIX * stem.startswith(PREFIX) + stem.rstrip("/").rpartition("/")[2]
    stem = _NOT_IN_NAMES.sub("-", stem).strip(".-")[:_LONGEST_STEM] or "judge"
    return safe_name(f"{stem}-{digest[:8]}")


def _behind_address(word: str, judge_model: str | None) -> Judge:
    if not (word.isascii() and word.isprintable()) or " " in word:
        raise UsageError(f"{printable(word)!r} is no address: it has signs in it that no address has")
    try:
        parts = urlsplit(word)
        host, _ = parts.hostname, parts.port
    except ValueError as problem:
        raise UsageError(f"{printable(word)!r} is no address: {problem}") from None
    if not host:
        raise UsageError(f"{word!r} names no host; an address is like http://localhost:8000/v1")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        # Whatever stands there may be a key, and the address is written into files.
        raise UsageError(
            "a judge's address has no user, password, query or fragment; give a key by --api-key-env VARIABLE"
        )
    if judge_model is None:
        raise UsageError(f"which model is to judge behind {word}? --judge-model names it, as the server knows it")
    url = word.rstrip("/").removesuffix("/chat/completions")
    return Judge(word, JudgeKind.URL, judge_model, url)


def _refuse_slip(word: str, name: str) -> None:
    """Raises UsageError for a word that is nearly one of ours, or no usable name; a path that exists is never that."""
    if "/" in name or Path(name).exists():
        return
    served = BEHIND_ADDRESSES.get(name.lower())
    if served is not None:
        raise UsageError(
            f"{word} is no model that can be loaded; it judges behind its address, https://api.openai.com/v1 "
            f"--judge-model {served} --api-key-env OPENAI_API_KEY"
        )
    known = [*(rule.value for rule in RULES), *SHORT_NAMES]
    near = nearest(name.lower(), known, cutoff=0.75)
    if not name or (near and not _other_size(name.lower(), near[0])):
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"there is no judge {word!r}{hint} Judges are {', '.join(rule.value for rule in RULES)}, llm_<model>, a "
            "Hugging Face id, a path, or an address"
        )


def _other_size(name: str, known: str) -> bool:
    """Whether two names of models differ in their numbers: llama-3.2-1b is no slip of llama-3-8b."""
    return re.findall(r"\d+(?:\.\d+)?", name) != re.findall(r"\d+(?:\.\d+)?", known)


# --- Options ----------------------------------------------------------------------------------------------------------

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


# An option of a group.
_judging = partial(option, group="judging")
_of_address = partial(option, group="a judge behind an address")


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(WorkOptions):
    """How answers are judged. Raises UsageError for values that are not allowed, or not together."""

    answers: Answers | None = _judging(
        None,
        help="which answers: the greedy ones, the samples, or all (default: greedy, or samples where there is none)",
        choices=ANSWERS,
    )
    threshold: float | None = _judging(
        None,
        help="from which score (squad: F1, default 0.5; rouge: ROUGE-L, 0.3) or probability of correct (models: 0.5 "
        "with two verdicts; with three the most probable counts) an answer is correct",
        parse=share,
        metavar="X",
    )
    prompt: str | None = _judging(
        None,
        help="a template of your own: a text file with {question}, {references} and {answer}, each alone on its line",
        metavar="FILE",
    )
    mode: Mode = _judging(
        "tokens",
        help="how a model's verdict is read: from the probabilities of the verdict words, in one pass, or from a "
        "written reply, by a strict parser (for models that think first)",
        choices=MODES,
    )
    three_way: bool = _judging(False, help="three grades: correct, incorrect, not attempted; of models")
    two_way: bool = _judging(False, help="yes or no; of models (the default)")
    min_mass: float | None = _judging(
        None,
        help="the least probability that the verdict words must have together; below, the verdict is unparsed "
        f"(default: {MIN_MASS})",
        parse=share,
        metavar="X",
    )
    reply_tokens: int | None = _judging(
        None, help=f"the most tokens of a written reply (default: {TEXT_TOKENS})", parse=positive_int, metavar="N"
    )
    chat: Chat = _judging(
        "auto",
        help="put the prompt into the chat template of the judge's tokenizer: where it has one, always, or never",
        choices=CHATS,
    )
    judge_model: str | None = _of_address(
        None, help="the model behind an address, as the server names it", metavar="NAME"
    )
    api_key_env: str | None = _of_address(
        None,
        help="the environment variable that holds the key; the key itself is never written anywhere",
        metavar="VARIABLE",
    )
    concurrency: int = _of_address(8, help="requests at once", parse=positive_int, metavar="N")
    request_timeout: float = _of_address(120.0, help="seconds that a reply may take", parse=seconds, metavar="S")
    request_retries: int = _of_address(
        6,
        help="further tries of a request after a failure that may pass, each after a longer wait",
        parse=count,
        metavar="N",
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


# The options of each kind of judge, besides --answers and --dry-run; models of ours have all but an address's.
_OF_VERDICTS = frozenset({"threshold", "prompt", "mode", "three_way", "two_way", "min_mass", "reply_tokens"})
_OF_ADDRESSES = frozenset({"judge_model", "api_key_env", "concurrency", "request_timeout", "request_retries"})


def refuse_idle(judge: Judge, config: JudgeConfig, given: Mapping[str, Any]) -> None:
    """Raises UsageError where an option was given that this judge does not have.

    Args:
        given: the options that the user gave, by field.
    """
    everything = frozenset(each.name for each in fields(JudgeConfig))
    if judge.kind is JudgeKind.MODEL:
        used = everything - _OF_ADDRESSES - (frozenset() if config.mode == "text" else {"reply_tokens"})
    elif judge.kind is JudgeKind.URL:
        used = _OF_VERDICTS | _OF_ADDRESSES
    else:
        used = frozenset({"threshold"} if judge.kind in (JudgeKind.SQUAD, JudgeKind.ROUGE) else ())
    for name in given:
        if name not in used | {"answers", "dry_run"}:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} means nothing to the judge {judge.said!r}; leave it out")
