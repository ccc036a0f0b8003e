"""The folder of an ESD experiment: what a run of jobs has in it, and where a model's results go."""

from __future__ import annotations

from pathlib import Path

from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.models.names import safe_filename


class ESDDirectory(RunDirectory):
    """Paths of one experiment. Each model has a file of the same stem in each folder.

    Attributes:
        summary: a row a model.
        stats: a row a matrix, ``<model>.csv``; a model is done when this file is there. The others are written before.
        imported: the fragment of the data set that ``gpuherd esd import`` writes, of many models.
        coverage: a row a tensor of the checkpoint: analysed, or why not.
        metrics: the matrix of alphas, layers x modules.
        spectra: a few points of each spectrum, for plots.
        eigs: all eigenvalues, with --save-eigs.
    """

    def __init__(self, root: str | Path, log_dir: str | Path | None = None):
        super().__init__(root, log_dir)
        self.summary = self.root / "esd_results_summary.csv"
        self.stats = self.root / "stats"
        self.imported = self.stats / "imported.parquet"
        self.coverage = self.root / "coverage"
        self.metrics = self.root / "metrics"
        self.spectra = self.root / "spectra"
        self.eigs = self.root / "eigs"

    def stats_file(self, model_id: str) -> Path:
        """A model's stats file. ``/`` in an id is ``--``; the exact id stands in the file."""
        return self.stats / f"{safe_filename(model_id)}.csv"

    def stats_files(self) -> list[Path]:
        """The stats files that are there, by name."""
        return sorted(path for path in self.stats.glob("*.csv") if not path.name.startswith("."))

    def model_file(self, folder: Path, model_id: str, suffix: str) -> Path:
        """A model's file in one of the folders; ``suffix`` with its dot."""
        return folder / f"{safe_filename(model_id)}{suffix}"

    def coverage_file(self, model_id: str) -> Path:
        """A model's coverage table."""
        return self.model_file(self.coverage, model_id, ".csv")

    @property
    def folders_of_results(self) -> tuple[Path, ...]:
        """The folders in which workers write."""
        return (self.coverage, self.eigs, self.spectra, self.metrics, self.stats)
