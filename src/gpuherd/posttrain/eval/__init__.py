"""How good policies are, and how far from the reference: metrics with intervals, and comparisons that are fair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuherd.exports import on_first_use

if TYPE_CHECKING:
    from gpuherd.posttrain.eval.evaluation import Evaluating, evaluate, evaluate_shard, join_shards
    from gpuherd.posttrain.eval.tables import gather

__all__ = ["Evaluating", "evaluate", "evaluate_shard", "gather", "join_shards"]

_HOME_OF = {
    "Evaluating": "evaluation",
    "evaluate": "evaluation",
    "evaluate_shard": "evaluation",
    "join_shards": "evaluation",
    "gather": "tables",
}

__getattr__, __dir__ = on_first_use(__name__, _HOME_OF)
