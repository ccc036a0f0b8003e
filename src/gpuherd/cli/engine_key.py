"""``engine:`` of a command's YAML file. Less than a flag, more than the settings file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from gpuherd.engines.registry import LOCAL
from gpuherd.options import option_fields


def fill_from_yaml(args: argparse.Namespace, config_type: type, told: Any) -> None:
    """Puts what the key says where the command line has said nothing; nothing of another engine than was said there.

    Raises UsageError, with the key, for what it can't say.
    """
    from gpuherd.engines.options import read_block

    fill_from_block(args, read_block(told, {field.name for field, _ in option_fields(config_type)}))


def fill_from_block(args: argparse.Namespace, block: Mapping[str, Any]) -> None:
    """The same with what was read already. Simulated GPUs are this machine's, whatever a file says."""
    here = None if args.simulate is None else LOCAL
    if getattr(args, "engine", here) not in (None, block.get("engine")):
        return
    for name, value in block.items():
        if not hasattr(args, name):
            setattr(args, name, value)


def key_of(file: str | None, words: Mapping[str, Any]) -> Any:
    """What a YAML file says under ``engine``, and what is said over it by full keys (``engine``, ``engine.partition``);
    None where nothing is. Raises UsageError for a file that can't be read, and for a key of what is no mapping.
    """
    from gpuherd.posttrain.config.yaml_strict import read_yaml

    told: Any = None if file is None else read_yaml(file).get("engine")
    told = words.get("engine", told)
    inner = {key.partition(".")[2]: value for key, value in words.items() if key.startswith("engine.")}
    if not inner:
        return told
    block = {} if told is None else dict(told) if isinstance(told, Mapping) else {"name": told}
    return block | inner


def about_engines(words: Sequence[str]) -> list[str]:
    """Those of the words ``key=value`` that speak of the engine."""
    keys = [(word, word.lstrip("+").partition("=")[0]) for word in words]
    return [word.lstrip("+") for word, key in keys if key == "engine" or key.startswith("engine.")]
