"""The files of a test cluster: slurm.conf and what stands beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Root has two accounts; nobody has one, and may end jobs of others, as an administrator does.
_ACCOUNTS = """\
Cluster - 'test'
Parent - 'root'
Account - 'lab'
Account - 'theory'
Parent - 'lab'
User - 'root'
User - 'nobody':AdminLevel='Operator'
Parent - 'theory'
User - 'root'
"""
_SYSTEM_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a cluster is to be.

    Attributes:
        nodes, gpus: how many nodes, and (fake) GPUs on each.
        cpus, memory_mb: what each node says that it has.
        apart: each node in a network of its own, joined by a bridge.
        accounting: with slurmdbd; else ``sacct`` says that it is switched off.
        slurmd_timeout_s: after which a silent node is lost.
        array_size: MaxArraySize.
        min_job_age_s: how long the controller remembers a job that has ended.
        more: further lines of slurm.conf.
    """

    nodes: int = 1
    gpus: int = 8
    cpus: int = 64
    memory_mb: int = 64000
    apart: bool = False
    accounting: bool = True
    slurmd_timeout_s: int = 300
    array_size: int = 1001
    min_job_age_s: int = 300
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a cluster's parts are. ``network``: the first three numbers of the nodes' addresses, None where all are on
    this machine's own.
    """

    folder: Path
    plan: Plan
    ports: Mapping[str, int]
    network: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes."""
        return tuple(f"n{number}" for number in range(1, self.plan.nodes + 1))

    def address(self, node: str) -> str:
        """The IP address of a node, or of the controller ("")."""
        if self.network is None:
            return "127.0.0.1"
        return f"{self.network}.{node.removeprefix('n') if node else 254}"

    def write(self) -> None:
        """Writes all of them."""
        etc = self.folder / "etc"
        names = ",".join(self.names)
        (etc / "slurm.conf").write_text("\n".join([*self._controller(), *self._accounting(), *self._nodes()]) + "\n")
        devices = f"{self.folder}/dev/nvidia[0-{self.plan.gpus - 1}]"
        (etc / "gres.conf").write_text(f"NodeName={names} Name=gpu Type=fake File={devices}\n")
        (etc / "plugstack.conf").touch()
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")
        hosts = ["127.0.0.1 localhost", f"{self.address('')} {os.uname().nodename}" if self.network else ""]
        hosts += [f"{self.address(node)} {node}" for node in self.names]
        (etc / "hosts").write_text("\n".join(hosts) + "\n")
        if self.plan.accounting:
            (etc / "accounts").write_text(_ACCOUNTS)
            (etc / "slurmdbd.conf").touch(0o600)
            (etc / "slurmdbd.conf").write_text("\n".join(self._database()) + "\n")
            # The one table of the database's own that slurmdbd needs, for its stored procedures.
            mark = "CREATE TABLE IF NOT EXISTS proc "
            tables = [line for line in _SYSTEM_TABLES.read_text().splitlines() if line.startswith(mark)]
            (etc / "tables.sql").write_text(
                "CREATE DATABASE IF NOT EXISTS mysql;\nUSE mysql;\n" + "\n".join(tables) + "\n"
            )

    def _controller(self) -> list[str]:
        folder, plan = self.folder, self.plan
        return [
            "ClusterName=test",
            f"SlurmctldHost={os.uname().nodename}({self.address('')})",
            f"SlurmctldPort={self.ports['slurmctld']}",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/run/munge.sock",
            "SlurmUser=root",
            "SlurmdUser=root",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/run/slurmctld.pid",
            f"SlurmdPidFile={folder}/run/%n.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld.log",
            f"SlurmdLogFile={folder}/log/%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            "DefMemPerCPU=100",
            "GresTypes=gpu",
            "SlurmdParameters=config_overrides",
            "ReturnToService=2",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "PriorityType=priority/basic",
            "SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=10000",
            f"MaxArraySize={plan.array_size}",
            f"MinJobAge={plan.min_job_age_s}",
            f"SlurmdTimeout={plan.slurmd_timeout_s}",
            "KillWait=2",
            "MessageTimeout=10",
            "MpiDefault=none",
            f"PlugStackConfig={folder}/etc/plugstack.conf",
            *plan.more,
        ]

    def _accounting(self) -> list[str]:
        if not self.plan.accounting:
            return []
        return [
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=127.0.0.1",
            f"AccountingStoragePort={self.ports['slurmdbd']}",
            f"AccountingStoragePass={self.folder}/run/munge.sock",
            "AccountingStorageEnforce=associations,limits,qos",
            "AccountingStorageTRES=gres/gpu",
        ]

    def _database(self) -> list[str]:
        return [
            "AuthType=auth/munge",
            f"AuthInfo=socket={self.folder}/run/munge.sock",
            f"DbdHost={os.uname().nodename}",
            "DbdAddr=127.0.0.1",
            f"DbdPort={self.ports['slurmdbd']}",
            "SlurmUser=root",
            "StorageType=accounting_storage/mysql",
            "StorageHost=127.0.0.1",
            f"StoragePort={self.ports['database']}",
            "StorageUser=root",
            "StorageLoc=accounting",
            f"LogFile={self.folder}/log/slurmdbd.log",
            f"PidFile={self.folder}/run/slurmdbd.pid",
        ]

    def _nodes(self) -> list[str]:
        plan = self.plan
        lines = [
            f"NodeName={node} NodeHostname={node} NodeAddr={self.address(node)} Port={self.ports[node]} "
            f"CPUs={plan.cpus} RealMemory={plan.memory_mb} Gres=gpu:fake:{plan.gpus} State=UNKNOWN"
            for node in self.names
        ]
        everywhere = f"Nodes={','.join(self.names)}"
        return [
            *lines,
            f"PartitionName=main {everywhere} Default=YES PriorityTier=10 MaxTime=INFINITE",
            f"PartitionName=scavenge {everywhere} PriorityTier=1 MaxTime=1-0",
            f"PartitionName=urgent {everywhere} PriorityTier=50 PreemptMode=OFF",
            f"PartitionName=closed {everywhere} State=DRAIN",
            f"PartitionName=brief {everywhere} PriorityTier=10 MaxTime=0:10:00 GraceTime=2",
        ]
