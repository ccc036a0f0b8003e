"""Which algorithms there are: each file of this folder registers its own.

    @register
    class GRPO(PolicyGradient):
        name: ClassVar[str] = "GRPO"

What others have to know of an algorithm (``types.Algorithm``) stands in its class; nothing outside names it again. The
files are imported where the first name is looked up; none of them imports torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, TypeVar

from gpuherd.errors import UsageError
from gpuherd.options import did_you_mean
from gpuherd.posttrain.types import Algorithm

Kind = TypeVar("Kind", bound=type[Algorithm])

_ALGORITHMS: dict[str, type[Algorithm]] = {}


def register(kind: Kind) -> Kind:
    """Makes the class that follows known by its ``name`` and its ``aliases``. Raises ValueError for a name that is
    taken."""
    taken = _spellings(_ALGORITHMS)
    for each in (kind.name.lower(), *kind.aliases):
        if each in taken:
            raise ValueError(f"there is an algorithm {each!r} already")
    _ALGORITHMS[kind.name] = kind
    return kind


def algorithms() -> Mapping[str, type[Algorithm]]:
    """All algorithms by name, in the order of their names."""
    import gpuherd.posttrain.algos as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return {name: _ALGORITHMS[name] for name in sorted(_ALGORITHMS, key=str.lower)}


def canonical(name: str) -> str:
    """The registered spelling of a name. Raises UsageError, which says the nearest.

    >>> canonical("Q#"), canonical("grpo_hf")
    ('QSharp', 'GRPO-HF')
    """
    plain, known = name.lower().replace("_", "-"), algorithms()
    found = _spellings(known)
    if plain in found:
        return found[plain]
    if plain == "rpo":  # under that name alone it would be DPO, silently
        raise UsageError(f"algorithm {name!r} is DPO with rpo_weight above 0: algorithm=DPO, rpo_weight=1")
    hint = did_you_mean(plain, found, show=found.__getitem__)
    raise UsageError(f"algorithm {name!r} is none of {', '.join(known)}{hint}")


def algorithm_class(name: str) -> type[Any]:
    """The class of an algorithm, a ``types.Algorithm``; its ``Options`` is an attribute. Raises UsageError."""
    return algorithms()[canonical(name)]


def _spellings(known: Mapping[str, type[Algorithm]]) -> dict[str, str]:
    """Registered name by each spelling in lower case."""
    return {each: name for name, kind in known.items() for each in (name.lower(), *kind.aliases)}


ValueGuidedAlgorithms: tuple[str, ...]  # names of those whose classifier guides the reference
PostTrainingAlgorithms: tuple[str, ...]  # names of those that change the policy's own weights


def __getattr__(name: str) -> tuple[str, ...]:
    if name not in ("ValueGuidedAlgorithms", "PostTrainingAlgorithms"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    guided = name == "ValueGuidedAlgorithms"
    return tuple(each for each, kind in algorithms().items() if kind.guided is guided)
