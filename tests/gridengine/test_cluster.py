"""What the test cluster needs is named alike wherever it is named; without it tests are skipped with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gridengine.cluster import COMMANDS, PACKAGES, why_not

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", [".ci/run", "docs/gridengine.md"])
def test_the_packages_are_named_alike(path: str) -> None:
    assert PACKAGES in (ROOT / path).read_text(encoding="utf-8")


def test_without_them_the_reason_says_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = why_not()
    assert reason is not None
    assert reason == "a test cluster needs Linux and root" or (COMMANDS[0] in reason and PACKAGES in reason)
