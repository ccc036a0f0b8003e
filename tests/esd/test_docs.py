"""The guides tell the truth: every option is in the table, every command line in them parses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gpuherd.cli.main import build_parser
from gpuherd.engines.options import EngineOptions
from gpuherd.esd.config import ExperimentConfig
from gpuherd.options import build, option_fields, spellings

DOCS = Path(__file__).parents[2] / "docs"


def command_lines() -> list[str]:
    """Every ``gpuherd esd`` line of the guides, in code blocks and in tables; placeholders filled in."""
    found: list[str] = []
    for name in ("quickstart.md", "esd.md", "from-the-guides.md"):
        text = (DOCS / name).read_text(encoding="utf-8")
        found += re.findall(r"^gpuherd .*esd .*$", text, flags=re.MULTILINE)
        found += re.findall(r"`(gpuherd esd [^`]*)`", text)
    return sorted({line.split("#")[0].replace("…", "--single-model gpt2").strip() for line in found})


def test_there_are_command_lines_to_check() -> None:
    assert len(command_lines()) >= 8


@pytest.mark.parametrize("line", command_lines())
def test_a_command_line_of_the_guides_parses(line: str) -> None:
    args = build_parser().parse_args(shlex.split(line)[1:])
    if args.tool is not None or args.resume is not None:
        return  # these have no options of an experiment, or those of an earlier one
    assert build(ExperimentConfig, args).mode == "esd"


def test_the_table_of_options_has_every_option_and_its_default() -> None:
    text = (DOCS / "esd.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(--[a-z-]+)[^`]*` \|([^|]*)\|", text, flags=re.MULTILINE))
    # Those of engines are the same for every command, and have a page of their own.
    engines = {field.name for field, _ in option_fields(EngineOptions)}
    options = [(field, spec) for field, spec in option_fields(ExperimentConfig) if field.name not in engines]
    known = {spellings(field.name, spec)[0][0]: field.default for field, spec in options}
    assert "(engines.md)" in text
    assert set(rows) == known.keys() | {"--json", "--resume"}
    for flag, default in known.items():
        told = rows[flag].strip().strip("`")
        if isinstance(default, float) or (type(default) is int and default != 0):
            assert float(told) == default, flag
        elif isinstance(default, str):
            assert told == default, flag


def test_python_blocks_compile() -> None:
    blocks = [
        block
        for name in ("quickstart.md", "esd.md")
        for block in re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    ]
    assert len(blocks) == 3
    namespace: dict[str, object] = {}
    for block in blocks:
        # All but the run itself, which needs models.
        exec(block.replace("experiment.run()", ""), namespace)
    assert {"config", "experiment", "CustomExperiment", "row", "table", "metrics"} <= namespace.keys()
