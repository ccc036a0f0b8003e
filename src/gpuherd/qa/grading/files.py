"""The files of judgings in a run's folder: written once, as a whole, the description last; read back checked.

``judgments/<judging>.jsonl`` has a judgment a line, ``judgments/<judging>.json`` says how they were made. A judging
without its ``.json`` does not exist. The files of its jobs are in ``work/``: token ids in, numbers or texts out.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args

from gpuherd.errors import GpuherdError
from gpuherd.qa.folder import DescribedResults, QADirectory
from gpuherd.qa.grading.verdicts import Judgment, Mode, Verdict
from gpuherd.runs import records
from gpuherd.runs.files import write_lines
from gpuherd.runs.shards import ShardedDirectory, undamaged, write_task

# --- The description --------------------------------------------------------------------------------------------------
#
# The description of a judging: who judged what, how, and with which result. Frozen data, and its JSON values.

Answers = Literal["greedy", "samples", "all"]
ANSWERS: tuple[Answers, ...] = get_args(Answers)


class JudgeKind(StrEnum):
    """How verdicts come about: five rules, a model of ours, or a model behind an address."""

    EXACT = "exact"
    CONTAINS = "contains"
    SQUAD = "squad"
    ROUGE = "rouge"
    MATH = "math"
    MODEL = "model"
    URL = "url"


RULES = (JudgeKind.EXACT, JudgeKind.CONTAINS, JudgeKind.SQUAD, JudgeKind.ROUGE, JudgeKind.MATH)


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
    kind: JudgeKind
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

    def __post_init__(self) -> None:
        # Files of versions before a verdict lack its count.
        object.__setattr__(self, "counts", {verdict: self.counts.get(verdict, 0) for verdict in Verdict})

    @property
    def total(self) -> int:
        """How many answers were judged."""
        return sum(self.counts.values())


JUDGINGS = DescribedResults(
    noun="judging",
    description=JudgingMeta,
    path=QADirectory.judging,
    error=BadJudging,
    remedy="remove it and its .json, and judge again",
    flag="--judge",
    command="gpuherd judge {run} {name}",
)

# --- Files ------------------------------------------------------------------------------------------------------------


def judgings_of(folder: QADirectory) -> list[JudgingMeta]:
    """The complete judgings of a run, the oldest first. One that can't be read is logged and left out."""
    return JUDGINGS.all_in(folder)


def judging_named(folder: QADirectory, name: str) -> JudgingMeta:
    """The judging of this name; of this judge, if it has one judging; or whose name begins so.

    Raises:
        UsageError: there is none, or more than one; it lists them.
        BadJudging: it is damaged, or of a newer gpuherd.
    """
    return JUDGINGS.named(folder, name, lambda each: each.answers, lambda each: each.judge == name)


def judgments(folder: QADirectory, meta: JudgingMeta) -> list[Judgment]:
    """The judgment of each answer, in the order of the questions and, of a question, of its answers.

    Raises BadJudging where the file is not there, or not as it was written.
    """
    found: list[Judgment] = []

    def check(data: bytes) -> None:
        # A line is read before the digest is compared, so that a damaged one is named.
        for number, line in enumerate(data.splitlines(), start=1):
            try:
                found.append(judgment_of(line))
            except BadJudging as problem:
                path = folder.judging(meta.name)
                raise BadJudging(f"{path}, line {number}: {problem}; {JUDGINGS.remedy}") from None

    JUDGINGS.content(folder, meta, check)
    return found


def write_judging(folder: QADirectory, meta: JudgingMeta, judgments: Iterable[Judgment]) -> JudgingMeta:
    """Writes a judging, its description last. Returns the description with counts and digest of what was written.

    An existing judging of this name is left as it is and returned: of two programs that complete it at the same moment
    one may have decided a formula for which the other ran out of time. Raises CannotWrite.
    """
    judged = list(judgments)
    data = "".join(f"{records.line_of(each)}\n" for each in judged).encode("ascii")
    counts = Counter(each.verdict for each in judged)
    sha256 = hashlib.sha256(data).hexdigest()
    complete = replace(meta, counts={verdict: counts[verdict] for verdict in Verdict}, sha256=sha256)
    return JUDGINGS.write(folder, complete, {".jsonl": data})


def judgment_of(line: str | bytes) -> Judgment:
    """The judgment in a line. Raises BadJudging."""
    try:
        judgment: Judgment = records.read(Judgment, json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise BadJudging(f"no judgment: {type(problem).__name__}: {problem}") from None
    return judgment


# --- Work of jobs -----------------------------------------------------------------------------------------------------
#
# Everything is decided before a job starts (which template, which words) and after it has ended (which verdict); a job
# only measures. So another threshold needs no new job.

LONGEST_REPLY = 200_000  # characters that are kept of a written reply


@dataclass(frozen=True, slots=True)
class GradingTask:
    """The task of the jobs, for each case.

    Attributes:
        mode: weigh the verdict words, or write a reply.
        words: for each verdict the continuations that mean it, as token ids; none in text mode.
        end_ids, stop, reply_tokens: how a reply ends.
    """

    mode: Mode
    words: Mapping[Verdict, tuple[tuple[int, ...], ...]]
    end_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    reply_tokens: int = 1


def cases_path(folder: ShardedDirectory) -> Path:
    """The token ids of each prompt, as JSON lines."""
    return folder.root / "cases.jsonl"


def write_work(folder: ShardedDirectory, task: GradingTask, cases: Iterable[Sequence[int]]) -> None:
    """Writes what the jobs are given, the task last. What is there is left: it is the same. Raises CannotWrite."""
    if not folder.task.exists():
        write_lines(cases_path(folder), (json.dumps(list(ids), separators=(",", ":")).encode() for ids in cases))
        write_task(folder, task)


def read_cases(folder: ShardedDirectory) -> list[tuple[int, ...]]:
    """The token ids of each case. Raises Damaged."""
    path = cases_path(folder)
    with undamaged(path, f"remove {folder.root} to begin anew"), path.open("rb") as file:
        return [tuple(int(each) for each in json.loads(line)) for line in file]


def log_probs_line(words: Mapping[Verdict, Sequence[tuple[int, ...]]], log_probs: Sequence[float | None]) -> str:
    """A case's line in tokens mode: the log-probs of all words, in the order of ``words``."""
    left = iter(log_probs)
    values = {verdict.value: [next(left) for _ in ways] for verdict, ways in words.items()}
    return json.dumps({"log_probs": values}, allow_nan=False, separators=(",", ":"))


def reply_line(text: str, *, cut: bool) -> str:
    """A case's line in text mode; ``cut``: the reply did not end by itself."""
    return json.dumps({"reply": text[:LONGEST_REPLY], "cut": cut or len(text) > LONGEST_REPLY}, separators=(",", ":"))


def log_probs_of(line: bytes) -> dict[Verdict, list[float | None]]:
    """The log-probs that ``log_probs_line`` wrote."""
    return {Verdict(name): values for name, values in json.loads(line)["log_probs"].items()}


def reply_of(line: bytes) -> tuple[str, bool]:
    """The reply that ``reply_line`` wrote."""
    value = json.loads(line)
    return value["reply"], value["cut"]
