"""The letters' models of ``tests.posttrain.value`` serve here too."""

from __future__ import annotations

from tests.posttrain.value.conftest import reference, small

__all__ = ["reference", "small"]
