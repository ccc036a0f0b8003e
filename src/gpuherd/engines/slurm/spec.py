"""Registers SLURM as an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpuherd.engines.registry import EngineSpec, Exporter

if TYPE_CHECKING:
    from gpuherd.checks import CheckResult
    from gpuherd.engines.base import Engine, ExportJob, Foreground
    from gpuherd.engines.options import EngineOptions
    from gpuherd.engines.slurm.options import SlurmOptions
    from gpuherd.engines.world import Join, Lead

_EXAMPLES = {
    "run": """\
  gpuherd run --engine slurm --partition gpu --num-gpus 2 --cpus 8 --time-limit 1h -- python train.py
  gpuherd run --engine slurm --nodes 2 --num-gpus 4 -- torchrun --nproc-per-node 4 train.py
  salloc --gres=gpu:4, and in it: gpuherd run --engine slurm --num-gpus 2 -- python train.py     a step of that job
""",
    "batch": """\
  gpuherd batch commands.txt --engine slurm --partition gpu --time-limit 4h --array-limit 16
  salloc --gres=gpu:4, and in it: gpuherd batch commands.txt --engine slurm --in-allocation     on the GPUs of that job
""",
    "export": """\
  gpuherd export --to slurm jobs.yaml --output slurm --partition gpu --time-limit 4h
  gpuherd export --to slurm commands.txt --output slurm --dry-run          shows the files, and writes none
  gpuherd export --to slurm results --output results/slurm --account lab
""",
    "submit": """\
  gpuherd submit --engine slurm --nodes 2 --num-gpus 4 -- torchrun --nproc-per-node 4 train.py
""",
    "up": """\
  gpuherd up --engine slurm --partition gpu        your queue for SLURM, to which gpuherd submit --engine slurm adds
  salloc --gres=gpu:4, and in it: gpuherd up --engine local     your queue of this machine, on the GPUs of that job
""",
    "down": """\
  gpuherd down --engine slurm
""",
    "posttrain": """\
  gpuherd posttrain experiment.name=first --engine slurm --partition gpu --node-gpus 4xA100-80GB
""",
    "train": """\
  gpuherd train --config config.yaml --num-gpus 8 --nnodes 2 --engine slurm --partition gpu --time-limit 4h
""",
    "doctor": """\
  gpuherd doctor --engine slurm                SLURM: programs, controller, accounting, partitions, this folder
""",
}


def _export(jobs: Sequence[ExportJob], options: EngineOptions) -> Mapping[str, str]:
    from gpuherd.engines.slurm.export import files
    from gpuherd.engines.slurm.site import refuse_mpi

    refuse_mpi(options)
    return files(jobs, options)


class _Slurm(EngineSpec):
    name = "slurm"
    title = "SLURM"
    about = "a SLURM cluster"
    order = 1
    variables = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMI_", "PMIX_")
    # Not all of SLURM_: others describe the job in which a command was typed.
    kept_variables = ("SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_")
    exporter = Exporter(to="slurm", files=_export, ignores=frozenset({"engine", "at_most", "in_allocation"}))
    ranks_by = "srun"
    gpu_type_flag = "--gpu-type"
    examples = _EXAMPLES

    @property
    def options(self) -> type[SlurmOptions]:
        from gpuherd.engines.slurm.options import SlurmOptions

        return SlurmOptions

    def connect(self, options: EngineOptions, lead: Lead, join: Join) -> Engine:  # noqa: ARG002
        from gpuherd.engines.slurm.engine import SlurmEngine

        return SlurmEngine(options)

    def tasks(self, options: EngineOptions) -> int:
        return options.ntasks_per_node or 1

    def ranks_flag(self, options: EngineOptions) -> str | None:
        if options.ntasks_per_node is not None:
            return "--ntasks-per-node"
        return None if options.mpi is None else "--mpi"

    def launcher(self, options: EngineOptions) -> str | None:
        return options.mpi

    def where(self, options: EngineOptions) -> str | None:
        return None if options.partition is None else f"partition {options.partition}"

    def inventory(self, options: EngineOptions) -> tuple[Mapping[str, int], ...] | None:
        from gpuherd.engines.slurm.site import gpus_of_nodes

        return gpus_of_nodes(options)

    def foreground(self) -> Foreground:
        from gpuherd.engines.slurm import foreground

        return foreground

    def installed(self) -> str | None:
        from gpuherd.engines.slurm.commands import SLURM

        return None if SLURM.missing() else "SLURM's programs"

    def doctor(self, options: EngineOptions) -> list[CheckResult]:  # noqa: ARG002
        from gpuherd.engines.slurm.site import find_slurm

        return find_slurm()


ENGINE = _Slurm()
