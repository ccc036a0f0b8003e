"""A Hydra program that knows nothing of gpuherd, swept in a process of its own over simulated GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuherd.standin.machine import SimulatedMachine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# As a machine without a queue for GPUs has it: the free test is another test's matter.
AT_ONCE = ("hydra/launcher=gpuherd", "hydra.launcher.max_checks=1", "hydra.launcher.check_interval=0")


@dataclass
class Sweeps:
    """Sweeps of the program from one folder."""

    folder: Path
    env: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def sweep_dir(self) -> Path:
        """Where they go, all of them."""
        return self.folder / "sweep"

    def start(self, script: str, *words: str) -> subprocess.Popen[str]:
        """Starts a script of this folder, in a session of its own."""
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), *words, f"hydra.sweep.dir={self.sweep_dir}"],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, script: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a script of this folder to its end."""
        process = self.start(script, *words)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def returns(self, seeds: int, *words: str) -> list[dict[str, Any]]:
        """What the jobs of so many seeds returned, in order."""
        done = self.run("multirun.py", str(seeds), *AT_ONCE, *words)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def end(self) -> None:
        """Ends what still runs of them."""
        for process in self.started:
            with suppress(ProcessLookupError):
                process.kill()
            process.communicate()

    def times_begun(self) -> dict[str, int]:
        """How often each job has begun, by the name of its output folder."""
        return {log.parent.name: log.read_text().count(" on GPU ") for log in self.sweep_dir.glob("*/fit.log")}


@pytest.fixture
def sweeps(tmp_path: Path, standin: Callable[..., SimulatedMachine]) -> Iterator[Sweeps]:
    """Sweeps on a machine with 4 simulated GPUs."""
    standin("4x40GB")
    paths = [ROOT / "src", ROOT / "launcher" / "src", HERE / "plugins"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    found = Sweeps(tmp_path, env)
    yield found
    found.end()
