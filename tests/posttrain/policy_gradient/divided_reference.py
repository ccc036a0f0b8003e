"""One of several processes that divide a reference: what test_reference starts by torchrun with a model and a file.

The main process writes what all of them found into the file, as JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tests.posttrain.algos.training_work import work
from tests.posttrain.policy_gradient.rollouts import MIXED as ROLLOUTS

from gpuherd.posttrain.engine import strategies
from gpuherd.posttrain.engine.dist_env import DistEnv, leave
from gpuherd.posttrain.engine.options import Sharding, StepOptions, Strategy
from gpuherd.posttrain.policy_gradient.policy import Reference, reference_of
from gpuherd.posttrain.rollout.loading import load_frozen
from gpuherd.posttrain.types import Precision

FLOAT32, MIXED = Precision("float32"), Precision("float32", "bfloat16")


def local_bytes(module: Any) -> int:
    """Bytes of the weights that this process holds."""
    return sum((each.to_local() if hasattr(each, "to_local") else each).nbytes for each in module.parameters())


def log_probs(reference: Reference, mine: Any, precision: Precision) -> Any:
    """As a training has them computed, two rollouts a pass."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision.amp_dtype is not None):
        return reference.log_probs(mine, 1.0, 2)


def compared(model: Path, precision: Precision, sharding: Sharding, world: DistEnv) -> dict[str, Any]:
    """A divided reference beside a whole one."""

    def told(steps: StepOptions) -> Any:
        return work(model, Path("nowhere"), precision=precision, steps=steps)

    fsdp = StepOptions(strategy=Strategy.FSDP, fsdp_sharding_strategy=sharding)
    whole, divided = (reference_of(told(each), None, world) for each in (StepOptions(strategy=Strategy.DDP), fsdp))
    # The same with rows as wide as those of the checkpoint.
    wide = load_frozen(str(model), precision, "cpu", sharded=True).module.requires_grad_(False)
    amp = None if precision.amp_dtype is None else torch.bfloat16
    strategies.distributed(wide, StepOptions(strategy=Strategy.FSDP), world, amp, None, all_used=True)
    found: dict[str, Any] = {"differ": [], "as wide": True}
    for few in (ROLLOUTS[:1], ()):  # other processes have fewer rollouts, or none
        mine = ROLLOUTS if world.is_main else few
        ours, theirs = log_probs(divided, mine, precision), log_probs(whole, mine, precision)
        flat = [
            (one, other) for mine, its in zip(ours, theirs, strict=True) for one, other in zip(mine, its, strict=True)
        ]
        found["differ"] += [abs(one - other) for one, other in flat]
        found["as wide"] &= ours == log_probs(Reference(wide, False, world, divided=True), mine, precision)
    return {**found, "bytes": local_bytes(divided.module), "whole": local_bytes(whole.module)}


def main(model: Path, path: Path) -> None:
    """All of it."""
    torch.set_num_threads(1)
    with DistEnv.from_environment("cpu") as world:
        told = {
            f"{precision.amp_dtype} {sharding}": world.gather(compared(model, precision, sharding, world))
            for precision in (FLOAT32, MIXED)
            for sharding in (Sharding.FULL_SHARD, Sharding.SHARD_GRAD_OP)
        }
        if world.is_main:
            path.write_text(json.dumps(told))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    leave(0)
