"""``engine:`` of a YAML file."""

from __future__ import annotations

from typing import Any

import pytest

from gpuherd.batch.options import RunOptions
from gpuherd.engines.options import read_block
from gpuherd.errors import UsageError
from gpuherd.options import option_fields


def test_a_name_or_a_mapping() -> None:
    assert read_block(None) == {}
    assert read_block("slurm") == {"engine": "slurm"}
    told = {"name": "slurm", "time-limit": "4h", "cpus_per_job": 8, "setup": ["module load cuda", "date"]}
    assert read_block(told) == {
        "engine": "slurm",
        "time_limit": 14400.0,
        "cpus_per_job": 8,
        "setup": ("module load cuda", "date"),
    }
    assert read_block({"name": "ray", "ray-resources": "licence=1"})["ray_resources"] == ("licence=1",)


@pytest.mark.parametrize(
    ("told", "refused"),
    [
        ("slurmm", "engine.name: 'slurmm' is not possible; possible: local, slurm, ray"),
        ({"partition": "gpu"}, "it has no name"),
        ({"name": "slurm", "partitions": "gpu"}, "did you mean partition"),
        ({"name": "slurm", "engine": "ray"}, "engine.engine is no option"),
        ({"name": "slurm", "time-limit": "soon"}, "engine.time-limit: "),
        ({"name": "slurm", "cpus-per-job": 0}, "engine.cpus-per-job: '0' is not a whole number above 0"),
        ({"name": "slurm", "partition": {"a": 1}}, "engine.partition: "),
        ({"name": "slurm", "partition": True}, "engine.partition: True should be a number or a text"),
        (True, "engine.name: "),
        ([], "engine.name: "),
    ],
)
def test_what_is_wrong_is_told_with_its_key(told: Any, refused: str) -> None:
    with pytest.raises(UsageError, match=refused):
        read_block(told)


def test_a_command_without_an_option_refuses_it() -> None:
    with pytest.raises(UsageError, match=r"engine\.array-limit is no option"):
        read_block({"name": "slurm", "array-limit": 4}, {each.name for each, _ in option_fields(RunOptions)})
