"""The documents as a whole: links lead somewhere, commands are commands, and the map of the house is right."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuherd.cli import COMMANDS
from gpuherd.cli.main import build_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`(gpuherd [^`]+)`")
_LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")
_SHELL = {"|", "&&", ";", ">", "2>", ">>", "&"}


def page_ids(page: Path) -> str:
    return page.name


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of each gpuherd command of a page's code, without those that are abridged by dots."""
    blocks = [block for kind, block in _BLOCK.findall(text) if kind in ("", "bash", "console")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *_INLINE.findall(text)]:
        if "gpuherd" not in line or "…" in line or "..." in line or "pip install" in line:
            continue
        words = shlex.split(line.strip().removeprefix("$ "), comments=True)
        if "gpuherd" not in words or not (line.lstrip("$ ").startswith("gpuherd ") or "| gpuherd" in line):
            continue
        words = words[words.index("gpuherd") + 1 :]
        end = next((at for at, word in enumerate(words) if word in _SHELL), len(words))
        yield words[:end]


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target, _ in _LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\(docs/([^)]+\.md)\)", PAGES[0].read_text(encoding="utf-8")))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_every_documented_command_is_one(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    for words in command_lines(page.read_text(encoding="utf-8")):
        if not words or words[0] in ("--version", "--help"):
            continue
        if len(words) > 1 and words[-1] == "--help":
            words = words[:-1]
        if len(words) == 1 or " ".join(words) in COMMANDS:
            assert words[0] in COMMANDS
            continue
        try:
            args, unknown = parser.parse_known_args(words)
            getattr(args, "parser", parser).reject_unknown(unknown)
        except SystemExit:
            pytest.fail(f"{page.name}: gpuherd {shlex.join(words)}: {capsys.readouterr().err}")


def test_the_map_names_every_module_of_the_queues_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    there = {path.stem for path in (ROOT / "src/gpuherd/jobs").glob("*.py")} - {"__init__"}
    table = page[page.index("## Inside `jobs/`") : page.index("## One job's way")]
    assert there <= set(re.findall(r"`([a-z_]+)`", table))


def test_the_map_names_nothing_that_is_not_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in re.findall(r"`([a-z_]+/[a-z_]+\.py)`", page):
        assert (ROOT / "src/gpuherd" / path).exists(), path
