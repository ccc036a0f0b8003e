"""The letters' models of ``tests.posttrain.guidance`` serve here too."""

from __future__ import annotations

from tests.posttrain.guidance.conftest import reference, small

__all__ = ["reference", "small"]
