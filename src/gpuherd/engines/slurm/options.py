"""SLURM's own options."""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.engines.registry import BatchSystemOptions, engine_option
from gpuherd.units import positive_int


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(BatchSystemOptions):
    """What jobs request from SLURM beyond the options of every batch system."""

    partition: str | None = engine_option(None, help="SLURM partition, like gpu", metavar="NAME")
    account: str | None = engine_option(None, help="SLURM account, like physics", metavar="NAME")
    qos: str | None = engine_option(None, help="SLURM quality of service, like short", metavar="NAME")
    constraint: str | None = engine_option(None, help="SLURM node features, like 'a100|h100'", metavar="WORDS")
    gpu_type: str | None = engine_option(
        None,
        help="SLURM's name of the GPU type, like a100 for --gres=gpu:a100:N",
        metavar="TYPE",
    )
    ntasks_per_node: int | None = engine_option(
        None,
        help="processes of the job that srun starts on each SLURM node, as MPI and Lightning want it (default: one, "
        "which starts its own)",
        parse=positive_int,
        metavar="N",
    )
    mpi: str | None = engine_option(
        None,
        help="how srun brings these processes together, like pmix (srun --mpi=list)",
        metavar="TYPE",
    )
    in_allocation: bool | None = engine_option(
        None,
        help="inside a SLURM job: run in that job and nowhere else; --no-in-allocation: submit (default: in that job "
        "if it has all that is requested, else submit)",
        yes_or_no=True,
    )
    slurm_args: tuple[str, ...] = engine_option(
        (),
        help="further arguments for sbatch and srun, like --slurm-args=--exclude=n3",
        many=True,
        metavar="WORD",
    )
