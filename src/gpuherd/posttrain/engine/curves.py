"""The figures of a training by step: ``curves.jsonl``, and TensorBoard, Weights & Biases and trackio where asked.

A line a step, synced; where a training goes on from a checkpoint, lines of later steps are cut off, so that no step is
there twice. Also the peak memory of each GPU, as lines for run.log.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpuherd.atomic import atomic_write
from gpuherd.errors import CannotWrite, MissingExtra, UsageError, naming_extras, printable
from gpuherd.posttrain.engine.dist_env import DistEnv

FILE = "curves.jsonl"
_WANDB_RUN, _TRACKIO_RUN = "wandb-run", "trackio-run"  # the id of the run of W&B, the name of that of trackio


def read_curves(folder: Path) -> list[dict[str, Any]]:
    """The lines of a folder's curves, by step; none where nothing was logged. A last line that a kill cut is left out.

    Raises UsageError for other lines that can't be read.
    """
    path = folder / FILE
    if not path.exists():
        return []
    return [json.loads(line) for line in _lines(path)]


def amend(folder: Path, step: int, figures: Mapping[str, float]) -> None:
    """Adds figures to the line of a step that is there, or adds the line; whole or not at all. Raises CannotWrite."""
    lines = read_curves(folder)
    if not any(line["step"] == step for line in lines):
        lines.append({"step": step})
    texts = [json.dumps({**line, **figures} if line["step"] == step else line, allow_nan=False) for line in lines]
    try:
        atomic_write(folder / FILE, "".join(f"{line}\n" for line in texts).encode())
    except OSError as problem:
        raise CannotWrite(f"can't write {folder / FILE}: {problem.strerror}") from None


def _lines(path: Path) -> Iterator[str]:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines[:-1], 1):  # behind the last newline stands nothing, or what a kill cut
        try:
            found = json.loads(line)
            sane = isinstance(found, dict) and isinstance(found["step"], int)
        except (ValueError, KeyError, RecursionError):
            sane = False
        if not sane:
            raise UsageError(f"{path}: line {number} is no line of curves; move the file away")
        yield line


class Curves:
    """Writes them: the main process does, the others do nothing. A context manager.

    Args:
        folder: of the training; the file is ``folder/curves.jsonl``.
        report_to: ``tensorboard`` (into ``folder/tensorboard``), ``wandb``, ``trackio``.
        step: of the checkpoint that the training goes on from; later lines are cut off. 0: all are.
        name, project: what W&B and trackio call the run, and its project.

    Raises:
        UsageError: another word in report_to, or a file that is none of ours.
        MissingExtra: what is reported to is not installed.
    """

    def __init__(
        self,
        folder: Path,
        world: DistEnv,
        report_to: Sequence[str] = (),
        *,
        step: int = 0,
        name: str | None = None,
        project: str | None = None,
    ):
        for each in report_to:
            if each not in REPORTERS:
                raise UsageError(f"report_to: {each!r} is none of {', '.join(REPORTERS)}")
        self.path = folder / FILE
        self._writers: list[Any] = []
        self._file: int | None = None
        self._is_main = world.is_main
        if not self._is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            kept = [line for line in _lines(self.path) if json.loads(line)["step"] <= step]
            atomic_write(self.path, "".join(f"{line}\n" for line in kept).encode())
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._writers += [REPORTERS[each](folder, name, project, step) for each in report_to]

    def log(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Adds the figures of a step but those that are None. Raises ValueError for one not finite, CannotWrite."""
        if not self._is_main:
            return
        logged = {name: value for name, value in figures.items() if value is not None}
        for name, value in logged.items():
            if not math.isfinite(value):
                raise ValueError(f"{printable(name)} of step {step} is {value}")
        if self._file is None:
            raise ValueError("these curves are closed")
        line = json.dumps({"step": step, **logged}, allow_nan=False)
        try:
            os.write(self._file, f"{line}\n".encode())
            os.fsync(self._file)
        except OSError as problem:
            raise CannotWrite(f"can't write {self.path}: {problem.strerror}") from None
        for writer in self._writers:
            writer.log(step, logged)

    def close(self) -> None:
        """Closes file and reporters."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _TensorBoard:
    def __init__(self, folder: Path, _name: str | None, _project: str | None, step: int):
        with naming_extras({"tensorboard": "posttrain"}, "TensorBoard's files take"):
            import tensorboard  # noqa: F401 - torch says so late
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides by itself what was logged of later steps.
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _run_of(kept: Path, step: int) -> str | None:
    """What a tracker calls the run that a training goes on with; None where it begins."""
    try:
        return (kept.read_text(encoding="utf-8").strip() or None) if step > 0 else None
    except FileNotFoundError:
        return None


def _keep_run(kept: Path, run: str) -> None:
    try:
        atomic_write(kept, f"{run}\n".encode())
    except OSError as problem:
        raise CannotWrite(f"can't write {kept}: {problem.strerror}") from None


class _WandB:
    """A run of W&B. A training that is resumed from a checkpoint continues it: its id is kept in the folder."""

    def __init__(self, folder: Path, name: str | None, project: str | None, step: int):
        try:
            import wandb
        except ModuleNotFoundError:
            raise MissingExtra("report_to wandb: wandb is not installed; pip install wandb") from None
        # The environment (WANDB_PROJECT, WANDB_NAME, WANDB_RUN_ID) counts where no option is given.
        run = os.environ.get("WANDB_RUN_ID") or _run_of(folder / _WANDB_RUN, step) or secrets.token_hex(4)
        _keep_run(folder / _WANDB_RUN, run)
        self._run: Any = wandb.init(
            project=project or os.environ.get("WANDB_PROJECT", "gpuherd"),
            name=name or os.environ.get("WANDB_NAME", folder.name),
            dir=str(folder),
            id=run,
            resume="allow",
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A run of trackio, on this machine unless its own variables (TRACKIO_SPACE_ID, ...) say otherwise.

    trackio knows a run by its name, so each gets one that no other has; it is kept in the folder, and a training that
    is resumed from a checkpoint continues it. Steps behind the checkpoint are there twice then, with the same figures.
    """

    def __init__(self, folder: Path, name: str | None, project: str | None, step: int):
        try:
            import trackio
        except ModuleNotFoundError:
            raise MissingExtra("report_to trackio: trackio is not installed; pip install trackio") from None
        run = _run_of(folder / _TRACKIO_RUN, step) or f"{name or folder.name}-{secrets.token_hex(4)}"
        _keep_run(folder / _TRACKIO_RUN, run)
        self._trackio: Any = trackio
        with redirect_stdout(sys.stderr):  # it prints where its figures go
            self._run: Any = trackio.init(
                project=project or "gpuherd",
                name=run,
                resume="allow",
                embed=False,
                auto_log_gpu=False,  # gpu_monitor measures the GPUs
                auto_log_cpu=False,
            )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._trackio.finish()  # the run's own finish would be called again at exit


REPORTERS: Mapping[str, Callable[[Path, str | None, str | None, int], Any]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
}


_GB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The most that was taken of a GPU, in bytes; None where it was not measured.

    Attributes:
        label: as people call it.
        allocated, reserved: by torch: for tensors, and with what its allocator keeps.
        total: the GPU's.
    """

    label: str
    allocated: int | None
    reserved: int | None
    total: int | None


def memory_summary(gpus: Sequence[GpuMemory]) -> list[str]:
    """The lines of a summary.

    >>> print("\\n".join(memory_summary([GpuMemory("0", 45 << 30, 48 << 30, 80 << 30)])))
    GPU Memory Summary:
      GPU 0: 45.00 GB allocated, 48.00 GB reserved, 80.00 GB total
    """
    lines = ["GPU Memory Summary:"]
    for gpu in gpus:
        parts = ((gpu.allocated, "allocated"), (gpu.reserved, "reserved"), (gpu.total, "total"))
        lines.append(f"  GPU {gpu.label}: " + ", ".join(f"{_gb(value)} {word}" for value, word in parts))
    return lines if gpus else [*lines, "  no GPUs: all was computed on the CPU"]


def measured(label: str, device: str) -> GpuMemory | None:
    """The most that this process has taken of its GPU so far; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return GpuMemory(
        label,
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
        torch.cuda.get_device_properties(device).total_memory,
    )


def of_world(world: DistEnv) -> list[GpuMemory]:
    """What each process has taken, by rank; all call it together."""
    return [each for each in world.gather(measured(str(world.rank), world.device)) if each is not None]


def _gb(value: int | None) -> str:
    return "N/A" if value is None else f"{value / _GB:.2f} GB"
