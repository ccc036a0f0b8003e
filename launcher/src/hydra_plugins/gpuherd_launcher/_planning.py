"""What one batch of a sweep becomes: the program for all of its jobs, and for each its composed config and its place in
the queue.

A job is known by its number, and by what its result depends on: the program's function, the composed config and the
overrides. Options of Hydra itself, such as where jobs run, change no result. Its files are named by that, so that a
second launcher in the folder, which will be refused, changes nothing of the first one's.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime, filter_overrides
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from gpuherd.errors import UsageError, printable
from gpuherd.gpus.visible import VARIABLES
from gpuherd.jobs.job import Job, job_fields
from gpuherd.jobs.scheduler.memory import could_share
from hydra_plugins.gpuherd_launcher import _parcels
from hydra_plugins.gpuherd_launcher._resolvers import of_the_program
from hydra_plugins.gpuherd_launcher._settings import Settings

_WORKER = "hydra_plugins.gpuherd_launcher._work"


@dataclass(frozen=True, slots=True)
class Planned:
    """A job of the sweep with its files: what it is given, and what it returns."""

    job: Job
    overrides: tuple[str, ...]
    task: Path
    returned: Path


class Planner:
    """Makes jobs of one program's sweep; what they are given goes into ``folder``."""

    def __init__(
        self, context: HydraContext, function: TaskFunction, config: DictConfig, settings: Settings, folder: Path
    ):
        self._context = context
        self._function = function
        self._config = config
        self._settings = settings
        self._folder = folder

    def plan(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[Planned]:
        """The jobs, of which the first has this number; all that they need is on disk. Raises UsageError."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            program = self._pack()
            return [self._planned(program, tuple(overrides), first + at) for at, overrides in enumerate(job_overrides)]
        except OSError as problem:
            raise UsageError(f"can't write in {self._folder}: {problem.strerror}") from None

    def _pack(self) -> Path:
        """Writes what is the same for all jobs, and returns where."""
        whole = (self._context, self._function, Singleton.get_state(), of_the_program())
        try:
            return _parcels.write_named(self._folder, "program", (list(sys.path), sys.argv[:1]), whole)
        except OSError:
            raise
        except Exception as problem:
            raise UsageError(f"the program can't be handed to another process: {problem}") from problem

    def _planned(self, program: Path, overrides: tuple[str, ...], number: int) -> Planned:
        """Composes a job and writes what it is given."""
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        # Hydra has put what env_copy names there too.
        for name in VARIABLES:
            if name in config.hydra.job.env_set:
                raise UsageError(
                    f"{name} can't be in hydra.job.env_set or env_copy: gpuherd sets it when it knows the job's GPUs"
                )
        said = list(filter_overrides(overrides))
        identity = self._identity(config, said)
        task, returned = (self._folder / f"{number}-{identity}.{kind}" for kind in ("task", "return"))
        _parcels.write(task, config)
        # -P: a folder in which the program is started may have modules of any name.
        argv = (sys.executable, "-P", "-m", _WORKER, str(program), str(task), str(returned))
        fields = job_fields(self._settings.job, gpus=self._settings.run.gpus_per_job)
        job = Job(
            **fields,
            name=str(number),
            argv=argv,
            cwd=str(Path.cwd()),
            result=str(returned),
            title=printable(f"#{number} {' '.join(said)}".rstrip()),
            identity=identity,
        )
        if self._settings.run.share:
            job = replace(job, share=could_share(job))
        return Planned(job, overrides, task, returned)

    def _identity(self, config: DictConfig, said: Sequence[str]) -> str:
        own = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
        what = [JobRuntime.instance().get("name"), self._function.__qualname__, said, OmegaConf.to_yaml(own)]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
