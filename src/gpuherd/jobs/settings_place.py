"""Where the user's settings file and caches are. Light: whoever only wants to know whether there is one imports nothing
else."""

from __future__ import annotations

import os
from pathlib import Path


def user_file() -> Path:
    """Where the user's settings are looked for: under XDG_CONFIG_HOME, else ~/.config. Raises RuntimeError for a user
    without a home folder."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path("~/.config").expanduser()) / "gpuherd" / "config.toml"


def user_cache(kind: str) -> Path:
    """The folder, perhaps not made yet, for what can be made again: under XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    # expanduser of a user without a home leaves the ~, where Path's would raise.
    return Path(os.path.expanduser(base or "~/.cache")) / "gpuherd" / kind  # noqa: PTH111
