"""The folder of an experiment's run, ``outputs/<experiment>/<stamp>``: this class owns every path in it."""

from __future__ import annotations

from pathlib import Path

from gpuherd.jobs.run_dir import RunDirectory, safe_name

FORMAT = 1  # of what lies in the folder; in run.json as "format"
KIND = "posttrain"  # in run.json as "kind"


class RoundsDirectory(RunDirectory):
    """Paths of one run.

    Attributes:
        run_log: what happened, for people and grep.
        datasets: what was collected: ``<algorithm>/<data set>_<family>_r<round>/<shard>.jsonl``, and ``<shard>.json``
            last, when the shard is done.
        models: what was trained: ``<algorithm>/<data set>_<family>_r<round>/``: ``model``, ``checkpoints``, and
            ``policy.json`` last.
        results: ``<algorithm>/<family>/<data set>/r<round>/result.json``.
        usage: what each job has taken of its GPU.
        done: written when all is there; holds the summary.
    """

    def __init__(self, root: str | Path):
        super().__init__(root)
        self.run_log = self.root / "run.log"
        self.datasets = self.root / "datasets"
        self.models = self.root / "models"
        self.results = self.root / "results"
        self.usage = self.root / "usage"
        self.done = self.root / "done.json"

    def data(self, algorithm: str, dataset: str, family: str, round_number: int) -> Path:
        """The folder of a round's rows."""
        return self.datasets / safe_name(algorithm) / f"{_combination(dataset, family)}_r{round_number}"

    def rows(self, data: Path, shard: int) -> Path:
        """The rows of a shard, as they come."""
        return data / f"{shard:05d}.jsonl"

    def rows_done(self, data: Path, shard: int) -> Path:
        """What is there when a shard is done: how many rows it has, and what it took."""
        return data / f"{shard:05d}.json"

    def model(self, algorithm: str, dataset: str, family: str, round_number: int) -> Path:
        """The folder of a training."""
        return self.models / safe_name(algorithm) / f"{_combination(dataset, family)}_r{round_number}"

    def policy(self, model: Path) -> Path:
        """What a training hands on; there when it is done."""
        return model / "policy.json"

    def result(self, algorithm: str, family: str, dataset: str, round_number: int | None, evaluated_on: str) -> Path:
        """The folder of an evaluation; its ``result.json`` comes last."""
        folder = self.results / safe_name(algorithm) / safe_name(family) / safe_name(dataset)
        if round_number is not None:
            folder /= f"r{round_number}"
        return folder if evaluated_on == dataset else folder / f"on_{safe_name(evaluated_on)}"

    def usage_of(self, job: str) -> Path:
        """What a job has taken of its GPU."""
        return self.usage / f"{safe_name(job)}.json"


def _combination(dataset: str, family: str) -> str:
    return f"{safe_name(dataset)}_{safe_name(family)}"
