"""What ``gpuherd posttrain`` is told beside the experiment's own configuration: GPUs, jobs, which run goes on."""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.engines.options import refuse_ranks
from gpuherd.errors import UsageError
from gpuherd.jobs.options import DispatchOptions
from gpuherd.options import option
from gpuherd.units import count


@dataclass(frozen=True, kw_only=True)
class RoundsOptions(DispatchOptions):
    """How an experiment's jobs run. Raises UsageError."""

    config: str | None = option(
        None,
        help="a YAML file of your own over the shipped configuration; overrides on the command line go before it",
        metavar="FILE",
        group="experiment",
    )
    resume: str | None = option(
        None,
        help="go on with the run in DIR, with its own configuration (the same as resume_from=DIR)",
        metavar="DIR",
        group="experiment",
    )
    retries: int = option(
        1, help="further tries for a job that crashed or ran out of memory", parse=count, metavar="N", group="jobs"
    )
    dry_run: bool = option(
        False, help="show the jobs with their GPUs and memory, and start nothing", group="experiment"
    )
    enqueue_only: bool = option(
        False, help="put the jobs into the queue of the run's folder and end", group="experiment"
    )

    def __post_init__(self) -> None:
        DispatchOptions.__post_init__(self)
        refuse_ranks(self)
        object.__setattr__(self, "gpu_list", tuple(self.gpu_list))
        if self.gpus_per_job != 1:
            raise UsageError(
                "--gpus-per-job: a job of an experiment computes on 1 GPU; 'gpuherd train' trains one model on several"
            )
        if self.resume is not None and self.config is not None:
            raise UsageError("--resume goes on with the configuration of its run; leave --config out")
