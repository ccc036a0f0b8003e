"""Folders of runs made for the tests of the page, with all that can be in one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.jobs.attempts import attempt_of, settled
from tests.posttrain.eval.made import made_experiment, made_result

from gpuherd.jobs import FailureClass, Job, JobState, Queue
from gpuherd.jobs.records import AttemptState, StartRecord
from gpuherd.posttrain.eval.results import REFERENCE, About
from gpuherd.posttrain.runs.folder import RoundsDirectory, TrainDirectory


def made_run(
    root: Path,
    *,
    seeds: Sequence[int] = (0,),
    name: str = "first",
    texts: Callable[[int, int], str] = lambda problem, sample: f"answer {problem}.{sample}",
) -> Path:
    """A run of three methods in two rounds with curves, jobs, failures and completions."""
    place = RoundsDirectory(root)
    place.create()
    place.write_record(
        {
            "experiment": name,
            "started": "2026-11-22T04:30:00+00:00",
            "command": ["gpuherd", "posttrain", f"experiment.name={name}"],
            "settings": {
                "rounds_of_training": 2,
                "algos": {"QSharp": {"lr": 2e-5}},
                "datasets": ["star"],
                "x": [{"y": 1}],
            },
        }
    )
    made_experiment(place.results, seeds=seeds, texts=texts)
    for algorithm, figures in (("QSharp", ("loss", "accuracy")), ("DPO", ("loss", "reward", "kl", "entropy"))):
        for number in (0, 1):
            made_curves(place.model(algorithm, "star", "tiny", number), figures, seed=number)
    made_queue(place)
    return root


def made_wide_run(root: Path) -> Path:
    """A run of one round and ten methods with long names, seldom right, as the reference; one training has one step."""
    place = RoundsDirectory(root)
    place.create()
    place.write_record({"experiment": "wide", "settings": {}})
    data = "d" * 90
    rates = {REFERENCE: (0.05, 0.0), **{f"{'M' * 60}{number}": (0.05, 7.06e-6) for number in range(10)}}
    for place_of, (algorithm, rate) in enumerate(rates.items()):
        about = About(algorithm, data, data, "tiny", None if algorithm == REFERENCE else 0, 0)
        made_result(place.results / str(place_of), about, {None: rate}, problems=40)
        made_curves(place.model(algorithm, data, "tiny", 0), ("loss",), steps=1 if place_of == 1 else 5)
    return root


def made_curves(folder: Path, figures: Sequence[str], *, seed: int = 0, steps: int = 120) -> None:
    """Writes ``curves.jsonl`` as ``training.curves`` does."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(1, steps + 1):
        values = {name: math.exp(-step / 40) * (1 + at) + draw.gauss(0, 0.03) for at, name in enumerate(figures)}
        lines.append(json.dumps({"step": step, **values, "learning_rate": 1e-4 * (1 - step / steps)}))
    (folder / "curves.jsonl").write_text("".join(f"{line}\n" for line in lines))


def made_queue(place: RoundsDirectory) -> None:
    """A queue with jobs that ran on two GPUs: one failed for good, one was made again, one runs, one waits."""
    queue = Queue(place.queue)
    names = [
        f"{each}_star_tiny_r0_{phase}"
        for each in ("QSharp", "DPO")
        for phase in ("collect_0", "collect_1", "train", "evaluate")
    ]
    queue.submit([Job(name=name, argv=("true",), gpus=1, retries=1) for name in [*names, "PITA_star_tiny_r0_train"]])
    run = queue.begin_run(0.0, 0.0)
    number = 0

    def attempt(name: str, gpu: str, start: float, end: float | None, state: AttemptState, job: JobState) -> None:
        nonlocal number
        number += 1
        queued = next(each for each in queue.head(100, 1e9) if each.job.name == name)
        uuid = f"GPU-{gpu}"
        record = attempt_of(queued, number, gpus=(uuid,), labels=(gpu,), started_at=1e6 + start, started_mono=start)
        queue.record_starts([StartRecord(record, 0.0, None)], run)
        if end is None:
            return
        failed = state is AttemptState.FAILED
        queue.record_ends(
            [
                settled(
                    record,
                    state,
                    job,
                    1e6 + end,
                    mono=end,
                    code=71 if failed else 0,
                    failure=FailureClass.OUT_OF_MEMORY if failed else None,
                    reason="CUDA out of memory" if failed else None,
                )
            ]
        )[0]

    done, failed = (AttemptState.DONE, JobState.DONE), (AttemptState.FAILED, JobState.FAILED)
    attempt(names[0], "0", 0, 60, *done)
    attempt(names[1], "1", 0, 40, AttemptState.FAILED, JobState.WAITING)
    attempt(names[1], "1", 45, 95, *done)
    attempt(names[2], "0", 96, 300, *done)
    attempt(names[3], "0", 301, 350, *done)
    attempt(names[4], "1", 96, 150, *done)
    attempt(names[5], "1", 151, 180, *done)
    attempt(names[6], "1", 181, 200, *failed)
    attempt("PITA_star_tiny_r0_train", "0", 351, None, *done)
    queue.close()


def made_training(root: Path) -> Path:
    """An output of ``gpuherd train`` that has ended."""
    place = TrainDirectory(root)
    place.create()
    place.write_record({"name": "sums"})
    place.config.write_text("training:\n  algorithm: ppo\n  learning_rate: 0.001\npolicy_env:\n  env_type: math\n")
    place.done.write_text(json.dumps({"algorithm": "ppo", "steps": 60, "last": {"reward": 0.9, "loss": 0.1}}))
    made_curves(root, ("loss", "reward", "value_loss"), steps=60)
    return root
