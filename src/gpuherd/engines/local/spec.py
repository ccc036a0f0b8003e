"""Registers this machine as an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpuherd.engines.registry import LOCAL, EngineSpec, Exporter, LocalOptions
from gpuherd.errors import UsageError

if TYPE_CHECKING:
    from gpuherd.engines.base import Engine, ExportJob
    from gpuherd.engines.options import EngineOptions
    from gpuherd.engines.world import Join, Lead


def _export(jobs: Sequence[ExportJob], options: EngineOptions) -> Mapping[str, str]:  # noqa: ARG001
    from gpuherd.engines.local.export import files

    return files(jobs)


class _Local(EngineSpec):
    name = LOCAL
    title = "this machine"
    about = "this machine"
    order = 0
    options = LocalOptions
    exporter = Exporter(to="shell", files=_export, submit_file="run.sh")

    def connect(self, options: EngineOptions, lead: Lead, join: Join) -> Engine:  # noqa: ARG002
        """Raises UsageError: the dispatcher starts jobs on this machine itself."""
        raise UsageError("there is no connection to this machine: the dispatcher starts its jobs itself")


ENGINE = _Local()
