"""Names in an experiment's settings that are files here become absolute, so that the same is meant from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.rewards.function import FunctionName
from gpuherd.posttrain.runs.blocks import Dataset
from gpuherd.posttrain.runs.settings import Settings


def settled(settings: Settings) -> Settings:
    """The settings with absolute paths. A file among ``training.datasets`` (or ``evaluation.datasets_by_train``)
    becomes a data set that is called like the file. Raises UsageError where that name means something else already."""
    datasets = {name: _dataset(name, each) for name, each in settings.datasets.items()}
    trained = settings.training.datasets
    if trained is not None:
        trained = tuple(_named(name, datasets) for name in trained)
    evaluated = {
        _named(name, datasets): tuple(_named(each, datasets) for each in names)
        for name, names in settings.evaluation.datasets_by_train.items()
    }
    families = {
        name: replace(each, reference=_path(each.reference), value=_or_none(each.value), adapter=_or_none(each.adapter))
        for name, each in settings.models.items()
    }
    return replace(
        settings,
        training=replace(settings.training, datasets=trained),
        evaluation=replace(settings.evaluation, datasets_by_train=evaluated),
        datasets=datasets,
        models=families,
        algos={name: _options(block) for name, block in settings.algos.items()},
    )


def _dataset(name: str, told: Dataset) -> Dataset:
    try:
        reward = None if told.reward is None else str(FunctionName.of(told.reward).absolute)
    except UsageError as problem:
        raise UsageError(f"datasets.{name}: {problem}") from None
    return replace(told, task=_or_none(told.task), reward_model=_or_none(told.reward_model), reward=reward)


def _named(name: str, datasets: dict[str, Dataset]) -> str:
    """The name of a data set; of a file one that is new, which ``datasets`` is given."""
    if name in datasets or not _is_file(name):
        return name
    path, short = _path(name), Path(name).stem
    known = datasets.setdefault(short, Dataset(task=path, enabled=False))
    if known.task != path:
        raise UsageError(f"{name}: a data set is called {short} already; name this one: datasets.<name>.task={name}")
    return short


def _is_file(name: str) -> bool:
    try:
        return ("/" in name or "." in name) and Path(name).expanduser().is_file()
    except (OSError, ValueError):
        return False


def _path(name: str) -> str:
    """An absolute path where there is such a file or folder, else the name as it is (an id)."""
    try:
        path = Path(name).expanduser()
        return str(path.absolute()) if path.exists() else name
    except (OSError, ValueError, RuntimeError):
        return name


def _or_none(name: str | None) -> str | None:
    return None if name is None else _path(name)


def _options(block: Any) -> Any:
    """An algorithm's options with absolute paths: texts that look like a path and are one."""
    if isinstance(block, Mapping):
        return {name: _options(each) for name, each in block.items()}
    if isinstance(block, str) and ("/" in block or "." in block):
        return _path(block)
    return block
