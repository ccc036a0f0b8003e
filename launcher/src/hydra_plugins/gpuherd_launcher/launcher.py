"""``hydra/launcher=gpuherd``: what Hydra finds here when it looks for plugins.

Every Hydra program on the machine imports this module, also those that never sweep. So it only declares: options are
imported when the launcher is chosen, and what runs and pickles jobs by the first ``launch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from hydra_plugins.gpuherd_launcher._settings import Settings


class GpuherdLauncher(Launcher):  # type: ignore[misc]  # Hydra comes without types
    """Runs the jobs of a sweep as jobs of a gpuherd queue in the sweep's folder.

    Args:
        said: the options of ``hydra.launcher``, by name.
    """

    def __init__(self, **said: Any) -> None:
        self._said = said
        self._settings: Settings | None = None
        self._hydra: tuple[HydraContext, TaskFunction, DictConfig] | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's side of the sweep. Raises CompactHydraException for options that mean nothing."""
        from hydra_plugins.gpuherd_launcher._settings import read
        from hydra_plugins.gpuherd_launcher._telling import as_hydra_tells

        with as_hydra_tells():
            self._settings = read(self._said)
        self._hydra = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs these jobs; what they returned, in order. One that failed doesn't stop the others: asking for its value
        raises what it raised.
        """
        from hydra_plugins.gpuherd_launcher._sweep import launch
        from hydra_plugins.gpuherd_launcher._telling import as_hydra_tells

        if self._hydra is None or self._settings is None:
            raise RuntimeError("launch comes after setup")
        with as_hydra_tells():
            return launch(*self._hydra, self._settings, job_overrides, initial_job_idx)
