"""What a site has, as sinfo and scontrol printed it, and what can never be had there."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.engines.base import Placement
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.slurm.site import (
    Site,
    allocation,
    chosen,
    gpus_of,
    impossible,
    names,
    partitions,
    seconds_of,
    settings,
)
from gpuherd.errors import UsageError

NODES = """\
a1|long|idle|64|512000|gpu:a100:4(S:0-1),shard:8
a2|long|down*|64|512000|gpu:a100:4(S:0-1)
a1|brief|idle|64|512000|gpu:a100:4(S:0-1)
b1|brief|mixed|32|128000|gpu:v100:8,gpu:a100:1
c1|cpu|allocated|128|1024000+|(null)
nonsense
"""
PARTITIONS = """\
long|up|infinite
brief*|up|4:00:00
cpu|up|2-00:00:00
old|inact|infinite
"""
SITE = Site(partitions=partitions(NODES, PARTITIONS), accounts=frozenset({"lab"}), qos=frozenset({"normal"}))


def why(partition: str | None, placement: Placement, gpu_type: str | None = None) -> str | None:
    options = EngineOptions(engine="slurm", gpu_type=gpu_type)
    return impossible(chosen(SITE, options, partition), [placement], gpu_type).get(placement)


def test_partitions_and_nodes() -> None:
    assert set(SITE.partitions) == {"long", "brief", "cpu", "old"}
    assert SITE.partitions["brief"].default
    assert [node.name for node in SITE.partitions["brief"].nodes] == ["a1", "b1"]
    assert SITE.partitions["long"].nodes[0].gpus == {"a100": 4}
    assert SITE.partitions["cpu"].nodes[0].memory_mb == 1024000
    assert SITE.partitions["brief"].max_time_s == 4 * 3600


@pytest.mark.parametrize(
    ("partition", "placement", "gpu_type"),
    [
        (None, Placement(gpus=9), None),
        ("long", Placement(gpus=4, nodes=2, cpus=64, memory_mb=512000, time_s=1e9), "a100"),
        ("long,brief", Placement(gpus=4, time_s=5 * 3600), None),
        ("cpu", Placement(gpus=0, cpus=128), None),
    ],
)
def test_what_can_be_had(partition: str | None, placement: Placement, gpu_type: str | None) -> None:
    assert why(partition, placement, gpu_type) is None


@pytest.mark.parametrize(
    ("partition", "placement", "gpu_type", "said"),
    [
        ("long", Placement(gpus=5), None, "no node of SLURM's partition long has 5 GPUs: the most is 4 (a1)"),
        (None, Placement(gpus=5), "a100", "has 5 GPUs of type a100: the most is 4 (a1)"),
        (None, Placement(gpus=9, cpus=64), None, "partition brief has all at once: 9 GPUs, 64 CPUs"),
        ("long", Placement(gpus=1, nodes=3), None, "3 nodes are asked for, and SLURM's partition long has 2 that fit"),
        (
            None,
            Placement(gpus=1, time_s=5 * 3600),
            None,
            "300 minutes are asked for, and SLURM's partition brief grants",
        ),
        (
            "cpu",
            Placement(gpus=1),
            None,
            "no node of SLURM's partition cpu has GPUs; name another --partition, or ask for no GPU",
        ),
    ],
)
def test_what_can_never_be_had(partition: str | None, placement: Placement, gpu_type: str | None, said: str) -> None:
    assert said in (why(partition, placement, gpu_type) or "")


def test_of_several_partitions_each_must_be_unable() -> None:
    reason = why("long,cpu", Placement(gpus=5))
    assert reason is not None
    assert "partition long" in reason
    assert "partition cpu" in reason


@pytest.mark.parametrize(
    ("options", "named", "said"),
    [
        ({}, "breif", "did you mean brief"),
        ({}, "old", r"old \(inact\) takes no jobs now; others that do: brief, cpu, long"),
        ({"account": "lob"}, None, "did you mean lab"),
        ({"qos": "urgent"}, None, "no qos urgent in SLURM. There are: normal"),
        ({"gpu_type": "v100"}, "long", "no GPU of the type v100 in SLURM; did you mean a100"),
    ],
)
def test_what_nobody_knows(options: dict[str, str], named: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        chosen(SITE, EngineOptions(engine="slurm", **options), named)  # type: ignore[arg-type]


def test_accounts_that_are_not_known_are_not_checked() -> None:
    free = Site(partitions=SITE.partitions)
    assert chosen(free, EngineOptions(engine="slurm", account="any", qos="any"), None)


def test_settings_of_the_controller() -> None:
    text = "MaxArraySize            = 64\nAccountingStorageType   = accounting_storage/slurmdbd\n"
    found = settings(text + "AccountingStorageEnforce = associations,limits\n")
    assert found.array_size == 64
    assert found.accounting
    assert "associations" in found.enforced
    bare = settings("AccountingStorageType = accounting_storage/none\nAccountingStorageEnforce = none")
    assert (bare.array_size, bare.accounting, bare.remembers_s) == (1001, False, 300)
    assert settings("MinJobAge               = 20 sec").remembers_s == 20
    assert settings("MinJobAge               = 0 sec").remembers_s == math.inf  # it forgets none


def test_names_are_the_first_fields() -> None:
    assert names("lab|root|\ntheory|\n\n") == {"lab", "theory"}


@given(st.text(), st.text())
def test_nothing_that_is_printed_breaks_it(nodes: str, listed: str) -> None:
    for each in partitions(nodes + f"\na|{nodes}|x|1|1|{listed}", listed + f"\n{nodes}|up|{listed}").values():
        assert each.name.isprintable()
    gpus_of(nodes)
    seconds_of(nodes)
    settings(nodes)


JOB = """\
JobId=105 JobName=mine
   UserId=ann(7) GroupId=ann(7) MCS_label=N/A
   Priority=4294901655 Nice=0 Account=lab QOS=short
   JobState=RUNNING Reason=None Dependency=(null)
   RunTime=00:10:00 TimeLimit=01:00:00 TimeMin=N/A
   Partition=main AllocNode:Sid=login:6829
   NumNodes=3 NumCPUs=20 NumTasks=3 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   JOB_GRES=gpu:a100:8
     Nodes=n[1-2] CPU_IDs=0-3,8-11 Mem=8000 GRES=gpu:a100:4(IDX:0-3)
     Nodes=n3 CPU_IDs=5-6 Mem=500 GRES=
"""


def test_a_job_as_a_place_for_steps() -> None:
    found = allocation(JOB)
    assert found is not None and (found.job, found.left_s) == ("105", 3000.0)
    assert [(node.name, node.cpus, node.memory_mb, dict(node.gpus)) for node in found.nodes] == [
        ("n1", 8, 8000, {"a100": 4}),
        ("n2", 8, 8000, {"a100": 4}),
        ("n3", 2, 500, {}),
    ]
    assert allocation(JOB.replace("RUNNING", "COMPLETED")) is None and allocation("") is None


@pytest.mark.parametrize(
    ("asked", "said", "lacks"),
    [
        (Placement(gpus=4, nodes=2, cpus=8, memory_mb=8000, time_s=3000.0), {}, None),
        (Placement(gpus=1), {"partition": "main", "account": "lab", "qos": "short", "gpu_type": "a100"}, None),
        (Placement(gpus=1, nodes=3), {}, "too few of its nodes"),
        (Placement(gpus=0, nodes=4), {}, "4 nodes are asked for, and it has 3"),
        (Placement(gpus=5), {}, "n1 gives it 4 GPUs, 8 CPUs and 8000 MB"),
        (Placement(gpus=1, tasks=9), {}, "too few"),
        (Placement(gpus=1), {"gpu_type": "h100"}, "0 GPUs of type h100"),
        (Placement(gpus=1, time_s=3600.0), {}, "60 minutes are asked for, and 50 are left"),
        (Placement(gpus=1), {"partition": "brief"}, "--partition brief is not the job's"),
        (Placement(gpus=1), {"constraint": "ib"}, "--constraint ib is not the job's"),
    ],
)
def test_what_fits_in_a_job(asked: Placement, said: dict[str, Any], lacks: str | None) -> None:
    found = allocation(JOB)
    assert found is not None
    told = found.lacks(asked, EngineOptions(engine="slurm", **said))
    assert told is None if lacks is None else told is not None and lacks in told


def test_a_step_gets_what_goes_with_its_gpus() -> None:
    found = allocation(JOB)
    assert found is not None
    assert found.share(Placement(gpus=1), None) == Placement(gpus=1, cpus=2, memory_mb=2000)
    assert found.share(Placement(gpus=4, tasks=3), None) == Placement(gpus=4, tasks=3, cpus=6, memory_mb=8000)
    assert found.share(Placement(gpus=0), None) == Placement(gpus=0, cpus=1, memory_mb=250)
    own = Placement(gpus=2, cpus=1, memory_mb=10)
    assert found.share(own, None) == own
