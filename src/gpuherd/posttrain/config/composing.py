"""An experiment's configuration as plain values: shipped YAML groups, a user's file over them, overrides last.

Hydra composes (its ``compose`` API alone: no ``@hydra.main``, no run folder of its own, nothing that several processes
could do twice), in its own grammar of overrides: ``key=value``, ``+key=value``, ``~key``, ``group=choice``. Which keys
there are is not decided by the YAML but by the dataclasses that read the result: so ``key=value`` may name any key, and
the message of one that is none names the nearest.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError, naming_extras
from gpuherd.posttrain.config.typed import nearest_or_all
from gpuherd.posttrain.config.yaml_strict import read_yaml

CONF = Path(__file__).parent.parent / "conf"
_EXTRAS = {"hydra": "posttrain", "omegaconf": "posttrain"}
# Groups with choices that need no file: what is registered under a name, enabled with its defaults. By dotted names:
# those rooms are above this one.
_REGISTERED = {"algos": "gpuherd.posttrain.algos.registry:algorithms"}
_OURS, _THEIRS = "gpuherd_experiment", "gpuherd_file"


def compose(overrides: Sequence[str] = (), file: str | Path | None = None, folder: Path = CONF) -> dict[str, Any]:
    """The values of ``folder/config.yaml`` with its groups, of the user's file, and of the overrides.

    The file is YAML as ``yaml_strict`` reads it. Its ``defaults:`` may choose groups, as a list of ``group: choice``;
    an override ``group=choice`` goes before them. Interpolations (``${generation.batch_size}``) are resolved, and
    ``${shipped:NAME}`` to the folder of a model that ships with gpuherd.

    Raises UsageError: what Hydra doesn't take, in a sentence; an unknown choice, with the nearest. MissingExtra.
    """
    with naming_extras(_EXTRAS, "experiments take"):
        from omegaconf import OmegaConf
    OmegaConf.register_new_resolver("shipped", shipped, replace=True)
    values = {} if file is None else read_yaml(file)
    if "hydra" in values:
        raise UsageError(f"{file}: there is no key hydra: it only composes here; where runs go says output_dir")
    chosen = _choices_of(values.pop("defaults", None), folder, file)
    words = [*chosen, *(_word(word, folder) for word in overrides)]
    with _as_usage_errors(), _composed(values, words, folder) as found:
        whole = OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
    assert isinstance(whole, dict)  # noqa: S101 - it is composed of mappings
    # A group without a choice is there with nothing in it.
    return {str(key): {} if value is None and key in groups(folder) else value for key, value in whole.items()}


def shipped(name: str) -> str:
    """The folder of a model that ships with gpuherd. Raises ValueError where there is none of this name."""
    folder = CONF.parent / name
    if Path(name).name != name or not (folder / "config.json").is_file():
        raise ValueError(f"no model {name} ships with gpuherd")
    return str(folder)


def said(overrides: Sequence[str]) -> dict[str, Any]:
    """What overrides say by their full keys, where nothing is composed. Raises UsageError for groups, + and ~."""
    found = {}
    for word in overrides:
        parsed = _parsed(word)
        if not parsed.plain or parsed.key in groups():
            raise UsageError(f"{word}: a run that goes on has its own configuration; leave it out")
        found[parsed.key] = parsed.value
    return found


def groups(folder: Path = CONF) -> dict[str, tuple[str, ...]]:
    """The groups of a folder of configurations, and the choices in each: its files, and of those that ship with gpuherd
    what is registered too."""
    return {
        each.name: tuple(sorted({*_files(each), *_registered(each.name, folder)}))
        for each in sorted(folder.iterdir())
        if each.is_dir() and any(each.glob("*.yaml"))
    }


def _files(group: Path) -> list[str]:
    return [file.stem for file in group.glob("*.yaml")]


def _registered(group: str, folder: Path) -> list[str]:
    """The names in a shipped group that are registered and not in files."""
    if group not in _REGISTERED or folder != CONF:
        return []
    module, _, names = _REGISTERED[group].partition(":")
    return list(getattr(importlib.import_module(module), names)())


@dataclass(frozen=True, slots=True)
class _Parsed:
    """An override, taken apart by Hydra's parser."""

    key: str
    plain: bool  # without + or ~ before it
    deletes: bool
    value: Any


def _word(word: str, folder: Path) -> str:
    """An override as Hydra is given it: a key is set whether the YAML has it or not. Raises UsageError."""
    parsed = _parsed(word)
    if parsed.key == "hydra" or parsed.key.startswith("hydra."):
        raise UsageError(f"{word}: Hydra only composes here; where runs go says output_dir")
    if parsed.key in groups(folder):
        if parsed.deletes and parsed.value is None:  # Hydra itself takes no list of choices out
            return f"{parsed.key}=[]"
        _check_choice(parsed.key, parsed.value, folder)
        return word
    return f"++{word}" if parsed.plain else word


def _parsed(word: str) -> _Parsed:
    with naming_extras(_EXTRAS, "experiments take"):
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.core.override_parser.types import OverrideType
        from hydra.errors import HydraException
    if "=" not in word and not word.startswith("~"):
        raise UsageError(f"{word!r} is no override; write key=value, as in experiment.name=first")
    try:
        found = OverridesParser.create().parse_override(word)
        if found.is_sweep_override():
            raise UsageError(f"{word}: several values by commas are a sweep, which is not done; a list is [a,b]")
        value = found.value()
    except HydraException as problem:
        raise UsageError(f"{word}: no override: {_first_line(problem)}") from None
    return _Parsed(found.key_or_group, found.type == OverrideType.CHANGE, found.type == OverrideType.DEL, value)


def _choices_of(defaults: Any, folder: Path, file: str | Path | None) -> list[str]:
    """The overrides that the ``defaults`` of a user's file stand for. Raises UsageError."""
    if defaults is None:
        return []
    if not isinstance(defaults, list):
        raise UsageError(f"{file}: defaults should be a list, as in 'defaults: [models: gpt2]'")
    words = []
    for each in defaults:
        if each == "_self_":
            continue
        if not isinstance(each, Mapping) or len(each) != 1:
            raise UsageError(f"{file}: defaults: {each!r} should be a group and its choice, as in 'models: gpt2'")
        ((group, choice),) = each.items()
        group = group.removeprefix("override ").strip().removeprefix("/")
        if group not in groups(folder):
            raise UsageError(f"{file}: defaults: no group {group!r}{nearest_or_all(group, list(groups(folder)))}")
        _check_choice(group, choice, folder)
        chosen = f"[{','.join(choice)}]" if isinstance(choice, list) else choice
        words.append(f"{group}={chosen}")
    return words


def _check_choice(group: str, choice: Any, folder: Path) -> None:
    possible = groups(folder)[group]
    for each in choice if isinstance(choice, list) else [choice]:
        if each is None:
            raise UsageError(f"{group}=null: none of its choices is {group}=[]")
        if each not in possible:
            raise UsageError(f"{group}={each}: there is no such choice{nearest_or_all(str(each), possible)}")


@contextmanager
def _composed(values: Mapping[str, Any], words: Sequence[str], folder: Path) -> Iterator[Any]:
    """The composed configuration: shipped, then the user's values, then the overrides."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store = ConfigStore.instance()
    store.store(name=_THEIRS, node=OmegaConf.create(dict(values)))
    store.store(name=_OURS, node={"defaults": ["config", _THEIRS, "_self_"]})
    for group in _REGISTERED:
        for name in set(_registered(group, folder)).difference(_files(folder / group)):
            store.store(group=group, name=name, node={name: {"enabled": True}})
    with initialize_config_dir(str(folder.absolute()), version_base=None):
        yield hydra_compose(_OURS, list(words))


@contextmanager
def _as_usage_errors() -> Iterator[None]:
    """What Hydra and OmegaConf complain of, as a sentence of ours."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as problem:
        raise UsageError(_first_line(problem)) from None


def _first_line(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[0] if lines else type(problem).__name__
