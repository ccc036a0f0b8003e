"""Which environments there are, by the names that configs use: a module is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from gpuherd.errors import UsageError, printable
from gpuherd.options import did_you_mean
from gpuherd.posttrain.envs.interface import Environments
from gpuherd.posttrain.envs.options import EnvironmentOptions
from gpuherd.posttrain.envs.shaping import Shape, Shaped

# A function of each module: EnvironmentOptions -> Environments.
ENVIRONMENTS: Mapping[str, str] = {
    "task": "of_task:make",
    "code": "code:make",
    "math": "math:make",
    "tool": "tool:make",
    "debate": "debate:make",
}
_NEEDED = ("name", "verifiable", "reward_range", "most_turns", "problems", "make", "step_all", "close")


def make_environments(options: EnvironmentOptions) -> Environments:
    """The environments that the options say. Raises UsageError, which says the nearest name; what reading raises."""
    made = _custom(options) if options.custom_class is not None else _known(options.env_type)(options)
    shape = Shape(options.reward_scale, options.reward_bias, options.reward_clip)
    return made if shape == Shape() else Shaped(made, shape)


def _known(name: str) -> Callable[[EnvironmentOptions], Environments]:
    plain = name.lower().replace("-", "_")
    if plain not in ENVIRONMENTS:
        hint = did_you_mean(plain, [*ENVIRONMENTS, "custom"])
        raise UsageError(f"env_type {printable(name)!r} is none of {', '.join(ENVIRONMENTS)} and custom{hint}")
    module, _, attribute = ENVIRONMENTS[plain].partition(":")
    found: Any = getattr(importlib.import_module(f"gpuherd.posttrain.envs.{module}"), attribute)
    return found  # type: ignore[no-any-return]


def _custom(options: EnvironmentOptions) -> Environments:
    """The user's own, made with ``custom_kwargs``. Raises UsageError."""
    name = options.custom_class or ""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        made = getattr(importlib.import_module(module), attribute)(**options.custom_kwargs)
    except (ImportError, AttributeError, ValueError, TypeError) as problem:
        raise UsageError(f"custom_class={printable(name)!r} can't be made: {problem}") from None
    missing = [each for each in _NEEDED if not hasattr(made, each)]
    if missing:
        raise UsageError(
            f"custom_class={printable(name)!r} has no {missing[0]}; environments.interface says what it needs"
        )
    own: Environments = made
    return own
