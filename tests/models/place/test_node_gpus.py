"""The GPUs of a cluster's node, as the user or the cluster says."""

from __future__ import annotations

import pytest

from gpuherd.engines.options import EngineOptions
from gpuherd.errors import UsageError
from gpuherd.models.place.inventory import gpus_of_nodes, node_gpus


def test_the_user_says_it() -> None:
    cards = node_gpus(EngineOptions(engine="ray", node_gpus="4xA100-80GB"))
    assert [card.name for card in cards] == ["A100-80"] * 4
    with pytest.raises(UsageError, match="--node-gpus '4xA99'"):
        node_gpus(EngineOptions(engine="slurm", node_gpus="4xA99"))


def test_the_largest_node_of_the_one_type_counts() -> None:
    cards = gpus_of_nodes([{"nvidia_h100_80gb_hbm3": 4}, {}, {"nvidia_h100_80gb_hbm3": 8}], "SLURM")
    assert [card.name for card in cards] == ["H100"] * 8


@pytest.mark.parametrize(
    ("nodes", "refused"),
    [
        ([{}, {}], "SLURM tells of no GPUs there"),
        ([{"a30": 2}, {"l40s": 2}], r"several types \(a30, l40s\); choose one by --gpu-type"),
        ([{"": 8}], "does not tell of what type its GPUs are"),
        ([{"a100": 8}], "'a100': how much memory they have is not known \\(is it A100-40 or A100-80\\?\\)"),
        ([{"fake": 8}], "'fake': how much memory they have is not known"),
    ],
)
def test_what_is_not_known_is_asked_for(nodes: list[dict[str, int]], refused: str) -> None:
    with pytest.raises(UsageError, match=f"{refused}.*--node-gpus 4xA100-80GB"):
        gpus_of_nodes(nodes, "SLURM", "--gpu-type")


def test_ray_does_not_tell() -> None:
    with pytest.raises(UsageError, match=r"--engine ray doesn't tell what GPUs a node has.*--node-gpus"):
        node_gpus(EngineOptions(engine="ray"))
