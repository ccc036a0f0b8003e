"""Who takes part in a training."""

from __future__ import annotations

import pytest
import torch

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.dist_env import DistEnv, Place, place_told

TOLD = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}


def test_the_place_is_what_torchrun_tells() -> None:
    assert place_told(TOLD) == Place(1, 3, 0)
    assert place_told({"LOCAL_RANK": "1", "PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [({"MASTER_PORT": ""}, "MASTER_PORT"), ({"RANK": "two"}, "whole numbers"), ({"RANK": "3"}, "rank 3")],
)
def test_half_a_place_is_refused(change: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        place_told(TOLD | change)


def test_without_torchrun_it_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TOLD:
        monkeypatch.delenv(name, raising=False)
    with DistEnv.from_environment("cpu") as world:
        assert (world.rank, world.size, world.device, world.backend, world.is_main) == (0, 1, "cpu", None, True)


def test_a_single_process_agrees_with_itself() -> None:
    world = DistEnv.single()
    value = torch.tensor([1.0, 2.0])
    assert torch.equal(world.sum(value), value) and world.sum(value) is not value
    assert (world.total(2.5), world.any(True), world.any(False)) == (2.5, True, False)
    assert (world.gather("a"), world.broadcast("a"), world.share([1, 2, 3])) == (["a"], "a", [1, 2, 3])
    world.barrier()


def test_shares_are_every_so_many_items() -> None:
    shares = [DistEnv(rank, 3, rank, "cpu", "gloo").share(range(8)) for rank in range(3)]
    assert [list(share) for share in shares] == [[0, 3, 6], [1, 4, 7], [2, 5]]
