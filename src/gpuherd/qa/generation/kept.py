"""A run that was begun, as a later start finds it: what its run.json holds, whether these settings, data and model may
go on with it, and what of its questions and prompts is there already."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.qa.data.question_set import Refused
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.generation.config import BACKEND_IN_RECORDS, PATHS, GenerateConfig
from gpuherd.qa.runs import DamagedRun, record_of
from gpuherd.qa.working.gathering import sha256_of

# What run.json says besides the options, and everything that goes on with a run relies on.
_SAID: tuple[tuple[str, type], ...] = (
    ("run_id", str),
    ("model_sha256", str),
    ("questions", int),
    ("questions_sha256", str),
    ("prompts_sha256", str),
    ("prompts_cut", int),
    ("refused", int),
    ("end_tokens", dict),
    ("stop", list),
    ("versions", dict),
)


def begun_record(folder: QADirectory) -> Mapping[str, Any]:
    """What run.json of a run holds that is to go on. Raises as ``record_of``; DamagedRun too where it lacks a part."""
    record = record_of(folder)
    missing = [name for name, kind in _SAID if not isinstance(record.get(name), kind)]
    missing += [name for name in PATHS if name not in record["identity"]]
    if missing:
        raise DamagedRun(f"{folder.run_json} says nothing of {missing[0]}; remove {folder.root} to begin anew")
    return record


def refuse_other_settings(kept: Mapping[str, Any], config: GenerateConfig) -> None:
    """Raises UsageError where a run of this name was begun with other settings, naming them."""
    ours, theirs = config.identity(), dict(kept["identity"])
    names = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
    if not names:
        return
    told = ", ".join(f"{_flag(name)} {_said(theirs.get(name))}, not {_said(ours.get(name))}" for name in names[:3])
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    raise UsageError(f"run {config.name()} was begun with {told}{more}; give those, or another --run-id")


def refuse_change(kept: Mapping[str, Any], now: Mapping[str, Any], config: GenerateConfig) -> None:
    """Raises UsageError where the data, the examples or the model are other ones than when the run was begun."""
    for name, what in (
        ("source", config.dataset),
        ("examples_source", "the examples"),
        ("model_sha256", config.model),
        ("guide_sha256", config.guide),
    ):
        if _content(kept.get(name)) != _content(now.get(name)):
            raise UsageError(
                f"{what} has changed since run {config.name()} was begun; bring it back as it was, or give another "
                "--run-id to begin anew"
            )


def is_whole(folder: QADirectory, kept: Mapping[str, Any]) -> bool:
    """Whether the files of questions and prompts are there as run.json says, and the refused rows too."""
    try:
        there = sha256_of(folder.questions), sha256_of(folder.prompts), len(refused_before(folder))
    except (OSError, ValueError, TypeError):
        return False
    return there == (kept["questions_sha256"], kept["prompts_sha256"], kept["refused"])


def lengths(folder: QADirectory) -> tuple[int, ...]:
    """Tokens of each prompt."""
    with folder.prompts.open("rb") as file:
        return tuple(len(json.loads(line)["token_ids"]) for line in file)


def refused_before(folder: QADirectory) -> tuple[Refused, ...]:
    """The rows that were refused. Raises OSError, ValueError, TypeError."""

    def lines() -> Iterator[Refused]:
        with folder.refused.open("rb") as file:
            for line in file:
                yield Refused(**json.loads(line))

    return tuple(lines())


def _content(settled: Any) -> Any:
    """What a source holds, by whatever path it was named: that is for the identity."""
    return {name: value for name, value in settled.items() if name != "name"} if isinstance(settled, dict) else settled


def _flag(name: str) -> str:
    """What says this part of an identity on the command line."""
    return "--backend" if name == BACKEND_IN_RECORDS else f"--{name.replace('_', '-')}"


def _said(value: Any) -> str:
    return "unset" if value is None else str(value) if value != [] else "none"
