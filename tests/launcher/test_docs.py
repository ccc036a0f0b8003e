"""What docs/hydra.md says of the options is all of them."""

from __future__ import annotations

import re
from pathlib import Path

from hydra_plugins.gpuherd_launcher._settings import OPTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "hydra.md").read_text(encoding="utf-8")


def test_the_table_has_every_option() -> None:
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", PAGE.split("## Options")[1].split("## ")[0], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([a-z_]+)`", row)]
    assert sorted(named) == sorted(OPTIONS)


def test_every_option_that_the_page_uses_is_one() -> None:
    assert set(re.findall(r"hydra\.launcher\.([a-z_]+)=", PAGE)) <= OPTIONS.keys()
