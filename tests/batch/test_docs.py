"""What docs/batch.md shows works as it stands there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from gpuherd.batch.assemble import KEYS
from gpuherd.batch.commands_txt import read_commands
from gpuherd.batch.daemon import down
from gpuherd.batch.jobs_yaml import read_document
from gpuherd.cli.main import build_parser

PAGE = (Path(__file__).parents[2] / "docs" / "batch.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


COMMAND_LINES = [line for block in blocks("bash") for line in block.splitlines()]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_command_line_parses(line: str) -> None:
    words = shlex.split(line.rpartition("| ")[2])
    assert words[0] == "gpuherd"
    args, unknown = build_parser().parse_known_args(words[1:])
    assert unknown == []
    assert args.command == words[1]


def test_there_are_command_lines_of_every_command() -> None:
    assert {line.rpartition("| ")[2].split()[1] for line in COMMAND_LINES} == {"batch", "run", "submit", "up", "down"}


def test_the_files_are_what_the_page_says() -> None:
    (commands,), (document, sweep) = blocks("text"), blocks("yaml")
    entries = read_commands(commands)
    assert [entry.given.get("name", entry.proposed) for entry in entries] == [
        "line-0003",
        "line-0004",
        "large",
        "line-0010",
    ]
    assert [entry.given.get("name", entry.proposed) for entry in read_document(document)] == [
        "train-lr0.1-seed1",
        "train-lr0.1-seed2",
        "train-lr0.01-seed1",
        "train-lr1-seed1",
        "tune-round1",
        "tune-round2",
        "tune-round3",
        "job-0003",
    ]
    drawn = read_document(sweep)
    assert len({entry.argv for entry in drawn}) == 20
    assert drawn[0].given["name"].startswith("tune-lr0.0169996-layers6-")


def test_the_table_has_every_key() -> None:
    rows = re.findall(r"^\| (`[a-zA-Z., `-]+`) \|", PAGE.split("### jobs.yaml")[0], re.MULTILINE)
    assert {key for row in rows for key in re.findall(r"`([a-zA-Z.-]+)`", row)} == set(KEYS)


def test_the_python_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUHERD_QUEUE", str(tmp_path / "queue"))
    document = {"jobs": [{"command": [sys.executable, "-c", "open('done', 'w')"]}]}
    (tmp_path / "jobs.yaml").write_text(str(document))
    (block,) = blocks("python")
    try:
        exec(compile(block, "docs/batch.md", "exec"), {})
    finally:
        down(now=True)
    assert (tmp_path / "done").exists()
    assert capsys.readouterr().out.splitlines()[-1] == "job-0001"
