"""Where Hydra finds the config ``hydra/launcher/gpuherd``.

Every Hydra program on the machine imports this module, also those that never sweep. The config is made of gpuherd's
options, which take a moment to import: that is done when the config is asked for, and not, as Hydra's own store of
configs would need it, whenever any program starts.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin

_SCHEME = "gpuherd"
_GROUPS = ("", "hydra", "hydra/launcher")
_CONFIG = "hydra/launcher/gpuherd"


class GpuherdSearchPath(SearchPathPlugin):  # type: ignore[misc]  # Hydra comes without types
    """Adds our one config to what Hydra looks through, behind everything else."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra when it starts."""
        search_path.append(provider="gpuherd-launcher", path=f"{_SCHEME}://")


class GpuherdConfigs(ConfigSource):  # type: ignore[misc]  # Hydra comes without types
    """A source with one config, made when it is asked for."""

    @staticmethod
    def scheme() -> str:
        """What stands in front of ``://``."""
        return _SCHEME

    def load_config(self, config_path: str) -> ConfigResult:  # noqa: ARG002 - there is one
        """The config, with each option's default."""
        from omegaconf import OmegaConf

        from hydra_plugins.gpuherd_launcher._settings import GpuherdConf

        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.structured(GpuherdConf),
            header={"package": None},
        )

    def available(self) -> bool:
        """Always."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Whether the config lies below this path."""
        return config_path.strip("/") in _GROUPS

    def is_config(self, config_path: str) -> bool:
        """Whether this is the path of the config."""
        return config_path.strip("/").removesuffix(".yaml") == _CONFIG

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """What lies at this path: for completion and for ``--hydra-help``."""
        found: list[str] = []
        prefix = config_path.strip("/")
        for path in (*_GROUPS, _CONFIG):
            parent, _, name = path.rpartition("/")
            if name and parent == prefix:
                self._list_add_result(found, path, name, results_filter)
        return found
