"""A browser for the tests of the page."""

from __future__ import annotations

from tests.qa.report.conftest import browser

__all__ = ["browser"]
