"""A run that was begun, as later starts and workers find it: its run.json, its questions and prompts, its options.

Says whether these settings, data and model may continue it, and gives ``--resume`` the options of its first start with
what may be changed in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gpuherd.engines.registry import LOCAL
from gpuherd.errors import UsageError
from gpuherd.jobs.options import foreign
from gpuherd.lm.backend import PromptTokens
from gpuherd.qa.data.question_set import Refused
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.generation.config import BACKEND_IN_RECORDS, GUIDING, NEUTRAL, PATHS, GenerateConfig, settled
from gpuherd.qa.prompts.maker import MadePrompt
from gpuherd.qa.record import Prompted, Question, question_of
from gpuherd.qa.runs import DamagedRun, record_of
from gpuherd.qa.span import opens_thought
from gpuherd.runs.files import sha256_of

# Keys of run.json besides the options, on which everything that continues a run relies.
_NEEDED: tuple[tuple[str, type], ...] = (
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
    """The content of run.json of a run that continues. Raises as ``record_of``; DamagedRun also if a key is missing."""
    record = record_of(folder)
    missing = [name for name, kind in _NEEDED if not isinstance(record.get(name), kind)]
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
    first = (f"{_flag(name)} {_word(theirs.get(name))}, not {_word(ours.get(name))}" for name in names[:3])
    differences = ", ".join(first)
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    raise UsageError(f"run {config.name()} was begun with {differences}{more}; give those, or another --run-id")


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
    """A source without the path by which it was named, which the identity has."""
    return {name: value for name, value in settled.items() if name != "name"} if isinstance(settled, dict) else settled


def _flag(name: str) -> str:
    """The flag of this part of an identity."""
    return "--backend" if name == BACKEND_IN_RECORDS else f"--{name.replace('_', '-')}"


def _word(value: Any) -> str:
    return "unset" if value is None else str(value) if value != [] else "none"


@dataclass(frozen=True, slots=True)
class Item:
    """A question of a run with its prompt; ``in_thought``: the prompt ends with an open thought."""

    number: int
    question: Question
    prompt: PromptTokens
    prompted: Prompted
    in_thought: bool = False


def read_items(folder: QADirectory, wanted: Iterable[int]) -> dict[int, Item]:
    """The questions with these numbers and their prompts. Raises DamagedRun."""
    numbers = set(wanted)
    found: dict[int, Item] = {}
    try:
        with folder.questions.open("rb") as questions, folder.prompts.open("rb") as prompts:
            for number, (line, other) in enumerate(zip(questions, prompts, strict=True)):
                if number in numbers:
                    found[number] = _item(number, line, other)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise DamagedRun(f"{folder.root}: its questions or prompts can't be read: {problem}") from None
    if len(found) != len(numbers):
        raise DamagedRun(f"{folder.root} has no question {min(numbers - found.keys())}, from 0")
    return found


def _item(number: int, question_line: bytes, prompt_line: bytes) -> Item:
    question, prompt = question_of(json.loads(question_line)), json.loads(prompt_line)
    if prompt["id"] != question.id:
        raise ValueError(f"the prompt in line {number + 1} is of another question")
    made = MadePrompt(prompt["text"], tuple(int(each) for each in prompt["token_ids"]), int(prompt["cut"]))
    return Item(number, question, PromptTokens(question.id, made.token_ids), made.prompted, opens_thought(made.text))


# Given anew each time. (The record has no webhook: whoever knows its address may post there.)
OF_THE_MOMENT = frozenset({"dry_run", "enqueue_only", "webhook", "runs_dir", "run_id"})


def resumed(record: Mapping[str, Any], given: Mapping[str, Any], *, run_id: str, runs_dir: str) -> dict[str, Any]:
    """The options of the run that continues, by name: its own, with what was given this time.

    Args:
        record: the content of its run.json.
        given: the options of this command line, by name.

    Raises:
        UsageError: an option that its answers depend on is to be another one, or the record is of another version.
    """
    kept = {name: value for name, value in record["config"].items() if name not in OF_THE_MOMENT}
    if "backend" not in kept:  # a run of the time when that was called --engine, and all jobs ran on one machine
        kept["backend"] = kept.pop(BACKEND_IN_RECORDS)
    unknown = sorted(kept.keys() - {each.name for each in fields(GenerateConfig)})
    if unknown:
        raise UsageError(f"run {run_id} has the option {unknown[0]!r}, unknown here: it is of another gpuherd")
    # Options of another engine mean nothing to this one.
    engine = given.get("engine", kept.setdefault("engine", LOCAL))
    kept = {name: value for name, value in kept.items() if name not in foreign(engine)}
    # As absolute paths, so that it can be continued from any folder.
    kept |= {name: record["identity"][name] for name in PATHS}
    kept |= {name: record["identity"][name] for name in GUIDING if name in record["identity"]}
    for name, value in given.items():
        if name in NEUTRAL or name == "dry_run":
            kept[name] = value
        elif _settled(name, value) != kept.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"run {run_id} was begun with {flag} {kept.get(name)}; with another it is another run")
    listed = {name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()}
    return {**listed, "run_id": run_id, "runs_dir": runs_dir}


def _settled(name: str, value: Any) -> Any:
    """A value as run.json has it: paths absolute, several words as a list."""
    if name in (*PATHS, "guide"):
        return settled(name, value)
    return list(value) if isinstance(value, tuple) else value
