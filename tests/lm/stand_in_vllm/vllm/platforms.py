"""The platform: one that can sleep, though there is no GPU; not with ``STAND_IN_AWAKE``."""

from __future__ import annotations

import os
from types import SimpleNamespace

current_platform = SimpleNamespace(
    is_sleep_mode_available=lambda: "STAND_IN_AWAKE" not in os.environ,
    is_cuda_alike=lambda: True,
    is_cumem_allocator_available=lambda: True,
)
