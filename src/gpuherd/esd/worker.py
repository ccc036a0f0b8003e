"""Analyses one model: ``python -m gpuherd.esd.worker --model-id … --output-dir …``.

An ordinary program: it runs by hand under CUDA_VISIBLE_DEVICES as it does under the dispatcher. It knows nothing of
queues. Its results are written whole or not at all, ``<output-dir>/stats/<model>.csv`` last: where that is, the model
is done. Its exit code (``ExitCode``) says whether another try can help.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd import __version__
from gpuherd.engines import progress
from gpuherd.errors import BadModel, UsageError, printable
from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_files import ModelResultFiles, make_folder
from gpuherd.esd.model_list import Relation, relation_of
from gpuherd.esd.resources import choose_devices, cuda_devices, settle, torch_problem
from gpuherd.esd.selection import coverage, coverage_text, selected, totals, without_unchanged
from gpuherd.esd.views import FIT_OK, SKIPPED, Origin, has_fit, no_fit_reason
from gpuherd.gpus.visible import described
from gpuherd.models.names import parse_model
from gpuherd.options import option
from gpuherd.runs.files import write_file
from gpuherd.runs.worker import run_worker, unbuffered, while_bytes_arrive

if TYPE_CHECKING:
    from gpuherd.esd.schema import LayerRow
    from gpuherd.models.subject import Subject

MODULE = "gpuherd.esd.worker"
DESCRIPTION = """\
Analyses the weight matrices of one model and writes <output-dir>/stats/<model>.csv.

example:
  CUDA_VISIBLE_DEVICES=0 python -m gpuherd.esd.worker --model-id openai-community/gpt2 --output-dir results
"""


@dataclass(frozen=True, kw_only=True)
class ESDWorkerOptions(AnalysisOptions):
    """Options of a worker: one model, and how to analyse it."""

    model_id: str = option(help="the model: a Hugging Face id, or a folder or file", metavar="MODEL")
    output_dir: str = option(help="folder for results; the file goes to its stats folder", metavar="DIR")
    source_model: str | None = option(
        None, help="what the model comes from; the base of an adapter", aliases=("base-model",), metavar="MODEL"
    )
    relation: str = option(
        "", help="what it is to the source model: base, finetune, adapter, …", aliases=("base-model-relation",)
    )

    def __post_init__(self) -> None:
        AnalysisOptions.__post_init__(self)
        if relation_of(self.relation) is None:
            raise UsageError(f"unknown relation {self.relation!r}")


def analyse(options: ESDWorkerOptions) -> Path:
    """Analyses the model and writes its files, the stats last. Returns where those are.

    Raises:
        BadModel: the weights can't be read, there are no such spectra of this model, a pattern matches nothing in it,
            or none of its matrices has a valid fit; there is then no stats file of this model.
        CannotWrite: a file can't be written.
    """
    from gpuherd.esd.pipeline import analyse_matrices  # brings numpy: not before the threads are settled

    folder = ESDDirectory(options.output_dir)
    for results in (folder.stats, folder.coverage):
        make_folder(results)
    started = time.monotonic()
    devices = _announce_devices(options)
    progress.report(0, None, "load")
    with while_bytes_arrive(lambda megabytes: progress.report(megabytes, None, "load")):
        subject, base = _open_subject(options)
    found = selected(subject.matrices, subject.source.tensors, options.layers, options.exclude)
    progress.report(0, len(found), "analyse")
    names = [matrix.longname for matrix in found]
    with ModelResultFiles(
        folder, options.model_id, names, evals_thresh=options.evals_thresh, save_eigs=options.save_eigs
    ) as files:
        rows = analyse_matrices(
            found,
            options,
            devices,
            parallel=not options.no_parallel_gpu,
            on_progress=lambda done: progress.report(done, len(found), "analyse"),
            on_spectrum=files.keep_spectrum,
        )
        if options.spectra_of == "delta":
            rows = without_unchanged(rows)
        progress.report(len(found), len(found), "save")
        covered = coverage(subject.source.tensors, found, rows)
        print(f"Coverage: {totals(covered).sentence()}")
        if not has_fit(rows):
            # Older files of this model would now look like the result of this analysis.
            files.remove()
            write_file(files.paths.coverage, coverage_text(covered).encode("utf-8"))
            raise BadModel(f"model {options.model_id!r}: {no_fit_reason(rows)}")
        files.write(_origin(options, base), rows, coverage_text(covered))
    print(f"Layers: {_counts(rows)}")
    print(f"Saved: {files.paths.stats} after {time.monotonic() - started:.1f} s")
    return files.paths.stats


def _announce_devices(options: ESDWorkerOptions) -> tuple[str, ...]:
    """Chooses where to compute and prints what was found."""
    print(f"Model: {printable(options.model_id)}")
    print(described(os.environ))
    print(f"Device map: {options.device_map}")
    cuda = cuda_devices()
    print(f"CUDA available: {f'Yes ({len(cuda.names)} devices)' if cuda.names else f'No ({cuda.problem})'}")
    for index, name in enumerate(cuda.names):
        print(f"  - GPU {index}: {name}")
    devices, why_not = choose_devices(options.device_map, cuda, torch_problem, all_gpus=not options.no_parallel_gpu)
    print(f"Model devices: {', '.join(devices)}" + (f" ({why_not})" if cuda.names and why_not else ""))
    return devices


def _open_subject(options: ESDWorkerOptions) -> tuple[Subject, str | None]:
    """What is analysed of the model, and the name of its base where that is needed."""
    from gpuherd.models.checkpoints.hub import locate
    from gpuherd.models.lora.adapter import is_adapter
    from gpuherd.models.subject import base_of, format_ranks, open_subject

    path = locate(parse_model(options.model_id))
    adapter = is_adapter(path)
    if not adapter and relation_of(options.relation) is Relation.ADAPTER:
        raise BadModel(f"model {options.model_id!r} is listed as an adapter but has no adapter_config.json")
    base, base_path = base_of(path, options.source_model, options.spectra_of), None
    if base is not None:
        print(f"{'Adapter of' if adapter else 'Compared with'}: {printable(base)}")
        base_path = locate(parse_model(base))
    subject = open_subject(path, base_path, options.spectra_of, embeddings=options.embeddings)
    if subject.ranks:
        print(f"Update: s B A of {format_ranks(subject.ranks)} in {len(subject.ranks)} tensors")
    return subject, base


def _origin(options: ESDWorkerOptions, base: str | None) -> Origin:
    return Origin(
        model_id=options.model_id,
        source_model=options.source_model or base,
        relation=options.relation,
        convention=options.convention_columns,
        gpuherd_version=__version__,
    )


def _counts(rows: Sequence[LayerRow]) -> str:
    fitted = sum(row.fit_status == FIT_OK for row in rows)
    skipped = sum(row.fit_status.startswith(SKIPPED) for row in rows)
    return f"{fitted} with a fit, {len(rows) - fitted - skipped} without, {skipped} not analysed"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker. Returns its exit code; what went wrong is on standard error."""
    return run_worker(MODULE, DESCRIPTION, ESDWorkerOptions, lambda options, _: analyse(options), argv)


if __name__ == "__main__":
    settle()  # before numpy is imported
    unbuffered()
    sys.exit(main())
