"""Reads preferences (a prompt with a chosen and a rejected completion) and demonstrations (prompts with answers to
imitate), as texts or as messages, from a file or the Hub. Nothing is lost in silence: each row is read, or stands among
the refused ones with its place. And says which of a problem's rollouts are compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuherd.models.names import user_path
from gpuherd.posttrain.data import preference_rows
from gpuherd.posttrain.data.dataset import SUFFIXES, file_rows
from gpuherd.posttrain.data.preference_rows import Conversation, Messages, imitated
from gpuherd.posttrain.types import Comparison, Rollout
from gpuherd.qa.data.hub import hub_rows
from gpuherd.qa.data.questions import BadQuestions, DataRow, MissingQuestions

_COLUMNS = ("id", "prompt", "chosen", "rejected")
_IMITATED = (
    "id",
    "messages",
    "tools",
    "prompt",
    "question",
    "completion",
    "chosen",
    "rejected",
    "answer",
    "answers",
    "text",
)
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
_SHOWN = 5  # refused rows in a message


@dataclass(frozen=True, slots=True)
class Preference:
    """Somebody preferred one completion of a prompt to another.

    Attributes:
        id: the row's own, else its place; unique.
        prompt: a text, or the conversation before the answer.
        chosen, rejected: the answers' texts; not the same.
    """

    id: str
    prompt: str | Messages
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What is imitated of a row.

    Attributes:
        id: of the row; unique.
        example: a prompt ("" where all of a text is imitated) and its answer, or a conversation.
    """

    id: str
    example: tuple[str, str] | Conversation

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """All that stands before each answer, and the answer."""
        return self.example.texts if isinstance(self.example, Conversation) else (self.example,)


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that can't be read: its place (``line 7``), and why."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Preferences:
    """What a file or data set holds. ``revision``: the Hub's commit, where it is known."""

    name: str
    pairs: tuple[Preference, ...]
    refused: tuple[Refused, ...]
    revision: str | None = None

    def refusals(self) -> str | None:
        """The refused rows in one line; None where there are none."""
        return _refusals(self.name, self.refused, "preference")


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """The demonstrations of a file or data set.

    Attributes:
        rows: how many were read, valid or not.
    """

    name: str
    shown: tuple[Demonstration, ...]
    refused: tuple[Refused, ...]
    rows: int

    def refusals(self) -> str | None:
        """The refused rows in one line; None where there are none."""
        return _refusals(self.name, self.refused, "demonstration")

    @property
    def sentence(self) -> str:
        """How many answers and rows are used: ``data.jsonl: 100 answers of 100 of 100 rows``."""
        answers = sum(len(each.pairs) for each in self.shown)
        return f"{self.name}: {answers} answers of {self.rows - len(self.refused)} of {self.rows} rows"


def _refusals(name: str, refused: Sequence[Refused], kind: str) -> str | None:
    if not refused:
        return None
    some = "; ".join(f"{each.place}: {each.reason}" for each in refused[:_SHOWN])
    more = f"; and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
    rows = f"1 row is no {kind}" if len(refused) == 1 else f"{len(refused)} rows are no {kind}s"
    return f"{name}: {rows}: {some}{more}"


def read_preferences(
    name: str | Path, *, split: str = "train", revision: str | None = None, limit: int | None = None
) -> Preferences:
    """The preferences of a file (JSONL, JSON, Parquet, CSV) or of a data set of the Hub (``owner/name`` or
    ``owner/name:config``), the first ``limit`` of the good ones.

    A row has ``prompt``, ``chosen`` and ``rejected``, each a text or a list of messages; where the completions are
    messages the prompt may be missing: then it is what both conversations begin with. Raises MissingQuestions,
    BadQuestions (no row is good), UsageError, MissingExtra.
    """
    found, commit = _rows(str(name), split, revision, _wanted)
    pairs: list[Preference] = []
    refused: list[Refused] = []
    places: dict[str, str] = {}  # of ids
    for row in found:
        if limit is not None and len(pairs) == limit:
            break
        made = preference_of(row)
        if isinstance(made, Preference) and made.id in places:
            made = Refused(row.place, f"its id {made.id!r} is that of {places[made.id]} too")
        if isinstance(made, Refused):
            refused.append(made)
            continue
        places[made.id] = row.place
        pairs.append(made)
    read = Preferences(str(name), tuple(pairs), tuple(refused), commit)
    if not pairs:
        raise BadQuestions(read.refusals() or f"{name}: it has no rows")
    return read


def read_demonstrations(name: str | Path, *, split: str = "train", limit: int | None = None) -> Demonstrations:
    """The answers to imitate of a file or of a data set of the Hub, named as in ``read_preferences``: of all its rows,
    or of the first ``limit`` good ones. ``imitated`` says which columns a row may have.

    Raises MissingQuestions, BadQuestions (no row is good), UsageError, MissingExtra.
    """
    found, _ = _rows(str(name), split, None, lambda columns: [each for each in columns if each in _IMITATED] or None)
    shown: list[Demonstration] = []
    refused: list[Refused] = []
    places: dict[str, str] = {}  # of ids
    count = 0
    for row in found:
        if limit is not None and count - len(refused) == limit:
            break
        count += 1
        try:
            example = imitated(row.values) if row.values is not None else _no_values(row)
        except ValueError as problem:
            refused.append(Refused(row.place, str(problem)))
            continue
        own = _id_of(row)
        if own in places:
            refused.append(Refused(row.place, f"its id {own!r} is that of {places[own]} too"))
            continue
        places[own] = row.place
        shown.append(Demonstration(own, example))
    made = Demonstrations(str(name), tuple(shown), tuple(refused), count)
    if not shown:
        raise BadQuestions(made.refusals() or f"{name}: it has no rows")
    return made


def _no_values(row: DataRow) -> tuple[str, str]:
    raise ValueError(row.problem or "no row")


def _id_of(row: DataRow) -> str:
    """The row's own id, else its place."""
    said = None if row.values is None else row.values.get("id")
    return str(said) if isinstance(said, str | int) and not isinstance(said, bool) and str(said).strip() else row.place


def preference_of(row: DataRow) -> Preference | Refused:
    """What a row says, or why it is no preference. Pure."""
    if row.values is None:
        return Refused(row.place, row.problem or "no row")
    try:
        prompt, chosen, rejected = preference_rows.compared(row.values)
    except ValueError as problem:
        return Refused(row.place, str(problem))
    return Preference(_id_of(row), prompt, chosen, rejected)


def _rows(
    name: str, split: str, revision: str | None, wanted: Callable[[Iterable[str]], list[str] | None]
) -> tuple[Iterator[DataRow], str | None]:
    path = user_path(name)
    if path.is_file():
        return file_rows(path, wanted), None
    hub_id = _HUB_ID.fullmatch(name)
    if path.suffix.lower() in SUFFIXES or (hub_id is None and not path.is_dir()):
        raise MissingQuestions(f"{name}: there is no such file")
    repository, config = (str(path), None) if path.is_dir() or hub_id is None else hub_id.groups()
    of_hub = hub_rows(repository, config, split, revision, wanted)
    return of_hub.rows, of_hub.revision


def _wanted(columns: Iterable[str]) -> list[str]:
    """The columns that are read, of those that there are. Raises BadQuestions."""
    there = list(columns)
    if "chosen" not in there or "rejected" not in there:
        raise BadQuestions(f"no preferences: it has no columns chosen and rejected, but {', '.join(sorted(there))}")
    return [name for name in _COLUMNS if name in there]


def best_and_worst(rollouts: Sequence[Rollout]) -> Comparison | None:
    """The rollout of the highest reward, preferred to that of the lowest; of several, the first drawn.

    None where all earned the same, or the two say the same: nothing can be learnt from them.

    Args:
        rollouts: of one problem, to one prompt.
    """
    if not rollouts:
        return None
    best = min(rollouts, key=lambda each: (-each.reward, each.sample))
    worst = min(rollouts, key=lambda each: (each.reward, each.sample))
    return compared(best, worst) if best.reward > worst.reward else None


def compared(chosen: Rollout, rejected: Rollout) -> Comparison | None:
    """``chosen`` preferred to ``rejected``; None where they are token by token the same."""
    if chosen.ids == rejected.ids:
        return None
    return Comparison(
        problem=chosen.problem,
        prompt_ids=chosen.prompt_ids,
        context_ids=(),
        chosen_ids=chosen.ids,
        rejected_ids=rejected.ids,
        chosen=chosen.text,
        rejected=rejected.text,
        chosen_reward=chosen.reward,
        rejected_reward=rejected.reward,
    )


def by_problem(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Rollouts of one problem and one prompt together, in the order in which they first come."""
    groups: dict[tuple[str, tuple[int, ...]], list[Rollout]] = {}
    for each in rollouts:
        groups.setdefault((each.problem, each.prompt_ids), []).append(each)
    return list(groups.values())
