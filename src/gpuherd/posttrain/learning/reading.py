"""A configuration of a file and of the words behind it; and the same as a file again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError, printable
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.config.yaml_strict import parse_yaml, read_yaml
from gpuherd.posttrain.learning.checking import check
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.runs.records import jsonable


def read_config(file: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration of a YAML file, with ``training.batch_size=8`` and the like over it, checked.

    Raises UsageError, which names the key: unknown, there twice, of a wrong kind, or contradicting another.
    """
    values = {} if file is None else read_yaml(file)
    for word in overrides:
        set_value(values, word)
    config = read(TrainConfig, values)
    check(config)
    return config


def set_value(values: dict[str, Any], word: str) -> None:
    """Sets ``a.b=value`` in nested mappings; the value is YAML. Raises UsageError for a word that is no such thing.

    >>> values = {"training": {"seed": 1}}
    >>> set_value(values, "training.batch_size=8")
    >>> values
    {'training': {'seed': 1, 'batch_size': 8}}
    """
    key, sign, text = word.partition("=")
    names = key.split(".")
    if not sign or not all(names):
        raise UsageError(f"{printable(word)!r} is no setting; write key=value, as in training.batch_size=8")
    at: Any = values
    for depth, name in enumerate(names[:-1], 1):
        if at.get(name) is None:
            at[name] = {}
        at = at[name]
        if not isinstance(at, dict):
            raise UsageError(f"{printable(word)!r}: {'.'.join(names[:depth])} holds a value and no keys")
    at[names[-1]] = parse_yaml(f"value: {text}", f"{key}=...")["value"]


def as_yaml(config: TrainConfig) -> str:
    """The configuration as YAML that ``read_config`` reads back as equal."""
    import yaml

    text: str = yaml.safe_dump(jsonable(config), sort_keys=False, allow_unicode=True)
    return text
