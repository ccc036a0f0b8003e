"""Options of work that jobs share, each with a model of its own: one declaration for commands and for workers."""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.engines.options import refuse_ranks
from gpuherd.errors import UsageError
from gpuherd.jobs.options import DispatchOptions
from gpuherd.models.load.options import ModelOptions
from gpuherd.options import option
from gpuherd.units import count, positive_int


@dataclass(frozen=True, kw_only=True)
class WorkOptions(DispatchOptions, ModelOptions):
    """Options of work that is divided among jobs, each of which loads the model."""

    gpus_per_job: int = option(
        1,
        help="GPUs that each job gets at least; a model that needs more gets more",
        aliases=("num-gpus-per-job",),
        parse=positive_int,
        metavar="N",
        group="GPUs",
    )
    batch_size: int = option(
        32,
        help="sequences at once in a job; halved when memory runs out",
        parse=positive_int,
        metavar="N",
        group="work",
    )
    shards: int | None = option(
        None,
        help="jobs to divide the work among (default: as many as can run at once); kept when the work goes on",
        parse=positive_int,
        metavar="N",
        group="work",
    )
    retries: int = option(
        1, help="further tries for a job that crashed or ran out of memory", parse=count, metavar="N", group="work"
    )
    dry_run: bool = option(False, help="show what would run and start nothing", group="work")
    enqueue_only: bool = option(False, help="put the jobs into the queue of the run's folder and end", group="work")

    def __post_init__(self) -> None:
        DispatchOptions.__post_init__(self)
        refuse_ranks(self)
        ModelOptions.__post_init__(self)
        object.__setattr__(self, "gpu_list", tuple(self.gpu_list))
        if self.gpus_per_job < 1:
            raise UsageError(f"gpus_per_job={self.gpus_per_job}; the least is 1 (on the CPU: --device-map cpu)")
        if self.batch_size < 1:
            raise UsageError(f"batch_size={self.batch_size}; the least is 1")
        if self.shards is not None and self.shards < 1:
            raise UsageError(f"shards={self.shards}; the least is 1")
        if self.retries < 0:
            raise UsageError(f"retries={self.retries}; the least is 0")


@dataclass(frozen=True, kw_only=True)
class ShardOptions(ModelOptions):
    """Options of every worker: the model, the folder of the work, its shard, and what it does at once."""

    model: str = option(help="the model: a folder, a weight file, or a Hugging Face id", metavar="MODEL", group="work")
    folder: str = option(help="the folder of the work, which has its shards.json", metavar="DIR", group="work")
    shard: int = option(help="which of the shards", parse=count, metavar="N", group="work")
    batch_size: int = option(32, help="sequences at once", parse=positive_int, metavar="N", group="work")
    prompt_tokens: int = option(
        512, help="tokens of the longest prompt, for the memory plan", parse=positive_int, metavar="N", group="work"
    )
    new_tokens: int = option(
        1, help="most new tokens of a sequence, for the memory plan", parse=positive_int, metavar="N", group="work"
    )
    simulate: bool = option(
        False, help="the GPUs are pretended: what is planned on them lies in the CPU's memory", group="work"
    )
