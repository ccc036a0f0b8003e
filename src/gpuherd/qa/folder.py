"""The folder of a run of answers: what a run of jobs has in it, and where everything made of the answers goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuherd.jobs.run_dir import safe_name
from gpuherd.options import option
from gpuherd.runs.shards import ShardedDirectory

FORMAT = 1  # of what lies in the folder; in run.json as "format"
KIND = "qa"  # in run.json as "kind"
DEFAULT_RUNS_DIR = "./runs"


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Where runs are."""

    runs_dir: str = option(DEFAULT_RUNS_DIR, help="folder of all runs of answers", metavar="DIR", group="runs")


class QADirectory(ShardedDirectory):
    """Paths of one run, ``runs/<run_id>``.

    Attributes:
        questions: the questions that are asked, in order, as JSON lines.
        prompts: the prompt of each, as JSON lines: id, text, token ids.
        refused: the rows of the data set that are not asked, with reasons, as JSON lines.
        answers: all answers in the order of the questions. Written once, when all are there, and never changed.
        answers_table: the same as Parquet, a row a generation.
        done: what was made: digests, counts, versions. A run is complete when this file is there; it comes last.
        judgments: ``<judging>.jsonl``, and ``<judging>.json`` that says how they were made and comes last.
        statistics: what scores need beyond the answers, measured once: ``<statistic>.jsonl`` and ``.json`` likewise.
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
