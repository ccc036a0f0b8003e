"""SLURM's own options."""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.engines.registry import ClusterOptions, for_many
from gpuherd.options import option
from gpuherd.units import positive_int


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(ClusterOptions):
    """What jobs request from SLURM beyond the options of every cluster."""

    partition: str | None = option(None, help="SLURM partition, like gpu", metavar="NAME", group="engine")
    account: str | None = option(None, help="SLURM account, like physics", metavar="NAME", group="engine")
    qos: str | None = option(None, help="SLURM quality of service, like short", metavar="NAME", group="engine")
    constraint: str | None = option(None, help="SLURM node features, like 'a100|h100'", metavar="WORDS", group="engine")
    gpu_type: str | None = option(
        None,
        help="SLURM's name of the GPU type, like a100 for --gres=gpu:a100:N",
        metavar="TYPE",
        group="engine",
    )
    array_limit: int | None = for_many(
        option(
            None,
            help="most jobs of one SLURM array that run at once, like 16",
            parse=positive_int,
            metavar="N",
            group="engine",
        )
    )
    ntasks_per_node: int | None = option(
        None,
        help="processes of the job that srun starts on each SLURM node, as MPI and Lightning want it (default: one, "
        "which starts its own)",
        parse=positive_int,
        metavar="N",
        group="engine",
    )
    mpi: str | None = option(
        None,
        help="how srun brings these processes together, like pmix (srun --mpi=list)",
        metavar="TYPE",
        group="engine",
    )
    in_allocation: bool | None = option(
        None,
        help="inside a SLURM job: run in that job and nowhere else; --no-in-allocation: submit (default: in that job "
        "if it has all that is requested, else submit)",
        yes_or_no=True,
        group="engine",
    )
    slurm_args: tuple[str, ...] = option(
        (),
        help="further arguments for sbatch and srun, like --slurm-args=--exclude=n3",
        many=True,
        metavar="WORD",
        group="engine",
    )
    setup: tuple[str, ...] = option(
        (),
        help="shell lines that are run first on a SLURM node, like 'module load cuda'",
        many=True,
        metavar="LINE",
        group="engine",
    )
