"""The folder of a run of answers, and the results in it that have a description.

The description of a result, ``<name>.json``, is written last and says how ``<name>.*`` was made. Judgings, statistics
and scorings are such results. A result without its description does not exist; one that is complete never changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from gpuherd.atomic import atomic_write
from gpuherd.errors import GpuherdError, UsageError, printable
from gpuherd.jobs.run_dir import safe_name
from gpuherd.options import option
from gpuherd.runs import records
from gpuherd.runs.files import single_writer
from gpuherd.runs.shards import ShardedDirectory

FORMAT = 1  # of the files in the folder; in run.json as "format"
KIND = "qa"  # in run.json as "kind"
DEFAULT_RUNS_DIR = "./runs"


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """The folder of runs."""

    runs_dir: str = option(DEFAULT_RUNS_DIR, help="folder of all runs of answers", metavar="DIR", group="runs")


class QADirectory(ShardedDirectory):
    """Paths of one run, ``runs/<run_id>``.

    Attributes:
        questions: the questions that are asked, in order, as JSON lines.
        prompts: the prompt of each, as JSON lines: id, text, token ids.
        refused: the rows of the data set that are not asked, with reasons, as JSON lines.
        answers: all answers in the order of the questions. Written once, when there are all, and never changed.
        answers_table: the same as Parquet, one row for each generation.
        done: digests, counts, versions. It is written last: a run is complete when this file exists.
        judgments: ``<judging>.jsonl``, and its description ``<judging>.json``, which is written last.
        statistics: data that scores need beyond the answers, measured once: ``<statistic>.jsonl`` and ``.json``.
        scores: ``<scoring>.csv``, ``.parquet``, and ``.json`` likewise.
        evaluations: ``<evaluation>.json``, ``.csv`` and ``.html``.
        work: run folders of the jobs of judgings and statistics, ``<name>``.
    """

    def __init__(self, root: str | Path, log_dir: str | Path | None = None):
        super().__init__(root, log_dir)
        self.questions = self.root / "questions.jsonl"
        self.prompts = self.root / "prompts.jsonl"
        self.refused = self.root / "refused.jsonl"
        self.answers = self.root / "answers.jsonl"
        self.answers_table = self.root / "answers.parquet"
        self.done = self.root / "done.json"
        self.judgments = self.root / "judgments"
        self.statistics = self.root / "statistics"
        self.scores = self.root / "scores"
        self.evaluations = self.root / "evaluations"
        self.work = self.root / "work"

    @property
    def runs_dir_option(self) -> str:
        """The option that says where the run is, behind a space; empty where it is in the usual place."""
        place = self.root.parent
        usual = place.name == Path(DEFAULT_RUNS_DIR).name and place.parent.samefile(".")
        return "" if usual else f" --runs-dir {shlex.quote(str(place))}"

    def judging(self, name: str, suffix: str = ".jsonl") -> Path:
        """A judging's file, by its name; never outside the folder."""
        return self.judgments / f"{safe_name(name)}{suffix}"

    def statistic(self, name: str, suffix: str = ".jsonl") -> Path:
        """A statistic's file."""
        return self.statistics / f"{safe_name(name)}{suffix}"

    def scoring(self, name: str, suffix: str) -> Path:
        """A scoring's file."""
        return self.scores / f"{safe_name(name)}{suffix}"

    def evaluation(self, name: str, suffix: str) -> Path:
        """An evaluation's file."""
        return self.evaluations / f"{safe_name(name)}{suffix}"

    def work_of(self, name: str) -> ShardedDirectory:
        """The run folder of the jobs of a judging or a statistic."""
        return ShardedDirectory(self.work / safe_name(name))


# --- results with a description ---------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

T = TypeVar("T")


def parsed(values: Any, noun: str, error: type[GpuherdError], decode: Callable[[Any], T], newest: int) -> T:
    """What ``decode`` makes of JSON values of the ``newest`` format, or an older one. Raises ``error``."""
    if not isinstance(values, dict) or not isinstance(values.get("format"), int):
        raise error(f"it is no {noun} of gpuherd")
    if values["format"] > newest:
        raise error(f"written by a newer gpuherd (format {values['format']}, known here: {newest}); update gpuherd")
    try:
        return decode(values)
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise error(f"it is no whole {noun}: {type(problem).__name__}: {problem}") from None


def read_parsed(path: Path, error: type[GpuherdError], remedy: str, parse: Callable[[Any], T]) -> T:
    """What ``parse`` makes of the JSON in a file. Raises ``error``, as ``parse`` does, with the file's name."""
    try:
        return parse(json.loads(path.read_bytes()))
    except OSError as problem:
        raise error(f"can't read {path}: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is no JSON: {problem}; {remedy}") from None
    except error as problem:
        raise error(f"{path}: {problem}") from None


class Description(Protocol):
    """The fields of every description: the result's name, the digest of its file, the time (ISO 8601, UTC)."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def made(self) -> str: ...


DescriptionT = TypeVar("DescriptionT", bound=Description)


@dataclass(frozen=True, kw_only=True)
class DescribedResults(Generic[DescriptionT]):
    """One kind of results in the folders of runs: their descriptions as JSON, read and written.

    Attributes:
        noun: what one is called in messages.
        description: the dataclass of descriptions.
        path: of a result's file, by the run's folder, its name and the suffix.
        error: raised for one that can't be used.
        remedy: what to do about one that is damaged, as the end of a message.
        flag, command: the option that names one, and what makes one of ``{run}``; for results that users name.
        suffix: of the file whose digest the description has.
        format: of the description, which names it; a newer one is refused.
        encode, decode: between a description and its JSON values, without ``format``.
    """

    noun: str
    description: type[DescriptionT]
    path: Callable[[QADirectory, str, str], Path]
    error: type[GpuherdError]
    remedy: str
    flag: str = ""
    command: str = ""
    suffix: str = ".jsonl"
    format: int = 1
    encode: Callable[[DescriptionT], Mapping[str, Any]] = records.jsonable
    decode: Callable[[Any], DescriptionT] | None = None

    # --- descriptions as JSON values ----------------------------------------------------------------------------------

    def values(self, meta: DescriptionT) -> dict[str, Any]:
        """A description as the values of its ``.json``."""
        return {"format": self.format, **self.encode(meta)}

    def parse(self, values: Any) -> DescriptionT:
        """The description with these values. Raises ``error``."""
        decode = self.decode or partial(records.read, self.description)
        found: DescriptionT = parsed(values, self.noun, self.error, decode, self.format)
        return found

    # --- reading ------------------------------------------------------------------------------------------------------

    def exists(self, folder: QADirectory, name: str) -> bool:
        """Whether there is a complete result of this name."""
        return self.path(folder, name, ".json").is_file()

    def read(self, folder: QADirectory, name: str) -> DescriptionT:
        """The description of the result of this name. Raises ``error``."""
        path = self.path(folder, name, ".json")
        found = read_parsed(path, self.error, self.remedy, self.parse)
        if found.name != path.stem:
            raise self.error(f"{path} describes {found.name!r}; was it renamed? {self.remedy}")
        return found

    def all_in(
        self, folder: QADirectory, read: Callable[[QADirectory, str], DescriptionT] | None = None
    ) -> list[DescriptionT]:
        """All descriptions of a run that can be used, the oldest first. One that ``read`` refuses is logged and left
        out."""
        found = []
        for path in sorted(self.path(folder, "any", ".json").parent.glob("*.json")):
            try:
                found.append((read or self.read)(folder, path.stem))
            except self.error as problem:
                logger.warning("%s", problem)
        return sorted(found, key=lambda each: (each.made, each.name))

    def named(
        self,
        folder: QADirectory,
        name: str,
        detail: Callable[[DescriptionT], object],
        alike: Callable[[DescriptionT], bool] = lambda _: False,
    ) -> DescriptionT:
        """The result of this name; or the only one that is ``alike``; or the only one whose name begins so.

        Args:
            detail: listed with the names to choose from.

        Raises:
            UsageError: there is none, or more than one; it lists them.
            GpuherdError: ``error``, for one that is damaged, or of a newer gpuherd.
        """
        path = self.path(folder, name, ".json")
        if path.is_file() and path.stem == name:
            return self.read(folder, name)
        there = self.all_in(folder)
        if not there:
            command = self.command.format(run=folder.root.name, name=name)
            raise UsageError(f"no {self.noun} of {folder.root.name} is there yet; '{command}' makes one")
        begun = [each for each in there if name and each.name.startswith(name)]
        fitting = [each for each in there if alike(each)] or begun
        if len(fitting) == 1:
            return fitting[0]
        listed = printable(", ".join(f"{each.name} ({detail(each)}, {each.made})" for each in fitting or there))
        if fitting:
            raise UsageError(f"{self.flag} {name} can mean {listed}; give one of these names")
        raise UsageError(f"{folder.root.name} has no {self.noun} {name!r}; there is {listed}")

    def content(self, folder: QADirectory, meta: DescriptionT, check: Callable[[bytes], None] | None = None) -> bytes:
        """The result's file as it was written. Raises ``error`` where it is missing or has changed.

        ``check``: refuses content before digests are compared, to name the damaged place.
        """
        path = self.path(folder, meta.name, self.suffix)
        try:
            data = path.read_bytes()
        except OSError as problem:
            raise self.error(f"can't read {path}: {problem.strerror}; {self.remedy}") from None
        if check is not None:
            check(data)
        if hashlib.sha256(data).hexdigest() != meta.sha256:
            raise self.error(f"{path} has been changed since it was written; {self.remedy}")
        return data

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, folder: QADirectory, meta: DescriptionT, files: Mapping[str, bytes]) -> DescriptionT:
        """Writes a result's files, by suffix, the description last. Returns the description that is there then.

        Where this result exists already, it is left as it is: of two programs that complete the same one at the same
        moment, one writes and the other reads. Raises CannotWrite, and ``error`` for an existing one that is damaged.
        """
        text = json.dumps(self.values(meta), indent=2, ensure_ascii=True, allow_nan=False)
        with single_writer(self.path(folder, meta.name, ".json").parent):
            if self.exists(folder, meta.name):
                return self.read(folder, meta.name)
            for suffix, data in files.items():
                atomic_write(self.path(folder, meta.name, suffix), data)
            atomic_write(self.path(folder, meta.name, ".json"), text.encode("ascii") + b"\n")
        return meta
