"""Every figure of a result is explained on the page."""

from __future__ import annotations

from dataclasses import fields

from gpuherd.esd.schema import MEANINGS, NOT_METRICS, LayerRow


def test_every_figure_has_a_meaning_and_nothing_else_has() -> None:
    figures = {column.name for column in fields(LayerRow)} - NOT_METRICS - {"params"}
    assert MEANINGS.keys() - {"Q"} == figures
