"""The output folder of one training: this class owns every path in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from gpuherd.atomic import atomic_write
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.jobs.run_dir import safe_name
from gpuherd.posttrain.learning.config import TrainConfig

KIND = "train"  # in run.json as "kind"
FORMAT = 1


class TrainDirectory:
    """Paths of one training.

    Attributes:
        model: the trained model, as transformers saves it, or an adapter.
        checkpoints: of the training, removed when the model is there.
        config: the configuration as it was resolved.
        run_json: what was asked, for those who read runs.
        run_log: what happened, over all starts.
        rows: what was collected before the training began (dpo and sft without a data_file).
        stop: is there when the training is asked to stop.
        lock: held by the training at work.
        done: written last; holds the summary.
    """

    def __init__(self, root: str | Path):
        self.root = Path(root).absolute()
        self.model = self.root / "model"
        self.checkpoints = self.root / "checkpoints"
        self.config = self.root / "config.yaml"
        self.run_json = self.root / "run.json"
        self.run_log = self.root / "run.log"
        self.rows = self.root / "rows.jsonl"
        self.stop = self.root / "stop"
        self.lock = self.root / "train.lock"
        self.done = self.root / "done.json"

    @classmethod
    def of(cls, config: TrainConfig, output: str | None = None) -> Self:
        """The folder that is said, else the configuration's, else ``outputs/`` with the experiment's name (as a file's:
        it leads nowhere else)."""
        return cls(output or config.output_dir or Path("outputs") / safe_name(config.experiment_name))

    def create(self) -> None:
        """Makes the folder. Raises CannotWrite."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise CannotWrite(f"can't make {self.root}: {problem.strerror}; choose another folder") from None

    def write(self, path: Path, text: str) -> None:
        """Writes a file of this folder, whole or not at all. Raises CannotWrite."""
        try:
            atomic_write(path, text.encode())
        except OSError as problem:
            raise CannotWrite(f"can't write {path}: {problem.strerror}") from None

    def summary(self) -> Mapping[str, Any] | None:
        """What done.json holds; None where the training has not ended. Raises UsageError for one that is none."""
        try:
            told = json.loads(self.done.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as problem:
            raise UsageError(f"{self.done} can't be read: {problem}; remove it to train again") from None
        if not isinstance(told, dict):
            raise UsageError(f"{self.done} is no summary; remove it to train again")
        return told
