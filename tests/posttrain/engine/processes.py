"""One of several processes that train the same net by every strategy: what test_processes starts by torchrun.

``python -m torch.distributed.run --nproc-per-node=2 processes.py FOLDER``: the main process leaves ``told.json``. With
``resumed`` after the folder they only compare a training that went on with one that was never stopped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.posttrain.engine.nets import held, items, loss_of, net, trained, trainee, weight

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.checkpoints import Checkpoints
from gpuherd.posttrain.engine.curves import Curves
from gpuherd.posttrain.engine.dist_env import DistEnv, leave
from gpuherd.posttrain.engine.options import OptimiserOptions, Sharding, StepOptions, Strategy
from gpuherd.posttrain.engine.train_engine import TrainEngine

ADAMW = OptimiserOptions(0.05, weight_decay=0.1, max_grad_norm=0.5)
BATCH = 7  # an odd number: shares are uneven
STRATEGIES = {
    "ddp": StepOptions(2, strategy=Strategy.DDP),
    "ddp dynamic": StepOptions(2, strategy=Strategy.DDP, dynamic_batch_size=True),
    "no_shard": StepOptions(2, strategy=Strategy.FSDP, fsdp_sharding_strategy=Sharding.NO_SHARD),
    "full_shard": StepOptions(2, strategy=Strategy.FSDP),
    "shard_grad_op": StepOptions(2, strategy=Strategy.FSDP, fsdp_sharding_strategy=Sharding.SHARD_GRAD_OP),
}


def made(world: DistEnv, steps: StepOptions, seed: int = 0, **more: Any) -> TrainEngine:
    """A trainee of the net of this seed."""
    return trainee(net(seed), world=world, optimiser=ADAMW, steps=steps, **more)


def by(world: DistEnv, steps: StepOptions, folder: Path) -> dict[str, Any]:
    """Six steps with a checkpoint after the third; the last three again from there; and what else there is to ask."""
    one = made(world, steps)
    losses = trained(one, range(3), BATCH)
    Checkpoints(folder, world).save(3, one, {"place": 3})
    state = held(one)
    losses += trained(one, range(3, 6), BATCH)
    weights = {name: tensor.tolist() for name, tensor in one.full_state().items()}

    again = made(world, steps, seed=5)
    restored = Checkpoints(folder, world).restore(again)
    assert restored is not None and restored.extra == {"place": 3}
    resumed = trained(again, range(3, 6), BATCH)

    with one.gathered(), torch.no_grad():
        # The main process alone asks the model once more: nobody waits for it.
        answers = [one.plain(torch.ones(2, 6)) for _ in range(2 if world.is_main else 1)]
    after = trained(one, range(6, 7), BATCH)
    lonely = one.step(items(1) if world.rank == world.size - 1 else [], loss_of(one.module), weight)
    return {
        "losses": losses,
        "state": state,
        "weights": weights,
        "resumed": resumed,
        "answer": answers[0].tolist(),
        "after": after,
        "lonely": [lonely.loss, lonely.items],
    }


def resumed(world: DistEnv, steps: StepOptions, folder: Path) -> list[str]:
    """The weights in which a training that went on from its third step differs from one that was never stopped.

    Of many layers and several passes a step: a sum of few numbers is the same in any order.
    """
    batch = 4 * world.size - 1
    one = trainee(net(blocks=12), world=world, optimiser=ADAMW, steps=steps)
    trained(one, range(3), batch)
    Checkpoints(folder, world).save(3, one, {})
    trained(one, range(3, 6), batch)
    again = trainee(net(5, blocks=12), world=world, optimiser=ADAMW, steps=steps)
    Checkpoints(folder, world).restore(again)
    trained(again, range(3, 6), batch)
    left = again.full_state()
    return [name for name, weight in one.full_state().items() if name != "count" and not weight.equal(left[name])]


def mixed(world: DistEnv, steps: StepOptions) -> list[float]:
    """Steps under autocast."""
    return trained(made(world, steps, amp_dtype="bfloat16"), range(6), BATCH)


def half(world: DistEnv, steps: StepOptions) -> dict[str, Any]:
    """Steps in float16, of which one overflows, in the last process alone."""
    one = made(world, steps, amp_dtype="float16")
    losses = trained(one, range(3), BATCH)
    scale = one.scaler.get_scale()
    lost = world.rank == world.size - 1
    figures = one.step(
        world.share(items(BATCH)), lambda batch: loss_of(one.module)(batch) * (1e34 if lost else 1.0), weight
    )
    lowered = world.gather(one.scaler.get_scale() / scale)
    return {"losses": [*losses, *trained(one, range(3, 6), BATCH)], "skipped": figures.skipped, "lowered": lowered}


def main(folder: Path) -> None:
    """Does all of it."""
    torch.set_num_threads(1)
    told: dict[str, Any] = {"meetings": []}
    for number in range(20):  # groups one after the other, in the same processes
        with DistEnv.from_environment("cpu") as world:
            told["meetings"].append(world.gather([number, world.rank]))
    with DistEnv.from_environment("cpu") as world:
        for name, steps in STRATEGIES.items():
            told[name] = by(world, steps, folder / name.replace(" ", "-"))
        told["mixed"] = {name: mixed(world, STRATEGIES[name]) for name in ("ddp", "full_shard")}
        told["half"] = {name: half(world, STRATEGIES[name]) for name in ("ddp", "full_shard")}
        # What one process wrote, another number of processes goes on with, by another strategy.
        sharded = made(world, STRATEGIES["full_shard"], seed=5)
        Checkpoints(folder / "single", world).restore(sharded)
        told["from single"] = {"state": held(sharded), "seeds": world.gather(torch.initial_seed())}
        told["from single"]["losses"] = trained(sharded, range(3, 6), BATCH)
        # From one strategy to another, and from the files of the version before.
        for name, other in (("ddp", "full_shard"), ("full_shard", "ddp"), ("former", "full_shard")):
            moved = made(world, STRATEGIES[other], seed=6)
            Checkpoints(folder / name, world).restore(moved)
            told[f"from {name}"] = {"state": held(moved), "losses": trained(moved, range(3, 6), BATCH)}
        told["unwritable"] = _refused(world, folder)
        with Curves(folder, world) as curves:
            curves.log(1, {"loss": 0.5})
        told["world"] = [world.size, world.gather(world.rank), world.broadcast(world.rank), world.any(world.rank == 1)]
        if world.is_main:
            (folder / "told.json").write_text(json.dumps(told))


def main_resumed(folder: Path) -> None:
    """By each strategy, what differs."""
    torch.set_num_threads(1)
    with DistEnv.from_environment("cpu") as world:
        differ = {name: resumed(world, steps, folder / name) for name, steps in STRATEGIES.items()}
        if world.is_main:
            (folder / "told.json").write_text(json.dumps(differ))


def _refused(world: DistEnv, folder: Path) -> list[str]:
    """What each process says of a checkpoint that the last one can't load, and of a strategy that can't be."""
    found = []
    try:
        made(world, StepOptions())
    except UsageError as problem:
        found.append(str(problem))
    Checkpoints(folder / "other", world, identity={"model": "a"}).save(1, made(world, STRATEGIES["ddp"]), {})
    try:
        Checkpoints(folder / "other", world, identity={"model": "b"}).restore(made(world, STRATEGIES["ddp"]))
    except UsageError as problem:
        found.append(str(problem))
    return world.gather(found)[-1]


if __name__ == "__main__":
    (main_resumed if sys.argv[2:] == ["resumed"] else main)(Path(sys.argv[1]))
    leave(0)
