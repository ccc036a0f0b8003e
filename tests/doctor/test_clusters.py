"""What the doctor says of SLURM, Ray, and the folder that nodes are to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuherd.checks import Status
from gpuherd.doctor import checks
from gpuherd.engines.ray import cluster as ray
from gpuherd.engines.slurm import site
from gpuherd.engines.slurm.commands import SLURM
from gpuherd.jobs import lock as one_host

CONFIG = "ClusterName             = lab\nSLURM_VERSION           = 22.05.8\nAccountingStorageType   = {}\n"


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH on which nothing is but what a test puts there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return tmp_path


def test_without_slurm_and_without_being_asked_it_is_one_line_and_no_problem(programs: Path) -> None:
    assert checks.engines_here().status is Status.SKIP
    for name in SLURM.programs:
        program(programs, name, "")
    found = checks.engines_here()
    assert found.status is Status.SKIP and "SLURM's programs" in found.detail
    assert found.remedy == "gpuherd doctor --engine slurm looks at it"


def test_asked_for_and_not_there(programs: Path) -> None:
    (found,) = site.find_slurm()
    assert found.status is Status.FAIL
    assert found.detail == "not here: sbatch, squeue, scontrol, sinfo, scancel"
    assert found.remedy is not None and "scontrol is not here" in found.remedy


def test_some_of_it_there(programs: Path) -> None:
    program(programs, "scontrol", f"echo '{CONFIG.format('none')}'")
    (found,) = site.find_slurm()
    assert (found.status, found.detail) == (Status.FAIL, "not here: sbatch, squeue, sinfo, scancel")


def test_a_controller_that_is_away(programs: Path) -> None:
    for name in SLURM.programs:
        program(programs, name, "echo 'slurm_load_ctl_conf error: Unable to contact slurm controller' >&2; exit 1")
    (found,) = site.find_slurm()
    assert found.status is Status.FAIL and "Unable to contact slurm controller" in found.detail


def test_a_cluster_that_is_well(programs: Path) -> None:
    for name in SLURM.programs:
        program(programs, name, "")
    program(programs, "scontrol", f"echo '{CONFIG.format('accounting_storage/slurmdbd')}'")
    nodes, listed = (
        "n1|gpu|idle|16|8000|gpu:a100:8\\nn2|cpu|idle|16|8000|(null)\\n",
        "gpu*|up|infinite\\ncpu|down|1:00\\n",
    )
    program(programs, "sinfo", f'case "$*" in *--Node*) printf "{nodes}";; *) printf "{listed}";; esac')
    found = site.find_slurm()
    assert [(each.name, each.status) for each in found] == [
        ("SLURM", Status.OK),
        ("SLURM accounting", Status.OK),
        ("SLURM partitions", Status.OK),
    ]
    assert found[0].detail == "cluster lab, SLURM 22.05.8; its controller answers"
    assert found[2].detail == "gpu (default): 1 node, 8 a100; cpu (down): 1 node, no GPUs"


def test_accounting_that_is_off_is_a_warning() -> None:
    assert site.check_accounting(CONFIG.format("accounting_storage/none")).status is Status.WARN


def partition(name: str, *, default: bool = False, gpus: int = 0) -> site.Partition:
    node = site.SlurmNode(name="n1", state="idle", cpus=1, memory_mb=1, gpus={"": gpus} if gpus else {})
    return site.Partition(name=name, state="up", default=default, max_time_s=None, nodes=(node,))


def test_partitions_that_will_not_do() -> None:
    assert site.check_partitions({}).status is Status.FAIL
    without = site.check_partitions({"a": partition("a", default=True)})
    assert without.status is Status.WARN and "no node has a GPU that SLURM knows" in without.detail
    unnamed = site.check_partitions({"a": partition("a", gpus=4)})
    assert (unnamed.status, unnamed.remedy) == (Status.WARN, "name one with --partition")
    many = site.check_partitions({f"p{n}": partition(f"p{n}", default=not n, gpus=1) for n in range(20)})
    assert many.status is Status.OK and many.detail.endswith("p11: 1 node, 1 GPU and 8 more")


@pytest.mark.parametrize(("kind", "status"), [("nfs4", Status.OK), ("ext4", Status.WARN), ("", Status.WARN)])
def test_the_folder(kind: str, status: Status) -> None:
    assert checks.folder_on(Path("/x"), kind, "slurm").status is status


def test_the_folder_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table").write_text("1 0 0:5 / / rw - lustre mds:/x rw\n")
    monkeypatch.setattr(one_host, "_TABLE", tmp_path / "table")
    assert "is on lustre" in checks.folder_on(tmp_path, one_host.kind_of(tmp_path), "ray").detail


def test_ray_that_nobody_answers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "version_of", lambda name: None)
    assert [each.status for each in ray.find_ray(None)] == [Status.FAIL]
    monkeypatch.setattr(ray, "version_of", lambda name: "2.60.0")
    assert ray.find_ray("nonsense")[1].status is Status.FAIL
    for address in ("127.0.0.1:1", "http://127.0.0.1:1"):
        found = ray.find_ray(address)[1]
        assert (found.status, found.detail) == (Status.FAIL, f"nothing answers at {address}")


def test_a_ray_cluster() -> None:
    well = ray.ray_cluster("n1:6379", {"nodes": 2, "gpus": 8.0, "cpus": 64.0}, None)
    assert (well.status, well.detail) == (Status.OK, "n1:6379: 2 nodes, 8 GPUs, 64 cores")
    assert ray.ray_cluster("n1:6379", {"nodes": 1, "gpus": 0.0, "cpus": 4.0}, None).status is Status.WARN
    assert ray.ray_cluster("n1:6379", {"error": "versions differ"}, None).status is Status.FAIL
    assert ray.ray_cluster("n1:6379", {}, "no answer within 60 s").status is Status.FAIL


def test_a_queue_that_other_machines_may_see_is_told() -> None:
    assert [each.status for each in checks.queues_on(Path("/x"), "nfs4")] == [Status.WARN]
    assert checks.queues_on(Path("/x"), "xfs") == checks.queues_on(Path("/x"), "") == []
