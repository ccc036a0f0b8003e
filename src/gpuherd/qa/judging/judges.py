"""From the word that the user says for a judge to what judges: a rule, a model, or an address. Pure; looks up nothing
but whether a path exists."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gpuherd.errors import UsageError, printable
from gpuherd.jobs.run_dir import safe_name
from gpuherd.models.plan.naming import split_precision
from gpuherd.options import nearest
from gpuherd.qa.judging.meta import RULES, Kind

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

# nllSAR's names for judges that nobody can load, as their servers call them.
BEHIND_ADDRESSES = {"gpt-3.5": "gpt-3.5-turbo", "gpt-4": "gpt-4"}

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_STEM = 70


@dataclass(frozen=True, slots=True)
class Judge:
    """A judge.

    Attributes:
        said: as the user said it.
        kind: how it judges.
        model: what is loaded (a Hub id or a path, with ``-8bit`` or ``-4bit`` where asked for), or the model behind an
            address; None for rules.
        url: the address, without a slash at its end; None for others.
        told: a sentence where the word means something that the user might not expect.
    """

    said: str
    kind: Kind
    model: str | None = None
    url: str | None = None
    told: str | None = None


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
        return Judge(word, Kind(word))
    name, precision = split_precision(word.removeprefix(PREFIX))
    known = SHORT_NAMES.get(name.lower())
    if known is not None:
        model = known if precision is None else known + word[-len("-8bit") :].lower()
        told = f"{word} is {known}" + ("" if precision is None else f" in {precision}")
        return Judge(word, Kind.MODEL, model, told=told)
    _refuse_slip(word, name)
    return Judge(word, Kind.MODEL, word.removeprefix(PREFIX))


def judging_name(judge: Judge, digest: str) -> str:
    """The name of a judging's files: the judge as people know it, and 8 hex digits of all that verdicts depend on.

    >>> judging_name(Judge("llm_llama-3.1-70b-8bit", Kind.MODEL, "m"), "89abcdef0123")
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
    return Judge(word, Kind.URL, judge_model, url)


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
