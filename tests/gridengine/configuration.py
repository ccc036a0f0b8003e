"""The files of a test cluster: what ``sge_qmaster`` reads before it starts, in classic spooling's plain text."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Debian's folders; a cluster links to them from its own SGE_ROOT.
PROGRAMS = Path("/usr/lib/gridengine")
SHARED = Path("/usr/share/gridengine")
CELL = "default"
_COMPLEXES = SHARED / "util" / "resources" / "centry"
_USERSETS = SHARED / "util" / "resources" / "usersets"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a cluster is to be.

    Attributes:
        nodes, gpus: how many nodes, and how many of the consumable ``gpu`` each has.
        slots: of the queue ``main`` on each node.
        gpu_consumable: ``YES`` (requested by slot) or ``JOB`` (requested once for a job).
        assigns: a prolog of the site tells each job which GPUs it has, in SGE_GPU.
        max_aj_tasks: the longest array.
        max_u_jobs: how many jobs a user may have, 0 for any number.
        notify_s: seconds between the warning signal and SIGKILL (``-notify``).
        max_unheard: after which a silent node is unknown.
    """

    nodes: int = 1
    gpus: int = 8
    slots: int = 64
    gpu_consumable: str = "YES"
    assigns: bool = True
    max_aj_tasks: int = 75000
    max_u_jobs: int = 0
    notify_s: int = 20
    max_unheard: str = "00:05:00"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a cluster's parts are. ``network``: the first three numbers of the addresses of the nodes, which have
    networks of their own; None for a single node, which is this machine.
    """

    folder: Path
    plan: Plan
    ports: Mapping[str, int]
    network: str | None

    @property
    def master(self) -> str:
        """The host of ``sge_qmaster``: this machine, by the name that its clients resolve."""
        return os.uname().nodename

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes."""
        if self.network is None:
            return (self.master,)
        return tuple(f"n{number}" for number in range(1, self.plan.nodes + 1))

    def address(self, node: str) -> str:
        """The IP address of a node, or of the master."""
        if self.network is None:
            return "127.0.0.1"
        return f"{self.network}.{254 if node == self.master else int(node.removeprefix('n'))}"

    @property
    def environment(self) -> dict[str, str]:
        """What Grid Engine's programs need."""
        return {
            "SGE_ROOT": str(self.folder),
            "SGE_CELL": CELL,
            "SGE_QMASTER_PORT": str(self.ports["qmaster"]),
            "SGE_EXECD_PORT": str(self.ports["execd"]),
        }

    def write(self) -> None:
        """Writes all of them, and fills the spool folder by Grid Engine's own programs."""
        common, spool = self.folder / CELL / "common", self.folder / "spool"
        for each in (common, spool / "qmaster" / "job_scripts", spool / "execd", self.folder / "bin"):
            each.mkdir(parents=True)
        (self.folder / "bin" / "lx-amd64").symlink_to(PROGRAMS)
        (self.folder / "utilbin").mkdir()
        (self.folder / "utilbin" / "lx-amd64").symlink_to(PROGRAMS)
        (self.folder / "util").symlink_to(SHARED / "util")
        spooling = f"{common};{spool / 'qmaster'}"
        (common / "bootstrap").write_text(_table(self._bootstrap(spooling)))
        (common / "act_qmaster").write_text(f"{self.master}\n")
        (common / "cluster_name").write_text("test\n")
        (common / "accounting").touch()  # else only the first job that ends makes it
        # Clients outside of the cluster's namespaces may find that they are "localhost".
        (common / "host_aliases").write_text(f"{self.master} localhost\n")
        known = [f"{self.address(each)} {each}" for each in dict.fromkeys((self.master, *self.names))]
        loop = {"master": f"127.0.0.1 {self.master} localhost", "node": "127.0.0.1 localhost"}
        for where, first in loop.items():
            lines = known if self.network is None else [first, *known]
            (self.folder / f"hosts.{where}").write_text("\n".join([*lines, "127.0.0.1 localhost"]) + "\n")
        (self.folder / "gpus").mkdir()
        for name, text in (("prolog", _PROLOG), ("epilog", _EPILOG)):
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)
        self._fill(spooling)

    def _fill(self, spooling: str) -> None:
        self._spool("spoolinit", "classic", "libspoolc", spooling, "init")
        templates = self.folder / "templates"
        templates.mkdir()
        (templates / "configuration").write_text(_table(self._configuration()))
        self._spool("spooldefaults.bin", "configuration", str(templates / "configuration"))
        parts: Mapping[str, Mapping[str, Mapping[str, object]]] = {
            "complexes": {"gpu": _complex("gpu", "INT", self.plan.gpu_consumable)},
            "exechosts": {node: self._host(node) for node in self.names},
            "adminhosts": {node: {"hostname": node} for node in {self.master, *self.names}},
            "submithosts": {node: {"hostname": node} for node in {self.master, *self.names}},
            "pes": {name: _parallel(name, rule) for name, rule in _ENVIRONMENTS.items()},
            "projects": {"theory": {"name": "theory", "oticket": 0, "fshare": 0, "acl": "NONE", "xacl": "NONE"}},
            "cqueues": {name: self._queue(name, **more) for name, more in _QUEUES.items()},
        }
        for kind, items in parts.items():
            folder = templates / kind
            folder.mkdir()
            if kind == "complexes":
                for path in _COMPLEXES.iterdir():
                    (folder / path.name).write_bytes(path.read_bytes())
            for name, values in items.items():
                (folder / name).write_text(_table(values))
            if kind == "cqueues":
                break  # they get their instances on the nodes only from a sge_qmaster that runs
            self._spool("spooldefaults.bin", kind, str(folder))
        self._spool("spooldefaults.bin", "usersets", str(_USERSETS))
        self._spool("spooldefaults.bin", "managers", "root")
        (self.folder / CELL / "common" / "sched_configuration").write_text(_table(_scheduler()))

    def _spool(self, program: str, *words: str) -> None:
        environment = {**os.environ, **self.environment, "LD_LIBRARY_PATH": str(PROGRAMS)}
        done = subprocess.run([str(PROGRAMS / program), *words], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{program} {' '.join(words)}: {done.stdout}{done.stderr}")

    def _bootstrap(self, spooling: str) -> dict[str, object]:
        return {
            "admin_user": "none",
            "default_domain": "none",
            "ignore_fqdn": "true",
            "spooling_method": "classic",
            "spooling_lib": "libspoolc",
            "spooling_params": spooling,
            "binary_path": PROGRAMS,
            "qmaster_spool_dir": self.folder / "spool" / "qmaster",
            "security_mode": "none",
            "listener_threads": 2,
            "worker_threads": 2,
            "scheduler_threads": 1,
        }

    def _configuration(self) -> dict[str, object]:
        lines = (SHARED / "default-configuration").read_text().splitlines()
        known: dict[str, object] = {}
        for line in lines:
            name, _, value = line.partition(" ")
            if name and not name.startswith("#"):
                known[name] = value.strip()
        return known | {
            "execd_spool_dir": self.folder / "spool" / "execd",
            "mailer": "/bin/true",
            "prolog": f"{self.folder}/prolog {self.plan.gpu_consumable}" if self.plan.assigns else "none",
            "epilog": f"{self.folder}/epilog" if self.plan.assigns else "none",
            "min_uid": 0,
            "min_gid": 0,
            "load_report_time": "00:00:01",
            "max_unheard": self.plan.max_unheard,
            "max_aj_tasks": self.plan.max_aj_tasks,
            "max_u_jobs": self.plan.max_u_jobs,
            "reporting_params": "accounting=true reporting=false flush_time=00:00:01 accounting_flush_time=00:00:00 "
            "joblog=false sharelog=00:00:00",
            # A site's users can't force a deletion; no group ids are handed out, for containers share the kernel's.
            "execd_params": "ENABLE_ADDGRP_KILL=true PDC_INTERVAL=1",
        }

    def _host(self, node: str) -> dict[str, object]:
        return {
            "hostname": node,
            "load_scaling": "NONE",
            "complex_values": f"gpu={self.plan.gpus},h_vmem=64G",
            "user_lists": "NONE",
            "xuser_lists": "NONE",
            "projects": "NONE",
            "xprojects": "NONE",
            "usage_scaling": "NONE",
            "report_variables": "NONE",
        }

    def _queue(self, name: str, **more: object) -> dict[str, object]:
        plain = (
            "user_lists xuser_lists subordinate_list complex_values projects xprojects calendar prolog epilog "
            "starter_method suspend_method resume_method terminate_method ckpt_list"
        )
        limits = "s_rt h_rt s_cpu h_cpu s_fsize h_fsize s_data h_data s_stack h_stack s_core h_core s_rss h_rss"
        return {
            "qname": name,
            "hostlist": " ".join(self.names),
            "seq_no": 0 if name == "main" else 1,
            "load_thresholds": "NONE",
            "suspend_thresholds": "NONE",
            "nsuspend": 1,
            "suspend_interval": "00:05:00",
            "priority": 0,
            "min_cpu_interval": "00:05:00",
            "processors": "UNDEFINED",
            "qtype": "BATCH INTERACTIVE",
            "pe_list": " ".join(_ENVIRONMENTS),
            "rerun": "FALSE",
            "slots": self.plan.slots,
            "tmpdir": "/tmp",
            "shell": "/bin/sh",
            "shell_start_mode": "unix_behavior",
            "notify": f"00:00:{self.plan.notify_s:02}",
            "owner_list": "NONE",
            "initial_state": "default",
            **dict.fromkeys(limits.split(), "INFINITY"),
            **dict.fromkeys(plain.split(), "NONE"),
            "s_vmem": "INFINITY",
            "h_vmem": "INFINITY",
            **more,
        }


# The site's queues; ``brief`` ends jobs after ten minutes, ``closed`` is switched off when the cluster has started.
_QUEUES: Mapping[str, Mapping[str, object]] = {"main": {}, "brief": {"h_rt": "00:10:00"}, "closed": {"seq_no": 9}}
_ENVIRONMENTS = {"smp": "$pe_slots", "spread1": "1", "spread2": "2", "fill": "$fill_up"}
# As sites do: a prolog takes free GPUs of the node, and tells which in SGE_GPU; an epilog gives them back.
_PROLOG = r"""#!/bin/sh
host=$(hostname)
count=$("$SGE_ROOT/bin/lx-amd64/qstat" -j "$JOB_ID" | sed -n 's/^hard resource_list:.*[ ,]gpu=\([0-9]*\).*/\1/p')
[ "$1" = JOB ] || count=$((${count:-0} * ${NSLOTS:-1}))
found= number=0
while [ "${count:-0}" -gt 0 ] && [ "$number" -lt 64 ]; do
    if mkdir "$SGE_ROOT/gpus/$host.$number" 2>/dev/null; then
        echo "$JOB_ID.$SGE_TASK_ID" >"$SGE_ROOT/gpus/$host.$number/owner"
        found="$found $number"
        count=$((count - 1))
    fi
    number=$((number + 1))
done
echo "SGE_GPU=${found# }" >>"$SGE_JOB_SPOOL_DIR/environment"
"""
_EPILOG = r"""#!/bin/sh
for each in "$SGE_ROOT/gpus/$(hostname)".*; do
    [ "$(cat "$each/owner" 2>/dev/null)" = "$JOB_ID.$SGE_TASK_ID" ] && rm -r "$each"
done
exit 0
"""


def _complex(name: str, kind: str, consumable: str) -> dict[str, object]:
    return {
        "name": name,
        "shortcut": name,
        "type": kind,
        "relop": "<=",
        "requestable": "YES",
        "consumable": consumable,
        "default": 0,
        "urgency": 0,
    }


def _parallel(name: str, rule: str) -> dict[str, object]:
    return {
        "pe_name": name,
        "slots": 999,
        "user_lists": "NONE",
        "xuser_lists": "NONE",
        "start_proc_args": "NONE",
        "stop_proc_args": "NONE",
        "allocation_rule": rule,
        "control_slaves": "TRUE",
        "job_is_first_task": "TRUE",
        "urgency_slots": "min",
        "accounting_summary": "TRUE",
        "qsort_args": "NONE",
    }


def _scheduler() -> dict[str, object]:
    return {
        "algorithm": "default",
        "schedule_interval": "0:0:1",
        "maxujobs": 0,
        "queue_sort_method": 1,
        "job_load_adjustments": "NONE",
        "load_adjustment_decay_time": "0:0:0",
        "load_formula": "np_load_avg",
        "schedd_job_info": "true",
        "flush_submit_sec": 1,
        "flush_finish_sec": 1,
        "params": "none",
        "reprioritize_interval": "0:0:0",
        "halftime": 168,
        "usage_weight_list": "cpu=1.000000 mem=0.000000 io=0.000000",
        "compensation_factor": "5.000000",
        "weight_user": "0.250000",
        "weight_project": "0.250000",
        "weight_department": "0.250000",
        "weight_job": "0.250000",
        "weight_tickets_functional": 0,
        "weight_tickets_share": 0,
        "share_override_tickets": "TRUE",
        "share_functional_shares": "TRUE",
        "max_functional_jobs_to_schedule": 200,
        "report_pjob_tickets": "TRUE",
        "max_pending_tasks_per_job": 50,
        "halflife_decay_list": "none",
        "policy_hierarchy": "OFS",
        "weight_ticket": "0.500000",
        "weight_waiting_time": "0.278000",
        "weight_deadline": "3600000.000000",
        "weight_urgency": "0.500000",
        "weight_priority": "0.000000",
        "max_reservation": 0,
        "default_duration": "INFINITY",
    }


def _table(values: Mapping[str, object]) -> str:
    return "".join(f"{name:<32} {value}\n" for name, value in values.items())
