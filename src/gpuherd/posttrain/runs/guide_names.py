"""Names that a guide gives to the parts of such a system: ``GPUManager``; ``ParallelJobExecutor``, which runs all of an
experiment; ``ParallelDataGenerator``, which collects the first round's data alone. The last two are the command's own
way in a few lines. ``check_setup`` is the guide's test of a machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from gpuherd.errors import ExitCode, GpuherdError, NoSuchGpu, UsageError, printable
from gpuherd.gpus.query import machine
from gpuherd.gpus.state import Gpu
from gpuherd.gpus.visible import visible_now
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.place.inventory import idle_gpus
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.resources import read_with_precision
from gpuherd.models.place.result import MemoryPlan
from gpuherd.posttrain.engine.curves import GpuMemory, memory_summary
from gpuherd.posttrain.runs.experiment import RoundsExperiment, RoundsOutcome, experiment_of
from gpuherd.posttrain.runs.options import RoundsOptions
from gpuherd.posttrain.runs.plan import Phase, Step
from gpuherd.posttrain.runs.work import rows_of
from gpuherd.posttrain.types import Row
from gpuherd.runs.stage import failure_lines

T = TypeVar("T")

_MB_IN_GB = 1024
_MIB = 1 << 20


class GPUManager:
    """See the module. Each question looks at the GPUs anew."""

    @property
    def num_gpus(self) -> int:
        """How many there are; 0 on a machine without."""
        return len(self._gpus())

    @property
    def available_gpus(self) -> list[int]:
        """Their ids."""
        return list(range(self.num_gpus))

    def get_gpu_memory(self, gpu_id: int = 0) -> float:
        """All memory of a GPU, in GB. Raises NoSuchGpu."""
        return self._gpu(gpu_id).total_mb / _MB_IN_GB

    def get_free_memory(self, gpu_id: int = 0) -> float:
        """Memory of it that no process uses, as the driver says, in GB. Raises NoSuchGpu."""
        return self._gpu(gpu_id).free_mb / _MB_IN_GB

    def can_fit_model(self, model: str, gpu_id: int = 0, *, dtype: str | None = None) -> bool:
        """Whether a model fits on this GPU when no process uses it, decoding one short answer, by its plan.

        Raises NoSuchGpu, MissingModel, BadModel.
        """
        cards = idle_gpus([self._gpu(gpu_id)])
        architecture, precision = read_with_precision(model, dtype)
        return bool(cards) and isinstance(
            make_plan(architecture, cards, precision, Workload(), advise=False), MemoryPlan
        )

    def get_optimal_batch_size(self, base_batch_size: int, gpu_id: int = 0) -> int:
        """The guide's rule: twice the base on GPUs of 80 GB, the base from 40 GB on, else half of it, at least 1.

        A rule of thumb. What fits is planned (``gpuherd plan``), or found out (``training.dynamic_batch_size``).
        """
        if base_batch_size < 1:
            raise UsageError(f"base_batch_size={base_batch_size}; the least is 1")
        # Cards that are sold as 80 GB have a little less.
        memory = self.get_gpu_memory(gpu_id) / 0.95
        return (
            base_batch_size * 2 if memory >= 80 else base_batch_size if memory >= 40 else max(1, base_batch_size // 2)
        )

    def distribute_work(self, items: Sequence[T], num_workers: int | None = None) -> list[list[T]]:
        """The items dealt in turn to workers, as many as there are GPUs (at least 1) unless said otherwise.

        >>> GPUManager().distribute_work("abcde", 2)
        [['a', 'c', 'e'], ['b', 'd']]
        """
        many = max(1, self.num_gpus) if num_workers is None else num_workers
        if many < 1:
            raise UsageError(f"num_workers={num_workers}; the least is 1")
        return [list(items[start::many]) for start in range(many)]

    def memory_summary(self) -> str:
        """``GPU Memory Summary:`` with a line a GPU: what is in use by anybody, as the driver sees it. (What torch has
        allocated and what it reserves are two things inside a process alone; from outside both are what is in use.)"""
        gpus = self._gpus()
        lines = memory_summary(
            [
                GpuMemory(str(number), gpu.used_mb * _MIB, gpu.used_mb * _MIB, gpu.total_mb * _MIB)
                for number, gpu in enumerate(gpus)
            ]
        )
        return "\n".join(lines if gpus else [lines[0], "  no GPUs are visible here"])

    def print_memory_summary(self) -> None:
        """Writes ``memory_summary`` to standard output."""
        sys.stdout.write(self.memory_summary() + "\n")

    def _gpus(self) -> tuple[Gpu, ...]:
        return visible_now(machine(processes=False).gpus)

    def _gpu(self, gpu_id: int) -> Gpu:
        gpus = self._gpus()
        if not 0 <= gpu_id < len(gpus):
            raise NoSuchGpu(f"there is no GPU {gpu_id}; visible here: {len(gpus)}")
        return gpus[gpu_id]


@lru_cache(maxsize=1)
def get_gpu_manager() -> GPUManager:
    """The one of this process."""
    return GPUManager()


class NotCollected(GpuherdError):
    """A job that was to collect data has failed."""


class ParallelJobExecutor:
    """An experiment from Python.

    Args:
        overrides: the words of the command line: ``experiment.name=first``, ``models=gpt2``, ``resume_from=DIR``.
        options: those of the command line, a file of one's own (``config``) and how jobs run.
        simulate: the GPUs are pretended: all is computed on the CPU.

    Raises UsageError; BadRun for a run to go on with that is none.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        *,
        options: RoundsOptions | None = None,
        console: Console | None = None,
        simulate: bool = False,
    ):
        told = options if options is not None else RoundsOptions()
        self.experiment = experiment_of(overrides, told, console=console, simulate=simulate)

    def run(self) -> RoundsOutcome:
        """Runs it to the end, or resumes a run that was stopped. Raises what ``RoundsExperiment.run`` raises."""
        return self.experiment.run()


@dataclass(frozen=True, slots=True)
class Collected:
    """What was collected.

    Attributes:
        rows: of each combination (algorithm, data set, family), in the order of the problems.
        figures: of each job by name: what it took.
    """

    rows: Mapping[tuple[str, str, str], tuple[Row, ...]]
    figures: Mapping[str, Mapping[str, Any]]


class ParallelDataGenerator(ParallelJobExecutor):
    """Collects the first round's data, each GPU a part of the problems. The arguments are those of
    ``ParallelJobExecutor``; run later, that resumes with what was collected here."""

    def generate(self) -> Collected:
        """Collects, or goes on where it was stopped. Raises NotCollected; what ``RoundsExperiment.run`` raises."""
        experiment = self.experiment
        if experiment.options.dry_run or (experiment.goes_on and experiment.folder.done.exists()):
            raise UsageError("there is nothing to collect: with dry_run nothing is started, and a complete run has all")
        experiment.only = lambda step: step.phase is Phase.COLLECT and step.round == 0
        outcome = experiment.run()
        if outcome.exit_code is not ExitCode.OK or (outcome.jobs is not None and not outcome.jobs.complete):
            told = [] if outcome.jobs is None else failure_lines(outcome.jobs)
            raise NotCollected("; ".join(f"{job}: {reason}" for job, reason in told) or "stopped before all was done")
        return _read(experiment)


def _read(experiment: RoundsExperiment) -> Collected:
    folder = experiment.folder
    steps = [each.step for each in experiment.plan]
    shards: dict[tuple[str, str, str], list[Step]] = {}
    for step in steps:
        shards.setdefault((step.algorithm, step.dataset, step.family), []).append(step)
    problems, batch = experiment.prepared.problems, experiment.settings.generation.batch_size
    rows = {key: rows_of(folder, some, problems[some[0].dataset], batch) for key, some in shards.items()}
    figures = {
        step.name: json.loads(
            folder.rows_done(folder.data(step.algorithm, step.dataset, step.family, 0), step.shard).read_bytes()
        )
        for step in steps
    }
    return Collected(rows, figures)


# ---- the guide's test of a set-up

_MOST_WORKERS = 4
_PROBLEMS = 32


@dataclass(frozen=True, slots=True)
class Checked:
    """One check: what was looked at, whether it is as it should be, and what was seen."""

    what: str
    passed: bool
    seen: str


def check_setup(
    options: RoundsOptions, gpus: Sequence[Gpu], console: Console, *, simulate: bool
) -> tuple[Checked, ...]:
    """Whether this machine is set up for experiments: looks at the GPUs, and collects data on two or more, in a
    temporary folder, by the model that ships. A failure is returned, not raised.

    Args:
        gpus: those that are visible here.
    """
    usable = [gpu for gpu in gpus if gpu.problem is None]
    names = ", ".join(f"{gpu.label}: {printable(gpu.name)}, {gpu.total_mb} MB" for gpu in usable)
    found = [Checked("GPU detection", bool(usable), names or "no GPU; jobs run on the CPU")]
    with tempfile.TemporaryDirectory(prefix="gpuherd-setup-") as folder:
        try:
            found += _collection(options, len(usable), Path(folder), console, simulate)
        except GpuherdError as problem:
            found.append(Checked("parallel data generation", False, str(problem)))
    return tuple(found)


def _collection(options: RoundsOptions, gpus: int, folder: Path, console: Console, simulate: bool) -> list[Checked]:
    workers = min(_MOST_WORKERS, max(2, gpus))
    overrides = [
        "experiment.name=setup",
        f"output_dir={folder}",
        "algos=[QSharp]",
        "models=[tiny]",
        "datasets=[arithmetic]",
        f"datasets.arithmetic.settings={{digits:1,train:{_PROBLEMS},test:4}}",
        "data_collection.max_examples=0",
        "evaluation.max_examples=0",
        "generation.batch_size=8",
        f"data_collection.shards={workers}",
        "data_collection.samples_per_example=2",
    ]
    told = replace(options, dry_run=False, max_gpus=options.max_gpus and max(options.max_gpus, workers))
    generator = ParallelDataGenerator(overrides, options=told, console=console, simulate=simulate)
    return _judged(generator, generator.generate(), gpus)


def _judged(generator: ParallelDataGenerator, collected: Collected, gpus: int) -> list[Checked]:
    run = generator.experiment.folder
    (rows,) = collected.rows.values()
    problems = len({row.problem for row in rows})
    visible = {name: _visible(run.usage_of(name)) for name in collected.figures}
    on_gpus = {device for device in visible.values() if device}
    assigned = ", ".join(f"{name}: {'CPU' if not device else f'GPU {device}'}" for name, device in visible.items())
    # Where others use all GPUs but one, that one has all the work.
    assigned_well = not gpus or (all(visible.values()) and len(on_gpus) >= min(2, gpus))
    log = run.run_log.read_text(encoding="utf-8", errors="replace").splitlines()
    memory = [line.strip() for line in log if line.strip().partition(" ")[0] == "GPU" or ": GPU " in line]
    return [
        Checked(
            "parallel data generation",
            problems == _PROBLEMS and len(rows) == 2 * _PROBLEMS,
            f"{len(rows)} rows of {problems} problems by {len(visible)} workers",
        ),
        Checked("worker assignments", assigned_well, assigned),
        Checked("memory and utilization in run.log", bool(memory), f"{len(memory)} lines that name a GPU"),
    ]


def _visible(path: Path) -> str | None:
    told: Any = json.loads(path.read_bytes())
    value = told["visible"]
    return value if isinstance(value, str) else None
