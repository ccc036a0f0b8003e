"""A list of 3,164 models through ``gpuherd esd``: the plan of a dry run, and a whole run with a stand-in worker.

The worker is a small C program that sleeps 10 ms and moves a stats file made before into its place. All else is real:
the list, the look at every row, the queue, the dispatcher on eight GPUs of the stand-in driver, the summary. In the
middle the dispatcher is killed, and the same command goes on. The list is GPUHERD_CURATED_LIST, else the shared one.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.dispatch import environment_of
from gpuherd.engines.process_tree import tagged
from gpuherd.esd import ESDExperiment, ExperimentConfig
from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_list import ModelRow, read_model_list
from gpuherd.esd.schema import LayerRow
from gpuherd.esd.views import FIT_OK, Origin, stats_rows, table_text
from gpuherd.jobs.queue.store import Queue
from gpuherd.standin.driver import compiler
from gpuherd.standin.machine import SimulatedMachine

LIST = Path(__file__).parents[2] / "shared/data/model-lists/curated-3164.csv"
GPUS, WORK_S = 8, 0.010

# Appends the target to a list of what has run, after sleeping, and moves the prepared file there.
_WORKER = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
int main(int argc, char **argv) {
    if (argc != 5) return 64;
    double seconds = atof(argv[4]);
    struct timespec wait = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    char line[4200];
    nanosleep(&wait, NULL);
    if (rename(argv[2], argv[3]) != 0) { perror(argv[2]); return 1; }
    int file = open(argv[1], O_WRONLY | O_APPEND | O_CREAT, 0666);
    int n = snprintf(line, sizeof line, "%s\n", argv[3]);
    return file >= 0 && n < (int)sizeof line && write(file, line, n) == n ? 0 : 74;
}
"""


class StandInExperiment(ESDExperiment):
    """The experiment with the C program for a worker."""

    def __init__(self, folder: Path, config: ExperimentConfig):
        super().__init__(config, console=Console(file=io.StringIO(), width=80))
        self._bench = folder

    def _build_esd_command(self, row: ModelRow) -> list[str]:
        target = self.directory.stats_file(row.model_id)
        words = [self._bench / "worker", self._bench / "ran", prepared(self._bench, row.model_id), target, WORK_S]
        return [str(word) for word in words]


def prepared(folder: Path, model_id: str) -> Path:
    """The stats file that the worker of this model moves."""
    return folder / "made" / f"{hashlib.sha256(model_id.encode()).hexdigest()}.csv"


def config_of(folder: Path, models: Path) -> ExperimentConfig:
    """What is run."""
    return ExperimentConfig(
        model_list=models, output_dir=folder / "results", max_gpus=GPUS, max_checks=1, check_interval=0.05
    )


def work(folder: str, models: str) -> int:
    """The run itself, in a process of its own. Prints its figures as JSON on its last line."""
    experiment = StandInExperiment(Path(folder), config_of(Path(folder), Path(models)))
    outcome = experiment.run()
    used = resource.getrusage(resource.RUSAGE_SELF)
    figures = experiment.to_dict()["counts"] | {"cpu_seconds": used.ru_utime + used.ru_stime}
    print(json.dumps(figures | {"done_before": outcome.done_before, "rss_mb": used.ru_maxrss // 1024}))
    return int(outcome.exit_code)


def run(*, quick: bool) -> dict[str, Any]:
    """Seconds of the dry run and of both halves of the real one, jobs a second, and counts."""
    whole = Path(os.environ.get("GPUHERD_CURATED_LIST", LIST))
    if not whole.exists():
        raise SystemExit(f"there is no {whole}; name the list in GPUHERD_CURATED_LIST")
    with tempfile.TemporaryDirectory(prefix="gpuherd-curated-") as name:
        folder = Path(name)
        models = _list(whole, folder, 60 if quick else None)
        rows = read_model_list(models).rows
        _prepare(folder, rows)
        environment = environment_of(SimulatedMachine.create(folder / "machine", f"{GPUS}x40GB"), folder)
        return {"rows": len(rows), "dry_run": _dry_run(folder, models), "run": _run(folder, models, environment)}


def _list(whole: Path, folder: Path, limit: int | None) -> Path:
    if limit is None:
        return whole
    with whole.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))[: limit + 1]
    models = folder / "models.csv"
    with models.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(lines)
    return models


def _prepare(folder: Path, rows: tuple[ModelRow, ...]) -> None:
    words = compiler()
    if words is None:
        raise SystemExit("this benchmark needs a C compiler (cc, gcc, clang or the ziglang wheel)")
    (folder / "worker.c").write_text(_WORKER)
    subprocess.run([*words, "-O2", "-o", str(folder / "worker"), str(folder / "worker.c")], check=True)
    (folder / "made").mkdir()
    (folder / "results" / "stats").mkdir(parents=True)  # else the worker's own business
    layer = LayerRow(longname="layer", M=8, N=8, params=64, alpha=2.5, num_evals=8, matrix_rank=8, fit_status=FIT_OK)
    convention = AnalysisOptions(fix_fingers="DKS").convention_columns
    for row in rows:
        origin = Origin(row.model_id, row.source_model, row.relation, convention, "0")
        prepared(folder, row.model_id).write_text(table_text(stats_rows(origin, [layer])), encoding="utf-8")


def _dry_run(folder: Path, models: Path) -> dict[str, Any]:
    words = [sys.executable, "-m", "gpuherd", "esd", f"--model-list={models}", "--dry-run", "--json"]
    began = time.monotonic()
    done = subprocess.run(
        [*words, f"--output-dir={folder / 'dry'}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    seconds = time.monotonic() - began
    told = json.loads(done.stdout)
    reasons = Counter(refusal["reason"].partition(":")[0] for refusal in told["refused"])
    return {"seconds": seconds, "planned": len(told["plan"]), "refused": len(told["refused"]), "reasons": reasons}


def _run(folder: Path, models: Path, environment: dict[str, str]) -> dict[str, Any]:
    words = [sys.executable, "-c", "import sys; from benchmarks.curated import work; sys.exit(work(*sys.argv[1:]))"]
    words += [str(folder), str(models)]
    count = len(read_model_list(models).rows)
    began = time.monotonic()
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as first:
        while _ran(folder) < count // 2 and first.poll() is None:
            time.sleep(0.01)
        first.send_signal(signal.SIGKILL)
    at_kill, killed_s = _ran(folder), time.monotonic() - began
    began = time.monotonic()
    second = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=False, timeout=600)
    rest_s = time.monotonic() - began
    figures = json.loads(second.stdout.splitlines()[-1])
    ran = Counter((folder / "ran").read_text().splitlines())
    directory = ESDDirectory(folder / "results")
    with closing(Queue(directory.queue)) as queue:
        tag = queue.tag
        attempts = sorted(row.started_at for row in queue.attempts())
    with directory.summary.open(encoding="utf-8", newline="") as file:
        summary_rows = sum(1 for _ in csv.DictReader(file))
    return {
        "exit_code": second.returncode,
        **figures,
        "summary_rows": summary_rows,
        "killed_after_jobs": at_kill,
        "seconds_until_killed": killed_s,
        "seconds_of_the_rest": rest_s,
        "jobs_a_second_with_start_and_summary": (count - at_kill) / rest_s,
        "jobs_a_second_while_dispatching": _rate(attempts),
        "ran_twice": sum(times > 1 for times in ran.values()),
        "never_ran": count - len(ran),
        "processes_left": len(list(tagged(tag))),
    }


def _rate(starts: list[float]) -> float:
    """Starts a second, without the longest gap: the one between the two commands."""
    gaps = sorted(after - one for one, after in pairwise(starts))
    return len(gaps[:-1]) / sum(gaps[:-1])


def _ran(folder: Path) -> int:
    try:
        return (folder / "ran").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
