"""What an experiment would do: the models of the list, each examined, as jobs to run or rows to refuse.

Knows how a row becomes a job. Reads headers and the list, writes nothing, takes no GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from gpuherd.columns import Column, fitted, window
from gpuherd.errors import BadModel, printable
from gpuherd.esd.config import AnalysisOptions, ExperimentConfig
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_list import ModelRow, RefusedRow, Relation, read_model_list
from gpuherd.esd.selection import selected
from gpuherd.esd.spectra.batching import MB, peak_bytes
from gpuherd.jobs.job import Job
from gpuherd.models.checkpoints.hub_headers import HubHeaders
from gpuherd.models.lora.adapter import is_adapter
from gpuherd.models.names import ModelRef, parse_model, safe_filename
from gpuherd.models.subject import examine
from gpuherd.options import words_of

if TYPE_CHECKING:
    from gpuherd.models.subject import Preflight

# What CUDA, cuSOLVER and cuBLAS take for themselves in a process, before any matrix.
CUDA_CONTEXT_MB = 700

# Words that change where and how fast a model is analysed, not its figures: what is done stays done when they change,
# so that a list that ran out of memory goes on with --no-parallel-gpu.
NEUTRAL = ("--device-map=", "--no-parallel-gpu", "--save-eigs", "--output-dir=")

# How our own worker is started; it tells its progress with each stage and matrix, and while a download goes on. Half an
# hour without any is a worker that hangs. Another program may tell nothing, and gets no such limit by itself.
OUR_WORKER = "gpuherd.esd.worker"
HEARTBEAT_S = 1800.0

Track = Callable[[Sequence[ModelRow], str], Iterable[ModelRow]]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that can be analysed, with what its headers say."""

    row: ModelRow
    facts: Preflight


@dataclass(frozen=True, slots=True)
class AnalysisPlan:
    """The models to analyse and the rows refused, each in the order of the list."""

    models: tuple[PlannedModel, ...]
    refused: tuple[RefusedRow, ...]


def make_plan(config: ExperimentConfig, track: Track) -> AnalysisPlan:
    """Reads the list and looks at every model.

    Args:
        track: passes rows on one by one and shows how far they are; called with the rows and a title.

    Raises:
        BadModelList: the list itself can't be used.
        BadModel, MissingModel: the model of --single-model can't be analysed.
    """
    if config.single_model is not None:
        row = single_row(config)
        with HubHeaders(_needed([row])) as hub:
            return AnalysisPlan((_looked_at(row, config, hub),), ())
    assert config.model_list is not None  # noqa: S101 - ExperimentConfig has one of the two
    read = read_model_list(config.model_list, limit=config.limit)
    models: list[PlannedModel] = []
    refused = [*read.problems]
    with HubHeaders(_needed(read.rows)) as hub:
        for row in track(read.rows, "looking at models"):
            try:
                models.append(_looked_at(row, config, hub))
            except BadModel as problem:
                refused.append(RefusedRow(row.line, row.model_id, str(problem)))
    return AnalysisPlan(tuple(models), tuple(sorted(refused, key=lambda refusal: refusal.line or 0)))


def single_row(config: ExperimentConfig) -> ModelRow:
    """The row that --single-model and --base-model stand for.

    A model with a base is an adapter of it or made from it, as its files tell; one of the Hub, where they can't be seen
    yet, is an adapter, or for ``--spectra-of delta`` either.

    Raises BadModel for an impossible name.
    """
    model, base = str(config.single_model), None if config.base_model is None else str(config.base_model)
    if base is None:
        return ModelRow(line=None, model_id=model, source_model=None)
    path = parse_model(model).path
    if path is None and config.spectra_of == "delta":  # the worker will see what it is
        return ModelRow(line=None, model_id=model, source_model=base)
    kind = Relation.ADAPTER if path is None or is_adapter(path) else Relation.FINETUNE
    return ModelRow(line=None, model_id=model, source_model=base, relation=kind.value)


def _needed(rows: Iterable[ModelRow]) -> Iterator[ModelRef]:
    """The models and adapter bases that rows name, for reading the headers of Hub models in advance."""
    for row in rows:
        for model in (row.model_id, row.source_model if row.kind is Relation.ADAPTER else None):
            with suppress(BadModel):  # reported when its row is examined
                if model is not None:
                    yield parse_model(model)


def _looked_at(row: ModelRow, config: ExperimentConfig, hub: HubHeaders) -> PlannedModel:
    facts = examine(
        row.model_id,
        base=row.source_model,
        relation=row.kind.value if row.relation and row.kind is not Relation.UNKNOWN else None,
        embeddings=config.embeddings,
        spectra_of=config.spectra_of,
        choose=partial(selected, layers=config.layers, exclude=config.exclude),
        read_hub=hub,
    )
    return PlannedModel(row, facts)


def run_directory(config: ExperimentConfig) -> ESDDirectory:
    """The folder of the experiment."""
    return ESDDirectory(os.fspath(config.output_dir), None if config.log_dir is None else os.fspath(config.log_dir))


def worker_command(config: ExperimentConfig, row: ModelRow, run: ESDDirectory) -> list[str]:
    """The argument list of the worker for this row. No shell sees it.

    ``-P`` keeps Python from importing modules out of the folder that the user happens to be in.
    """
    words = [sys.executable, "-P", "-m", OUR_WORKER, f"--model-id={row.model_id}"]
    if row.source_model is not None:
        words.append(f"--source-model={row.source_model}")
    words += [f"--relation={row.relation}", f"--output-dir={run.root}"]
    return words + words_of(config, AnalysisOptions)


def job_name(model_id: str) -> str:
    """The name of a model's job: one a model, as a folder has one file of it. How it is analysed is its identity."""
    digest = hashlib.sha256(model_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{safe_filename(model_id)[:100]}.{digest}"


def gpus_needed(config: ExperimentConfig) -> int:
    """How many GPUs each job gets. None for the spectra of BA, unless asked for: those of their small cores take the
    CPU less time than a GPU is waited for. (Figures that need the product itself are another matter.)"""
    small = config.spectra_of == "ba" and not config.needs_weights and config.device_map == "auto"
    return 0 if small or config.device_map == "cpu" else config.gpus_per_job


def make_job(config: ExperimentConfig, planned: PlannedModel, argv: Sequence[str], run: ESDDirectory) -> Job:
    """The job that analyses the model with this command."""
    gpus = gpus_needed(config)
    memory_mb = None if gpus == 0 else gpu_memory_mb(planned.facts, parallel=not config.no_parallel_gpu)
    return Job(
        name=job_name(planned.row.model_id),
        argv=tuple(argv),
        gpus=gpus,
        memory_mb=memory_mb,
        share=config.share and gpus == 1 and memory_mb is not None,
        cost=None if planned.facts.total_bytes is None else float(planned.facts.total_bytes),
        heartbeat_s=config.heartbeat or (HEARTBEAT_S if OUR_WORKER in argv[:4] else None),
        retries=config.retries,
        result=str(run.stats_file(planned.row.model_id)),
        title=planned.row.model_id,
        identity=json.dumps([planned.facts.base, *(word for word in argv[1:] if not word.startswith(NEUTRAL))]),
    )


def gpu_memory_mb(facts: Preflight, *, parallel: bool) -> int | None:
    """Free memory that the analysis needs on each GPU, None when the headers can't be read (of a Hub model).

    The Gram matrix of an M x N matrix has min(M, N) rows, so a wide head or embedding needs no more than others.
    """
    if facts.largest_side is None:
        return None
    return CUDA_CONTEXT_MB + peak_bytes(facts.largest_side, parallel=parallel) // MB


# ---- the plan as a table, in 80 columns


@dataclass(frozen=True, slots=True)
class PlanLine:
    """A model of the list. ``size_bytes``, ``matrices`` (how many are analysed) and ``share`` (of all weights, 0 to 1)
    are None where they are not known before a download; ``state`` is "to do" or "done"; ``asks``: for what its job
    would ask a cluster, None on this machine."""

    model: str
    relation: str
    base: str | None
    size_bytes: int | None
    matrices: int | None
    share: float | None
    gpus: int
    state: str
    asks: str | None = None


_COLUMNS = (
    Column("model", 0, middle=True),
    Column("relation", 3, least=9),
    Column("size", 4, right=True),
    Column("matrices", 5, right=True),
    Column("of weights", 6, right=True),
    Column("GPUs", 7, right=True),
    Column("state", 1),
    Column("base", 2, least=16, middle=True),
)


def print_plan(console: Console, lines: Sequence[PlanLine], refused: Sequence[str], headline: str) -> None:
    """Prints a line a model, a line for each refused row, and the headline."""
    if lines:
        table = fitted(_COLUMNS, [_plan_cells(line) for line in lines], window(console))
        table.show(console)
        console.print()
        table.show_left_out(console)
    for sentence in refused:
        console.print(Text.assemble(("refused  ", "red"), sentence), soft_wrap=True)
    console.print(Text(headline), soft_wrap=True)


def _plan_cells(line: PlanLine) -> tuple[str, ...]:
    base = "-" if line.base is None else printable(line.base)
    relation = printable(line.relation) or "-"
    matrices = "-" if line.matrices is None else str(line.matrices)
    share = "-" if line.share is None else f"{line.share:.1%}"
    return (
        printable(line.model),
        relation,
        format_size(line.size_bytes),
        matrices,
        share,
        str(line.gpus),
        line.state,
        base,
    )


def format_size(nbytes: int | None) -> str:
    """Bytes as people read them, in powers of 1024; ``-`` where it is not known."""
    if nbytes is None:
        return "-"
    value = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"
