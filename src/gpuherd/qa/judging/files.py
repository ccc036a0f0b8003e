"""The files of judgings in a run's folder: written once, as a whole, the description last; read back checked.

``judgments/<judging>.jsonl`` has a judgment a line, ``judgments/<judging>.json`` says how they were made. A judging
without its ``.json`` is not there. Knows no judge.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, get_args

from gpuherd.atomic import atomic_write
from gpuherd.errors import GpuherdError, UsageError, printable
from gpuherd.qa.described import descriptions, read_description
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.judging.verdicts import Judgment, Verdict
from gpuherd.runs import records
from gpuherd.runs.files import single_writer

# --- The description --------------------------------------------------------------------------------------------------
#
# What a judging says of itself: who judged what, how, and what came out. Plain frozen data and its JSON form.

FORMAT = 1

Answers = Literal["greedy", "samples", "all"]
ANSWERS: tuple[Answers, ...] = get_args(Answers)


class Kind(StrEnum):
    """How verdicts come about: five rules, a model of ours, or a model behind an address."""

    EXACT = "exact"
    CONTAINS = "contains"
    SQUAD = "squad"
    ROUGE = "rouge"
    MATH = "math"
    MODEL = "model"
    URL = "url"


RULES = (Kind.EXACT, Kind.CONTAINS, Kind.SQUAD, Kind.ROUGE, Kind.MATH)


class BadJudging(GpuherdError):
    """A judging's files are damaged, of a newer gpuherd, or not of this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingMeta:
    """A judging that is whole.

    Attributes:
        name: of its files, ``<judge>-<8 hex of all that the verdicts depend on>``.
        judge: as the user said it.
        kind: how it judged.
        answers: which answers: the greedy ones, the samples, or all.
        answers_sha256: of the run's answers.jsonl that was judged.
        counts: judgments by verdict; every verdict stands in it.
        sha256: of the file of judgments.
        model: the model that judged, None for rules.
        threshold: from which score (rules) or probability (models) on an answer is correct, None where nothing is
            compared.
        prompt_sha256: of the judge's prompt, None for rules.
        settings: everything else that the verdicts depend on.
        versions: of the libraries that took part.
        made: when, as ISO 8601 in UTC.
    """

    name: str
    judge: str
    kind: Kind
    model: str | None = None
    threshold: float | None = None
    prompt_sha256: str | None = None
    answers: Answers
    answers_sha256: str
    counts: Mapping[Verdict, int]
    settings: Mapping[str, Any] = field(default_factory=dict)
    sha256: str
    versions: Mapping[str, str] = field(default_factory=dict)
    made: str = ""

    @property
    def total(self) -> int:
        """How many answers were judged."""
        return sum(self.counts.values())


def meta_values(meta: JudgingMeta) -> dict[str, Any]:
    """The judging as JSON values, as they stand in its ``.json``."""
    return {"format": FORMAT, **records.plain(_with_all_counts(meta))}


def meta_of(value: Any) -> JudgingMeta:
    """The judging that ``meta_values`` described. Raises BadJudging."""
    if isinstance(value, dict) and isinstance(value.get("format"), int) and value["format"] > FORMAT:
        raise BadJudging(f"written by a newer gpuherd (format {value['format']}, known here: {FORMAT}); update gpuherd")
    try:
        return _with_all_counts(records.read(JudgingMeta, value))
    except (ValueError, KeyError, TypeError) as problem:
        raise BadJudging(f"no description of a judging: {type(problem).__name__}: {problem}") from None


def _with_all_counts(meta: JudgingMeta) -> JudgingMeta:
    """Every verdict stands in the counts; files of versions before a verdict lack it."""
    return replace(meta, counts={verdict: meta.counts.get(verdict, 0) for verdict in Verdict})


# --- Files ------------------------------------------------------------------------------------------------------------


def judgings_of(folder: QADirectory) -> list[JudgingMeta]:
    """The judgings of a run that are whole, the oldest first. One that can't be read is logged and left out."""
    return descriptions(folder.judgments, lambda name: _read_meta(folder, name), BadJudging)


def judging_named(folder: QADirectory, name: str) -> JudgingMeta:
    """The judging of this name; of this judge, where there is one judging by it; or whose name begins so.

    Raises:
        UsageError: there is none such, or more than one; it lists those that there are.
        BadJudging: it is damaged, or of a newer gpuherd.
    """
    if folder.judging(name, ".json").is_file() and folder.judging(name, ".json").stem == name:
        return _read_meta(folder, name)
    there = judgings_of(folder)
    for fitting in ([each for each in there if each.judge == name], [each for each in there if _begins(each, name)]):
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise UsageError(f"--judge {name} can mean {_listed(fitting)}; give one of these names")
    if not there:
        raise UsageError(
            f"no judging of {folder.root.name} is there yet; 'gpuherd judge {folder.root.name} {name}' makes one"
        )
    raise UsageError(f"{folder.root.name} has no judging {name!r}; there is {_listed(there)}")


def judgments(folder: QADirectory, meta: JudgingMeta) -> list[Judgment]:
    """What the judge said of each answer, in the order of the questions and, of a question, of its answers.

    Raises BadJudging where the file is not there, or not as it was written.
    """
    path = folder.judging(meta.name)
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise BadJudging(f"can't read {path}: {problem.strerror}; {_REMEDY}") from None
    # A line is read before the digest is compared, so that a damaged one is named.
    found = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            found.append(judgment_of(line))
        except BadJudging as problem:
            raise BadJudging(f"{path}, line {number}: {problem}; {_REMEDY}") from None
    if hashlib.sha256(data).hexdigest() != meta.sha256:
        raise BadJudging(f"{path} has been changed since it was written; {_REMEDY}")
    return found


_REMEDY = "remove it and its .json, and judge again"


def existing(folder: QADirectory, name: str) -> JudgingMeta | None:
    """The judging of this very name; None where it is not there. Raises BadJudging."""
    return _read_meta(folder, name) if folder.judging(name, ".json").is_file() else None


def write_judging(folder: QADirectory, meta: JudgingMeta, made: Iterable[Judgment]) -> JudgingMeta:
    """Writes a judging, its description last. Returns the description with counts and digest of what was written.

    Where this judging is there already, it is left as it is and returned: nothing that is finished is ever changed.
    Raises CannotWrite.
    """
    judged = list(made)
    data = "".join(f"{records.line_of(each)}\n" for each in judged).encode("ascii")
    counts = Counter(each.verdict for each in judged)
    sha256 = hashlib.sha256(data).hexdigest()
    whole = replace(meta, counts={verdict: counts[verdict] for verdict in Verdict}, sha256=sha256)
    text = json.dumps(meta_values(whole), indent=2, ensure_ascii=True, allow_nan=False)
    path = folder.judging(meta.name)
    # Of two programs that end the same judging at one moment one writes, and the other finds it whole: a formula that
    # took too long for one of them may have been decided by the other.
    with single_writer(folder.judgments):
        before = existing(folder, meta.name)
        if before is not None:
            return before
        atomic_write(path, data)
        atomic_write(folder.judging(meta.name, ".json"), text.encode("ascii") + b"\n")
    return whole


def judgment_of(line: str | bytes) -> Judgment:
    """The judgment in a line. Raises BadJudging."""
    try:
        judgment: Judgment = records.read(Judgment, json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise BadJudging(f"no judgment: {type(problem).__name__}: {problem}") from None
    return judgment


def _read_meta(folder: QADirectory, name: str) -> JudgingMeta:
    return read_description(folder.judging(name, ".json"), meta_of, BadJudging, _REMEDY)


def _begins(meta: JudgingMeta, name: str) -> bool:
    return bool(name) and meta.name.startswith(name)


def _listed(metas: Sequence[JudgingMeta]) -> str:
    return printable(", ".join(f"{meta.name} ({meta.answers}, {meta.made})" for meta in metas))
