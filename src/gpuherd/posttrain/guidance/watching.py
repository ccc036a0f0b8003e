"""What a caller of ``train`` has put in as ``Training.extra["hooks"]``, as far as it is used here. Pure."""

from __future__ import annotations

from gpuherd.posttrain.engine.options import Watching
from gpuherd.posttrain.types import Training


def watching(work: Training, save_every: int) -> Watching:
    """As the hooks say; without hooks, a checkpoint every ``save_every`` steps."""
    hooks: Watching | None = work.extra.get("hooks")
    return Watching(save_every) if hooks is None else Watching(**hooks.named())
