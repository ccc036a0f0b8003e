"""Other options for a run that goes on: words like those of the command line, checked by the options' own parsers.

Pure. Which options can be changed in mid-run is said here; what a change means is the dispatcher's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.jobs.options import DispatchOptions, GpuOptions
from gpuherd.options import Option

SETTABLE = (
    "gpu_list",
    "max_gpus",
    "max_checks",
    "gpu_memory_threshold",
    "check_interval",
    "max_concurrent",
    "order",
    "share",
    "yield_to_others",
    "at_most",
)
_NO_LIMIT = ("none", "no")
_ALL = "all"
_TRUE, _FALSE = ("yes", "true", "on", "1"), ("no", "false", "off", "0")


def retuned(options: DispatchOptions, settings: Mapping[str, str]) -> DispatchOptions:
    """The options with some changed. Raises UsageError, with the nearest name, for one that is unknown or can't be.

    >>> retuned(DispatchOptions(), {"gpus": "4,5", "max-checks": "3"}).gpu_ids
    ('4', '5')
    """
    return replace(options, **changes(settings))


def changes(settings: Mapping[str, str]) -> dict[str, Any]:
    """Values by field name out of such words; whether the run's engine has such options is not asked. Raises as
    ``retuned``."""
    found: dict[str, Any] = {}
    known = _spellings()
    for word, value in settings.items():
        name = word.strip().lstrip("-").replace("-", "_")
        if name not in known:
            raise UsageError(_unknown(word, name, tuple(known)))
        field_name, spec = known[name]
        found[field_name] = _parse(word, field_name, spec, value)
    return found


def dispatch_options(options: GpuOptions) -> DispatchOptions:
    """These options as those of a dispatcher: what they don't say is as by default, what is more is left out."""
    names = {each.name for each in fields(options)} & {each.name for each in fields(DispatchOptions)}
    return DispatchOptions(**{name: getattr(options, name) for name in names})


def _spellings() -> dict[str, tuple[str, Option]]:
    known = {}
    for each in fields(DispatchOptions):
        if each.name in SETTABLE:
            spec: Option = each.metadata["option"]
            for spelling in (each.name, spec.flag, *spec.aliases):
                if spelling is not None:
                    known[spelling.replace("-", "_")] = (each.name, spec)
    return known


def _unknown(word: str, name: str, known: tuple[str, ...]) -> str:
    import difflib  # slow to import, and seldom needed

    nearest = difflib.get_close_matches(name, known, n=1)
    if name in {each.name for each in fields(DispatchOptions)}:
        return f"{word} can't be changed while a run goes on; possible: {', '.join(SETTABLE)}"
    hint = f"did you mean {nearest[0]}?" if nearest else f"possible: {', '.join(SETTABLE)}"
    return f"there is no option {word!r}; {hint}"


def _parse(word: str, name: str, spec: Option, value: str) -> Any:
    text = value.strip()
    if name == "gpu_list" and text == _ALL:
        return ()
    if name == "max_concurrent" and text.lower() in _NO_LIMIT:
        return None
    if name == "max_gpus" and text == _ALL:
        return None
    if name == "share":
        if text.lower() not in _TRUE + _FALSE:
            raise UsageError(f"{word}={value!r}; write yes or no")
        return text.lower() in _TRUE
    if spec.choices is not None:
        if text not in spec.choices:
            raise UsageError(f"{word} can't be {value!r}; possible: {', '.join(spec.choices)}")
        return text
    try:
        parsed = text if spec.parse is None else spec.parse(text)
    except ValueError as problem:
        raise UsageError(f"{word}: {problem}") from None
    return (parsed,) if spec.many else parsed
