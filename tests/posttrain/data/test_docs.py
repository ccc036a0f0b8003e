"""docs/tasks.md names every task, environment and setting, and its snippets run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from gpuherd.posttrain.data.registry import tasks
from gpuherd.posttrain.envs.registry import environments

TEXT = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, str]:
    """The rows of the table behind a heading, by the names in their first cells."""
    table = TEXT.partition(f"## {heading}")[2].partition("\n## ")[0]
    cells = [line for line in table.splitlines() if line.startswith("|")]
    return {name: line for line in cells for name in re.findall(r"`([a-z0-9_]+)`", line.split("|")[1])}


def names_of(settings: Any) -> set[str]:
    return {each.name for each in dataclasses.fields(settings)}


def test_every_task_is_in_the_table_with_its_settings() -> None:
    table = rows("The tasks")
    assert table.keys() == tasks().keys()
    previous = ""
    for name, line in table.items():
        cell = line.split("|")[-2].strip()
        previous = previous if cell == "the same" else cell
        if name == "tree_mdp":
            continue
        told = set(re.findall(r"`([a-z_]+)`", previous)) - {"boxed", "POSITIVE"}
        assert told == names_of(tasks()[name].settings), name


def test_every_environment_is_in_the_table_and_every_setting_is_told() -> None:
    assert {*environments(), "task", "custom"} <= rows("Environments").keys()
    for name, known in environments().items():
        for setting in names_of(known.settings):
            assert f"`{setting}`" in TEXT, (name, setting)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL))
def test_the_snippets_run(block: str) -> None:
    exec(compile(block, "docs/tasks.md", "exec"), {})
