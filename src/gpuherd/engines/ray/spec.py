"""Registers Ray as an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuherd.engines.registry import EngineSpec

if TYPE_CHECKING:
    from gpuherd.checks import CheckResult
    from gpuherd.engines.base import Engine
    from gpuherd.engines.options import EngineOptions
    from gpuherd.engines.ray.options import RayOptions
    from gpuherd.engines.world import Join, Lead

_EXAMPLES = {
    "run": """\
  gpuherd run --engine ray --ray-address 10.0.0.1:6379 -- python train.py
""",
    "doctor": """\
  gpuherd doctor --engine ray --ray-address node7:6379
""",
}


class _Ray(EngineSpec):
    name = "ray"
    title = "Ray"
    about = "a Ray cluster"
    order = 2
    variables = ("RAY_",)
    kept_variables = ("RAY_",)
    doctor_options = ("ray_address",)
    examples = _EXAMPLES

    @property
    def options(self) -> type[RayOptions]:
        from gpuherd.engines.ray.options import RayOptions

        return RayOptions

    def connect(self, options: EngineOptions, lead: Lead, join: Join) -> Engine:
        from gpuherd.engines.ray.engine import RayEngine

        return RayEngine(options, lead, join)

    def another_cluster(self, before: EngineOptions, now: EngineOptions) -> tuple[str, str] | None:
        address = before.ray_address
        if address == now.ray_address:
            return None
        if address is None:
            return "the Ray of this machine", "without --ray-address"
        return f"Ray at {address}", f"--ray-address {address}"

    def installed(self) -> str | None:
        from gpuherd.checks import version_of

        version = version_of("ray")
        return None if version is None else f"Ray {version}"

    def doctor(self, options: EngineOptions) -> list[CheckResult]:
        from gpuherd.engines.ray.cluster import find_ray

        return find_ray(options.ray_address)


ENGINE = _Ray()
