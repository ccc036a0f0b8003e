"""The output folder of one training: every path in it; begun, or found to be that of the same training. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from gpuherd import __version__
from gpuherd.errors import CannotWrite, UsageError, printable
from gpuherd.jobs.run_dir import safe_name
from gpuherd.posttrain.config.yaml_strict import read_yaml
from gpuherd.posttrain.learning.settings import TrainSettings, read_settings
from gpuherd.posttrain.rewards.function import digest_of
from gpuherd.posttrain.runs.folder import BadRun, OutputDirectory
from gpuherd.runs.files import write_file


class TrainDirectory(OutputDirectory):
    """Paths of one training.

    Attributes:
        model: the trained model, as transformers saves it, or an adapter.
        checkpoints: of the training, removed when the model is there.
        config: the configuration as it was resolved.
        rows: what was collected before the training began (dpo and sft without a data_file).
        stop: is there when the training is asked to stop.
        train_lock: held by the training at work.
    """

    kind = "train"

    def __init__(self, root: str | Path):
        super().__init__(root)
        self.model = self.root / "model"
        self.checkpoints = self.root / "checkpoints"
        self.config = self.root / "config.yaml"
        self.rows = self.root / "rows.jsonl"
        self.stop = self.root / "stop"
        self.train_lock = self.root / "train.lock"

    @classmethod
    def of(cls, settings: TrainSettings, output: str | None = None) -> Self:
        """The folder that is said, else the configuration's, else ``outputs/`` with the experiment's name (as a file's:
        it leads nowhere else)."""
        return cls(output or settings.output_dir or Path("outputs") / safe_name(settings.experiment_name))

    def create_root(self) -> None:
        """Makes the folder, without those of a queue. Raises CannotWrite."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise CannotWrite(f"can't make {self.root}: {problem.strerror}; choose another folder") from None

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

    def shown_settings(self, record: Mapping[str, Any]) -> Any:  # noqa: ARG002 - a training's are its configuration
        """See ``OutputDirectory``."""
        try:
            return read_yaml(self.config)
        except (UsageError, OSError):
            return {}


def look_over(folder: TrainDirectory, settings: TrainSettings, *, resume: bool) -> None:
    """Checks that the folder is free for this training, or holds it already. Writes nothing.

    Raises UsageError: the folder holds another training, or this one without ``resume``, or something else.
    """
    if folder.config.exists():
        if not resume:
            state = "has ended" if folder.done.exists() else "was begun"
            raise UsageError(
                f"{folder.root}: a training {state} here; add --resume to go on, or choose another --output"
            )
        refuse_another(folder, settings)
        if not folder.done.exists():
            _refuse_other_rewards(folder, settings)
    elif folder.root.is_dir() and any(path.name not in _OURS for path in folder.root.iterdir()):
        raise UsageError(f"{folder.root}: there are files of something else; choose another --output")


def prepare(folder: TrainDirectory, settings: TrainSettings, *, resume: bool, simulate: bool = False) -> None:
    """Begins the folder, or resumes it. Raises as ``look_over``, and CannotWrite.

    Args:
        simulate: its GPUs are simulated, which is recorded.
    """
    look_over(folder, settings, resume=resume)
    if not folder.config.exists():
        folder.create_root()
        about = {"gpuherd_version": __version__, "name": settings.experiment_name, "simulated": simulate}
        folder.write_record({**about, "rewards": _rewards(settings)})
    write_file(folder.config, settings.as_yaml().encode())


# What a start leaves that was killed before it wrote config.yaml; the second line is the queue's of a cluster's engine.
_OURS = (
    "run.json", "run.log", "train.lock",
    "attempts", "control.fifo", "failures.jsonl", "gpu_metrics.json", "handover", "logs", "queue.lock", "queue.sqlite",
    "queue.sqlite-shm", "queue.sqlite-wal", "standing.json",
)  # fmt: skip


def refuse_another(folder: TrainDirectory, settings: TrainSettings) -> None:
    """Raises UsageError where the folder's training differs from this one in what changes results, by key."""
    kept, wanted = (each.deciding() for each in (read_settings(folder.config), settings))
    for key in sorted({*kept, *wanted}):
        if kept.get(key) != wanted.get(key):
            raise UsageError(
                f"{folder.root} holds another training: its {key} is {printable(repr(kept.get(key)))}, and here it is "
                f"{printable(repr(wanted.get(key)))}; choose another --output, or the old value"
            )


def _refuse_other_rewards(folder: TrainDirectory, settings: TrainSettings) -> None:
    """Raises UsageError where a reward function has changed since the training began."""
    try:
        begun = folder.record()["rewards"]
    except (BadRun, KeyError):  # of a training that an earlier version began
        return
    for where, digest in _rewards(settings).items():
        if begun.get(where, digest) != digest:
            raise UsageError(
                f"{folder.root} was begun with another {where}.reward, whose file has changed since; put the old one "
                "back, or choose another --output"
            )


def _rewards(settings: TrainSettings) -> dict[str, str]:
    """The digests of reward functions, by the block that names each."""
    blocks = {
        "policy_env": settings.policy_env,
        **{f"eval_envs[{number}]": each for number, each in enumerate(settings.eval_envs)},
    }
    named = {where: each.task.reward for where, each in blocks.items() if each is not None}
    return {where: digest_of(reward) for where, reward in named.items() if reward is not None}
