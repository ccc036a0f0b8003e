"""Measures a part of a statistic: ``python -m gpuherd.qa.scoring.worker --folder ... --shard N --model ...``.

An ordinary program: it runs by hand under CUDA_VISIBLE_DEVICES as it does under the dispatcher, and continues where it
was killed. What it is to measure stands in the folder's task.json.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from gpuherd.engines import progress
from gpuherd.errors import printable
from gpuherd.gpus.visible import described
from gpuherd.models.load.jobs import is_writer, run_model_worker
from gpuherd.models.load.options import ShardOptions
from gpuherd.qa.runs import run_of_path
from gpuherd.qa.statistics.files import BadStatistic, StatisticTask
from gpuherd.qa.statistics.registry import JobInputs, statistic_of
from gpuherd.runs.shards import ShardedDirectory, read_task, work_through
from gpuherd.runs.worker import unbuffered

MODULE = "gpuherd.qa.scoring.worker"
DESCRIPTION = """\
Measures a part of a statistic of a run's answers, by a model.

example:
  CUDA_VISIBLE_DEVICES=0 python -m gpuherd.qa.scoring.worker --folder runs/R/work/relevance-1a2b3c4d --shard 0 \\
    --model cross-encoder/stsb-roberta-large
"""


def work(options: ShardOptions, words: Sequence[str]) -> None:
    """Measures what is not there yet of a shard. Raises what loading and measuring raise."""
    folder = ShardedDirectory(options.folder)
    task = read_task(folder, StatisticTask)
    run = run_of_path(task.run)
    if run.answers_sha256 != task.answers_sha256:
        raise BadStatistic(f"{folder.root} was begun for other answers than those in {run.folder.root}; remove it")
    answers = list(run.answers())
    print(f"Model: {printable(options.model)}")
    print(described(os.environ))
    progress.report(0, None, "load")
    measuring = statistic_of(task.spec).job(task.spec, JobInputs(task.spec, run, answers, options, words))

    def do(items: Sequence[int]) -> list[str]:
        return measuring.measure([answers[number] for number in items])

    done = work_through(folder, options.shard, do, stage=task.spec.kind, record=measuring.seen, writes=is_writer())
    print(f"{task.spec.name}: {done.now} of {done.items} questions measured now")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker. Returns its exit code; what went wrong is on standard error."""
    return run_model_worker(MODULE, DESCRIPTION, work, argv)


if __name__ == "__main__":
    unbuffered()
    sys.exit(main())
