"""Registers Grid Engine as an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpuherd.engines.registry import EngineSpec, Exporter

if TYPE_CHECKING:
    from gpuherd.checks import CheckResult
    from gpuherd.engines.base import Engine, ExportJob
    from gpuherd.engines.gridengine.options import GridEngineOptions
    from gpuherd.engines.options import EngineOptions
    from gpuherd.engines.world import Join, Lead


def _export(jobs: Sequence[ExportJob], options: EngineOptions) -> Mapping[str, str]:
    from gpuherd.engines.gridengine.export import files
    from gpuherd.engines.gridengine.options import GridEngineOptions

    return files(jobs, options.of(GridEngineOptions))


class _GridEngine(EngineSpec):
    name = "gridengine"
    title = "Grid Engine"
    about = "a Grid Engine cluster"
    order = 3
    # Those by which jobs find their cluster (SGE_ROOT and the like) mean the same on all nodes.
    variables = (
        *("SGE_ACCOUNT", "SGE_ARCH", "SGE_BINARY_PATH", "SGE_CWD_PATH", "SGE_GPU", "SGE_HGR_", "SGE_JOB_", "SGE_O_"),
        *("SGE_RSH_COMMAND", "SGE_STDERR_PATH", "SGE_STDIN_PATH", "SGE_STDOUT_PATH", "SGE_TASK_"),
        *("JOB_ID", "JOB_NAME", "JOB_SCRIPT", "NHOSTS", "NQUEUES", "NSLOTS", "PE_HOSTFILE", "RESTARTED"),
    )
    kept_variables = ("SGE_ROOT", "SGE_CELL", "SGE_CLUSTER_NAME", "SGE_QMASTER_PORT", "SGE_EXECD_PORT")
    exporter = Exporter(to="gridengine", files=_export)

    @property
    def options(self) -> type[GridEngineOptions]:
        from gpuherd.engines.gridengine.options import GridEngineOptions

        return GridEngineOptions

    def connect(self, options: EngineOptions, lead: Lead, join: Join) -> Engine:  # noqa: ARG002
        from gpuherd.engines.gridengine.engine import GridEngine

        return GridEngine(options.of(self.options))

    def where(self, options: EngineOptions) -> str | None:
        queue = options.of(self.options).sge_queue
        return None if queue is None else f"queue {queue}"

    def installed(self) -> str | None:
        from gpuherd.engines.gridengine.commands import GRID_ENGINE

        return None if GRID_ENGINE.missing() else "Grid Engine's programs"

    def doctor(self, options: EngineOptions) -> list[CheckResult]:
        from gpuherd.engines.gridengine.engine import find_grid_engine

        return find_grid_engine(options.of(self.options))


ENGINE = _GridEngine()
