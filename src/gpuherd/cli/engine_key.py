"""``engine:`` of a command's YAML file. Less than a flag, more than the settings file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from gpuherd.flags import option_fields


def fill_from_yaml(args: argparse.Namespace, config_type: type, told: Any) -> None:
    """Puts what the key says where the command line has said nothing; nothing of another engine than was said there.

    Raises UsageError, with the key, for what it can't say.
    """
    from gpuherd.engines.block import read_block

    block = read_block(told, {field.name for field, _ in option_fields(config_type)})
    if getattr(args, "engine", None) not in (None, block.get("engine")):
        return
    for name, value in block.items():
        if not hasattr(args, name):
            setattr(args, name, value)


def key_of(file: str | None, words: Sequence[str]) -> Any:
    """What a YAML file says under ``engine``, and the words over it (``engine=slurm``, ``engine.partition=gpu``); None
    where they say nothing. Raises UsageError for a file that can't be read, and for such words that can't be.
    """
    from gpuherd.posttrain.config.yaml_strict import read_yaml
    from gpuherd.posttrain.learning.reading import set_value

    values: dict[str, Any] = {"engine": None if file is None else read_yaml(file).get("engine")}
    for word in (each.lstrip("+") for each in words):
        name = word.partition("=")[0]
        if name == "engine" or name.startswith("engine."):
            set_value(values, word)
    return values["engine"]
