"""Whether the powerlaw package is there in a version that truncated power laws can be fitted with.

A light module: it reads what is installed and imports nothing of it, so that an option can be refused before any work.
"""

from __future__ import annotations

import importlib.metadata

from gpuherd.errors import MissingExtra


def require_powerlaw() -> None:
    """Raises MissingExtra when the powerlaw package is not there in a version that this module can use."""
    try:
        version: str | None = importlib.metadata.version("powerlaw")
    except importlib.metadata.PackageNotFoundError:
        version = None
    problem = version_problem(version)
    if problem is not None:
        raise MissingExtra(problem)


def version_problem(version: str | None) -> str | None:
    """Why this version of the powerlaw package (None: not installed) can't be used, and what to do; None if it can."""
    if version is None:
        return "--tpl needs powerlaw 1.5; install it with: pip install 'gpuherd[tpl]'"
    if version.partition(".")[0] != "1":
        return (
            f"--tpl needs powerlaw 1.5, but powerlaw {version} is installed, which computes other fits (it caps "
            "exponents at 3); pip install 'gpuherd[tpl]' brings the right one"
        )
    return None
