"""Runs jobs of ``program/fit.py`` by the launcher that the overrides choose, as a sweeper does, and prints what they
returned, in order, as JSON: a line a job.

Arguments: how many seeds, and the overrides.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import run_and_report
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, RunMode

PROGRAM = Path(__file__).parent / "program"


def told(returned: JobReturn) -> dict[str, Any]:
    """A job's return as JSON values."""
    value, failed = returned._return_value, returned.status is not JobStatus.COMPLETED
    return {
        "overrides": list(returned.overrides),
        "num": None if returned.hydra_cfg is None else returned.hydra_cfg.hydra.job.num,
        "raised": f"{type(value).__name__}: {value}" if failed else None,
        "notes": getattr(value, "__notes__", []),
        "value": None if failed or value is None else asdict(value),
    }


def main(seeds: int, overrides: list[str]) -> None:
    """Launches a batch of jobs and prints their returns."""
    sys.path.insert(0, str(PROGRAM))
    import fit  # type: ignore[import-not-found]

    with initialize_config_dir(str(PROGRAM / "conf"), version_base="1.3", job_name="fit"):
        hydra = GlobalHydra.instance().hydra
        config = hydra.compose_config("config", overrides, run_mode=RunMode.MULTIRUN)
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config)),
            task_function=fit.fit.__wrapped__,
            config=config,
        )
        arguments = list(config.hydra.overrides.task)
        for returned in launcher.launch([[*arguments, f"seed={seed}"] for seed in range(seeds)], initial_job_idx=0):
            print(json.dumps(told(returned)))


if __name__ == "__main__":
    run_and_report(lambda: main(int(sys.argv[1]), sys.argv[2:]))
