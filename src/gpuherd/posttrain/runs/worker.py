"""Does one job of an experiment: ``python -m gpuherd.posttrain.runs.worker --folder outputs/… --job …``.

An ordinary program: it runs by hand under CUDA_VISIBLE_DEVICES as it does under the dispatcher, and knows nothing of
queues. What it is to do stands in the run's folder as JSON; killed at any instant, it goes on from there. Its exit code
(``ExitCode``) says whether another try can help.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError, UsageError, printable
from gpuherd.gpus.visible import CUDA, described, naming_in, value_in
from gpuherd.options import option
from gpuherd.posttrain.engine.curves import measured
from gpuherd.posttrain.engine.dist_env import place_told
from gpuherd.posttrain.runs.folder import RoundsDirectory, read_record
from gpuherd.posttrain.runs.launch import STARTER, StopRequest, end_with_launcher, launch, run_process
from gpuherd.posttrain.runs.plan import Phase
from gpuherd.posttrain.runs.work import Work, do, processes_of, step_named
from gpuherd.runs.files import write_file
from gpuherd.runs.worker import run_worker

MODULE = "gpuherd.posttrain.runs.worker"
DESCRIPTION = """\
Does one job of an experiment that gpuherd posttrain has begun: collects a shard, trains, or evaluates.

example:
  CUDA_VISIBLE_DEVICES=0 python -m gpuherd.posttrain.runs.worker --folder outputs/first/2026-11-22_04-30-00 \\
    --job PITA_gsm8k_llama32_r0_train
"""


class CannotBeDone(GpuherdError):
    """What the job is to do makes no sense (nothing to learn from, a setting that the data rules out): another try
    can't help."""

    exit_code = ExitCode.BAD_INPUT


class NoCuda(GpuherdError):
    """The job was given a GPU, and torch finds none."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a worker is told."""

    folder: str = option(help="the run's folder, which has its run.json", metavar="DIR")
    job: str = option(help="the job's name", metavar="NAME")
    simulate: bool = option(False, help="the GPUs are pretended: all is computed on the CPU")


def work(options: JobOptions, words: Sequence[str]) -> None:
    """Does the job: in this process, or in one for each GPU of a training that has several, which it starts."""
    folder = RoundsDirectory(options.folder)
    record = read_record(folder)
    try:
        step = step_named(record, options.job)
        place = place_told(os.environ) if step.phase is Phase.TRAIN else None
        if place is None:
            print(f"Job: {printable(options.job)}")
            print(described(os.environ))
            if (processes := processes_of(record.settings, step)) > 1:
                print(f"Processes: {processes}", flush=True)
                _launched(launch(words[0], words[1:], processes))
                return
        elif STARTER in os.environ:
            end_with_launcher()
        given = value_in(os.environ)
        device = device_here(given, simulate=options.simulate, number=0 if place is None else place.local_rank)
        print(f"Device: {device}")
        if step.phase is Phase.TRAIN:
            stop = StopRequest()
            with stop.listen():
                figures = do(Work(folder, record, step, device, stop.stopping))
        else:  # ended at any instant, it goes on behind its last whole batch
            figures = do(Work(folder, record, step, device))
    except UsageError as problem:
        # Of a program's own words an exit code of 2 would speak, and be tried again.
        raise CannotBeDone(str(problem)) from problem
    if place is not None and place.rank != 0:
        return
    usage = memory_used(device)
    print(json.dumps({**figures, **usage}))
    told = {"visible": given, **usage, **{name: figures[name] for name in ("gpus",) if name in figures}}
    write_file(folder.usage_of(options.job), json.dumps(told).encode() + b"\n")


def _launched(code: int) -> None:
    """Ends this process by the exit code of the processes that it has launched, where they have failed."""
    if code != ExitCode.OK:
        raise SystemExit(code)


def device_here(visible: str | None, *, simulate: bool, number: int = 0) -> str:
    """Where this process computes: on the GPU that it was given, the ``number``-th of several, else on the CPU.

    Raises NoCuda where it was given one and torch can't use it: it would compute on the CPU without a word.
    """
    if simulate or not visible:
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        name = next(iter(naming_in(os.environ)), CUDA)
        raise NoCuda(
            f"{name}={visible}, and torch {torch.__version__} finds no {'CUDA' if name == CUDA else 'GPU'}: install a "
            f"torch for it, or run without GPUs ({name}=)"
        )
    return f"cuda:{number}"


def memory_used(device: str) -> dict[str, Any]:
    """The most that torch has held on the GPU so far, in bytes; None on the CPU."""
    taken = measured("", device)
    if taken is None:
        return dict.fromkeys(("peak_allocated", "peak_reserved", "total"))
    return {"peak_allocated": taken.allocated, "peak_reserved": taken.reserved, "total": taken.total}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker. Returns its exit code; what went wrong is on standard error."""
    return run_worker(MODULE, DESCRIPTION, JobOptions, work, argv)


if __name__ == "__main__":
    run_process(main)
