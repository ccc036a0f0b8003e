"""Registers this machine as an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpuherd.engines.registry import LOCAL, EngineSpec, Exporter, LocalOptions

if TYPE_CHECKING:
    from gpuherd.engines.base import ExportJob
    from gpuherd.engines.options import EngineOptions


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


ENGINE = _Local()
