"""Registers this machine as an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpuherd.engines.registry import LOCAL, EngineSpec, LocalOptions

if TYPE_CHECKING:
    from gpuherd.engines.base import ExportJob
    from gpuherd.engines.options import EngineOptions


class _Local(EngineSpec):
    name = LOCAL
    title = "this machine"
    about = "this machine"
    order = 0
    options = LocalOptions
    export_to = "shell"
    submit_file = "run.sh"

    def export(self, jobs: Sequence[ExportJob], options: EngineOptions) -> Mapping[str, str]:  # noqa: ARG002
        from gpuherd.engines.local.export import files

        return files(jobs)


ENGINE = _Local()
