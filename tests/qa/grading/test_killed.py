"""A judging whose command and jobs are killed at random, again and again, ends in the bytes of an undisturbed one."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.qa.grading.conftest import capitals_run

from gpuherd.qa.grading.files import judgings_of
from gpuherd.qa.runs import Run


def command(run: Run, judge: Path, form: Path) -> list[str]:
    words = [str(run.folder.root), str(judge), "--prompt", str(form), "--answers", "all", "--batch-size", "2"]
    return [sys.executable, "-m", "gpuherd", "--simulate", "2x40GB", "judge", *words, "--shards", "2"]


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kills a command and, as a reboot would, all that it has started."""
    everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in everybody:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_it_ends_in_the_same_bytes(tmp_path: Path, good_judge: Path, short_form: Path) -> None:
    alone = capitals_run(tmp_path / "alone" / "capitals")
    subprocess.run(command(alone, good_judge, short_form), check=True, stdout=subprocess.DEVNULL, timeout=400)
    (meta,) = judgings_of(alone.folder)

    killed = capitals_run(tmp_path / "killed" / "capitals")
    draw = random.Random(17)
    for _ in range(6):
        process = subprocess.Popen(command(killed, good_judge, short_form), stdout=subprocess.DEVNULL)
        work = killed.folder.work_of(meta.settings["work"])
        wait = draw.uniform(0.0, 1.5)
        # Into the work itself, not only into imports: some kills come a moment after the first lines.
        while process.poll() is None and not any(work.shards.glob("*.jsonl")):
            time.sleep(0.05)
        time.sleep(wait)
        if process.poll() is None:
            kill_all(process)
    subprocess.run(command(killed, good_judge, short_form), check=True, stdout=subprocess.DEVNULL, timeout=400)
    again = judgings_of(killed.folder)
    assert [each.name for each in again] == [meta.name]
    assert killed.folder.judging(meta.name).read_bytes() == alone.folder.judging(meta.name).read_bytes()
    assert again[0].sha256 == meta.sha256
