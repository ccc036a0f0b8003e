"""What a SLURM site has, read from the output of its programs, why it can never grant a placement, and the doctor's
checks of it. Pure but for the functions that query the site: ``partitions_now``, ``gpus_of_nodes``, ``refuse_mpi``,
``find_slurm``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import le

from gpuherd.checks import CheckResult, Status
from gpuherd.engines.base import EngineAway, EngineMissing, Placement
from gpuherd.engines.batch_system import some
from gpuherd.engines.slurm.commands import SLURM
from gpuherd.engines.slurm.node import hosts
from gpuherd.engines.slurm.options import SlurmOptions
from gpuherd.errors import GpuherdError, UsageError, printable
from gpuherd.gpus.lease_files import user_name

# Node, partition, state of the node, CPUs, memory in MB, generic resources.
_NODES_FORMAT = "%N|%R|%T|%c|%m|%G"
# Partition (the default one ends with a star), its state, the longest time.
_PARTITIONS_FORMAT = "%P|%a|%l"

# A job's GPUs stand as a count in brackets while the controller does not know their numbers.
_GPU = re.compile(r"gpu(?::([^:(),=]+))?(?:(?::(\d{1,9}))(?:\(.*?\))?|\(CNT:(\d{1,9})\))")
_TIME = re.compile(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,6}):(\d{1,2})")
_FIELD = re.compile(r"(?:^|\s)([A-Za-z]+)=(\S*)")
_ON_NODES = re.compile(r"^\s*Nodes=(\S+) CPU_IDs=(\S*) Mem=(\d+) GRES=(\S*)", re.MULTILINE)
_TAKES_NONE = frozenset({"drain", "inact"})
_DEFAULT_ARRAY = 1001
_DEFAULT_MEMORY_S = 300.0
_MOST_PARTITIONS = 12
_LACKS = {
    "account": "you have no account",
    "gpu-type": "there is no GPU of the type",
    "mpi": "there is no MPI type",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmNode:
    """A node. Memory is MB (2^20 bytes); ``gpus``: the number of each type, "" where the site names no types."""

    name: str
    state: str
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int]

    def count(self, gpu_type: str | None) -> int:
        """The number of its GPUs of this type; None: of any."""
        return sum(self.gpus.values()) if gpu_type is None else self.gpus.get(gpu_type, 0)

    def has(self, gpu_type: str | None) -> tuple[int, int, int]:
        """Its GPUs of this type, CPUs and memory, in the order of ``_amounts``."""
        return self.count(gpu_type), self.cpus, self.memory_mb

    def fits(self, wanted: Placement, gpu_type: str | None) -> bool:
        """Whether it has all that a placement requests on a node."""
        return all(map(le, _amounts(wanted), self.has(gpu_type)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A partition. ``max_time_s``: None for no limit; ``state``: up, down, drain or inact."""

    name: str
    state: str
    default: bool
    max_time_s: float | None
    nodes: tuple[SlurmNode, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A running SLURM job, in which steps can run. ``left_s``: until its time is up, None for no limit; ``chosen``: its
    partition, account and QOS, by the names of our options.
    """

    job: str
    nodes: tuple[SlurmNode, ...]
    left_s: float | None
    chosen: Mapping[str, str]

    def lacks(self, wanted: Placement, options: SlurmOptions) -> str | None:
        """What of the request it can never grant; None where all of it fits."""
        for name in ("partition", "account", "qos", "constraint"):
            value = getattr(options, name)
            if value is not None and value != self.chosen.get(name):
                return f"--{name} {value} is not the job's"
        if len(self.nodes) < wanted.nodes:
            return f"{wanted.nodes} nodes are asked for, and it has {len(self.nodes)}"
        fitting = [node for node in self.nodes if node.fits(wanted, options.gpu_type)]
        if len(fitting) < wanted.nodes:
            best = max(self.nodes, key=lambda node: node.has(options.gpu_type))
            gpus, cpus, memory_mb = best.has(options.gpu_type)
            where = f"{best.name} gives it {gpus} {_gpu_words(options.gpu_type)}, {cpus} CPUs and {memory_mb} MB"
            return f"too few of its nodes have all that is asked for; {where}"
        if wanted.time_s is not None and self.left_s is not None and wanted.time_s > self.left_s:
            return f"{wanted.time_s / 60:.0f} minutes are asked for, and {self.left_s / 60:.0f} are left"
        return None

    def lacks_for_all(self, wanted: Sequence[Placement], options: SlurmOptions) -> str | None:
        """What of these requests it can never grant, one after the other or at once; None where all fit before its time
        is up."""
        for each in dict.fromkeys(wanted):
            reason = self.lacks(each, options)
            if reason is not None:
                return reason
        if self.left_s is None:
            return None
        asked_s = sum((each.time_s or 0.0) * self._part(each, options.gpu_type) for each in wanted)
        if asked_s > self.left_s:
            return (
                f"all jobs together ask for {asked_s / 60:.0f} minutes of all that it has, and {self.left_s / 60:.0f} "
                "are left"
            )
        return None

    def at_once(self, wanted: Sequence[Placement]) -> int | None:
        """How many of these requests it can grant at once, whichever they are, by the CPUs and the memory that they
        name; None where none names any. Each must fit alone.
        """
        rooms = [
            has // asked
            for node in self.nodes
            for each in wanted
            for asked, has in ((each.cpus, node.cpus), (each.memory_mb, node.memory_mb))
            if asked
        ]
        return max(1, min(rooms)) if rooms else None

    def _part(self, wanted: Placement, gpu_type: str | None) -> float:
        """The share of the whole job that this request takes while it runs."""
        in_all = map(sum, zip(*(node.has(gpu_type) for node in self.nodes), strict=True))
        parts = (asked * wanted.nodes / has for asked, has in zip(_amounts(wanted), in_all, strict=True) if has)
        return max(parts, default=0.0)

    def share(self, wanted: Placement, gpu_type: str | None) -> Placement:
        """The request with the CPUs and the memory in proportion to its GPUs where it names none, so that several steps
        can run at once."""
        node = min(
            (each for each in self.nodes if each.fits(wanted, gpu_type)), key=lambda each: each.has(gpu_type)[1:]
        )
        cpus = wanted.cpus
        if cpus is None:
            fair = node.cpus * wanted.gpus // node.count(gpu_type) if wanted.gpus else 0
            cpus = max(1, fair // wanted.tasks) * wanted.tasks
        part = wanted.gpus / node.count(gpu_type) if wanted.gpus else min(1.0, cpus / max(1, node.cpus))
        memory_mb = max(1, int(node.memory_mb * part)) if wanted.memory_mb is None else wanted.memory_mb
        return replace(wanted, cpus=cpus, memory_mb=memory_mb)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmSettings:
    """The parts of slurm.conf that matter here. ``array_size``: the most parcels of one array; ``accounting``: whether
    sacct works; ``enforced``: what users need, like ``associations`` or ``qos``; ``remembers_s``: how long the
    controller knows a job that has ended.
    """

    array_size: int = _DEFAULT_ARRAY
    accounting: bool = False
    enforced: frozenset[str] = frozenset()
    remembers_s: float = _DEFAULT_MEMORY_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Partitions by name; this user's accounts and the site's QOS, None where they are not known."""

    partitions: Mapping[str, Partition]
    accounts: frozenset[str] | None = None
    qos: frozenset[str] | None = None


def settings(text: str) -> SlurmSettings:
    """From ``scontrol show config``."""
    values = _values(text)
    size = values.get("MaxArraySize", "")
    enforced = values.get("AccountingStorageEnforce", "").lower().split(",")
    return SlurmSettings(
        # The largest index must be below it.
        array_size=int(size) if size.isdigit() else _DEFAULT_ARRAY,
        accounting=not values.get("AccountingStorageType", "").endswith(("none", "filetxt", "(null)")),
        enforced=frozenset(word.strip() for word in enforced),
        remembers_s=_memory_s(values.get("MinJobAge", "")),
    )


def _values(config: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in config.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def allocation(text: str) -> Allocation | None:
    """From ``scontrol show job --details``; None for a job that does not run."""
    fields = dict(_FIELD.findall(text))
    if fields.get("JobState") != "RUNNING":
        return None
    nodes = []
    for names_there, cpus, memory, gres in _ON_NODES.findall(text):
        numbers = [word.partition("-") for word in cpus.split(",") if word]
        count = sum(int(last or first) - int(first) + 1 for first, _, last in numbers)
        for name in hosts(names_there):
            gpus = gpus_of(gres)
            nodes.append(SlurmNode(name=name, state="", cpus=count, memory_mb=int(memory), gpus=gpus))
    limit, ran = seconds_of(fields.get("TimeLimit", "")), seconds_of(fields.get("RunTime", ""))
    return Allocation(
        job=fields.get("JobId", ""),
        nodes=tuple(nodes),
        left_s=None if limit is None else max(0.0, limit - (ran or 0.0)),
        chosen={
            "partition": fields.get("Partition", ""),
            "account": fields.get("Account", ""),
            "qos": fields.get("QOS", ""),
        },
    )


def partitions(nodes: str, listed: str) -> dict[str, Partition]:
    """From ``sinfo -N`` with _NODES_FORMAT and ``sinfo`` with _PARTITIONS_FORMAT, both with ``--all --noheader``."""
    found: dict[str, dict[str, SlurmNode]] = {}
    for line in nodes.splitlines():
        fields = line.split("|", 5)
        if len(fields) != 6:
            continue
        name, partition, state, cpus, memory, gres = fields
        node = SlurmNode(
            name=printable(name),
            state=state.rstrip("*~#!%$@^-+"),
            cpus=_number(cpus),
            memory_mb=_number(memory),
            gpus=gpus_of(gres),
        )
        found.setdefault(partition, {})[name] = node
    result = {}
    for line in listed.splitlines():
        fields = line.split("|", 2)
        if len(fields) != 3:
            continue
        word, state, most = fields
        name = word.removesuffix("*")
        result[name] = Partition(
            name=printable(name),
            state=state,
            default=word.endswith("*"),
            max_time_s=seconds_of(most),
            nodes=tuple(found.get(name, {}).values()),
        )
    return result


def partitions_now() -> dict[str, Partition]:
    """The partitions of the site. Raises EngineMissing, EngineAway."""
    nodes = SLURM.answer("sinfo", "--noheader", "--all", "--Node", f"--format={_NODES_FORMAT}")
    return partitions(nodes, SLURM.answer("sinfo", "--noheader", "--all", f"--format={_PARTITIONS_FORMAT}"))


def site_now(enforced: Collection[str]) -> Site:
    """The site, with accounts and QOS where users need them (``Settings.enforced``).

    Raises EngineMissing, EngineAway.
    """
    # sacctmgr knows users by their names only.
    associations = ("associations", f"user={user_name(os.getuid())}", "format=Account")
    return Site(
        partitions=partitions_now(),
        accounts=_listed(*associations) if "associations" in enforced else None,
        qos=_listed("qos", "format=Name") if "qos" in enforced else None,
    )


def _listed(*words: str) -> frozenset[str] | None:
    """The names that sacctmgr lists; None where it does not answer."""
    try:
        return names(SLURM.answer("sacctmgr", "--noheader", "--parsable2", "show", *words))
    except (EngineAway, EngineMissing):
        return None


def names(text: str) -> frozenset[str]:
    """The first field of each line of sacctmgr's output."""
    return frozenset(line.partition("|")[0] for line in text.splitlines() if line.partition("|")[0])


def gpus_of(gres: str) -> dict[str, int]:
    """GPUs by type in a node's generic resources.

    >>> gpus_of("gpu:a100:4(S:0-1),shard:8,gpu:v100:2"), gpus_of("gpu:8"), gpus_of("(null)")
    ({'a100': 4, 'v100': 2}, {'': 8}, {})
    >>> gpus_of("gpu:a100(CNT:2)"), gpus_of("gpu(CNT:2)"), gpus_of("gpu:a100:2(IDX:0-1)")
    ({'a100': 2}, {'': 2}, {'a100': 2})
    """
    counts: dict[str, int] = {}
    for kind, number, counted in _GPU.findall(gres):
        counts[kind] = counts.get(kind, 0) + int(number or counted)
    return counts


def mpi_types(text: str) -> frozenset[str]:
    """The types that ``srun --mpi`` takes, from ``srun --mpi=list``; none where the text has another form.

    >>> sorted(mpi_types("MPI plugin types are...\\n\\tpmix\\nspecific pmix plugin versions available: pmix_v4\\n"))
    ['pmix', 'pmix_v4']
    """
    names = re.findall(r"^[ \t]+(\w+)[ \t]*$", text, re.MULTILINE)
    versions = re.findall(r"^specific \w+ plugin versions available: (.*)$", text, re.MULTILINE)
    return frozenset([*names, *(word for line in versions for word in re.findall(r"\w+", line))])


def refuse_mpi(options: SlurmOptions) -> None:
    """Raises UsageError for an ``--mpi`` that srun doesn't know. If srun names none, nodes may still know it."""
    if options.mpi is None:
        return
    try:
        known = mpi_types(SLURM.answer("srun", "--mpi=list"))
    except (EngineMissing, EngineAway):
        return
    if known:
        _known("mpi", options.mpi, known)


def seconds_of(text: str) -> float | None:
    """Seconds from a length of time as SLURM prints it; None for no limit.

    >>> seconds_of("10:00"), seconds_of("1-00:00:00"), seconds_of("infinite")
    (600.0, 86400.0, None)
    """
    found = _TIME.fullmatch(text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def chosen(site: Site, options: SlurmOptions, named: str | None) -> tuple[Partition, ...]:
    """The partitions that jobs go to.

    Args:
        named: as ``named_partition``.

    Raises UsageError for a partition, account, QOS or type of GPU that is not there, and for partitions that take no
    jobs.
    """
    if named is None:
        picked = tuple(each for each in site.partitions.values() if each.default) or tuple(site.partitions.values())
    else:
        words = named.split(",")
        for word in words:
            _known("partition", word, site.partitions)
        picked = tuple(site.partitions[word] for word in words)
    if picked and all(each.state in _TAKES_NONE for each in picked):
        others = sorted(each.name for each in site.partitions.values() if each.state not in _TAKES_NONE)
        which = ", ".join(f"{each.name} ({each.state})" for each in picked)
        raise UsageError(f"SLURM's partition {which} takes no jobs now; others that do: {some(others) or 'none'}")
    if options.account is not None and site.accounts:
        _known("account", options.account, site.accounts)
    if options.qos is not None and site.qos:
        _known("qos", options.qos, site.qos)
    if options.gpu_type is not None:
        there = {kind for each in picked for node in each.nodes for kind in node.gpus}
        _known("gpu-type", options.gpu_type, there - {""})
    return picked


def named_partition(options: SlurmOptions) -> str | None:
    """``--partition``, or what the user's environment says for sbatch; None for the site's own choice."""
    return options.partition or os.environ.get("SBATCH_PARTITION")


def gpus_of_nodes(options: SlurmOptions) -> tuple[Mapping[str, int], ...]:
    """The GPUs of each node of the partition (the one that jobs go to which name none), by SLURM's types; "" for GPUs
    of no type. With ``gpu_type`` only those. Raises EngineMissing, EngineAway, and UsageError for a partition that is
    not there.
    """
    plain, wanted = SlurmOptions(engine=options.engine), options.gpu_type
    picked = chosen(Site(partitions=partitions_now()), plain, named_partition(options))
    nodes = {node.name: node.gpus for each in picked for node in each.nodes}
    return tuple({name: many for name, many in gpus.items() if wanted in (None, name)} for gpus in nodes.values())


def impossible(
    picked: Sequence[Partition], wanted: Collection[Placement], gpu_type: str | None
) -> dict[Placement, str]:
    """Those placements that none of these partitions can ever grant, each with the reason."""
    found = {}
    for placement in wanted:
        reasons = [_reason(each, placement, gpu_type) for each in picked]
        if reasons and None not in reasons:
            found[placement] = "; ".join(reason for reason in reasons if reason is not None)
    return found


def _reason(partition: Partition, wanted: Placement, gpu_type: str | None) -> str | None:
    """Why this partition can't grant it; None if it can."""
    where = f"SLURM's partition {partition.name}"
    if not partition.nodes:
        return f"{where} has no nodes"
    asked = [*zip(_amounts(wanted), (_gpu_words(gpu_type), "CPUs", "MB of memory"), strict=True)]
    for place, (amount, words) in enumerate(asked):
        best = max(partition.nodes, key=lambda node: node.has(gpu_type)[place])
        most = best.has(gpu_type)[place]
        if amount > 0 == most and place == 0:
            return f"no node of {where} has {words}; name another --partition, or ask for no GPU"
        if amount > most:
            return f"no node of {where} has {amount} {words}: the most is {most} ({best.name})"
    fitting = [each.name for each in partition.nodes if each.fits(wanted, gpu_type)]
    if not fitting:
        together = ", ".join(f"{amount} {words}" for amount, words in asked if amount)
        return f"no node of {where} has all at once: {together}"
    if len(fitting) < wanted.nodes:
        return f"{wanted.nodes} nodes are asked for, and {where} has {len(fitting)} that fit ({some(fitting)})"
    if partition.max_time_s is not None and wanted.time_s is not None:
        # SLURM counts in minutes.
        asked_min, most_min = math.ceil(wanted.time_s / 60), int(partition.max_time_s / 60)
        if asked_min > most_min:
            return (
                f"{asked_min} minutes are asked for, and {where} grants at most {most_min} (--time-limit {most_min}m)"
            )
    return None


def _amounts(wanted: Placement) -> tuple[int, int, int]:
    """The GPUs, CPUs and memory that a placement requests on a node; each of several processes takes a CPU."""
    cpus = max(wanted.cpus or 0, wanted.tasks if wanted.tasks > 1 else 0)
    return wanted.gpus, cpus, wanted.memory_mb or 0


def _gpu_words(gpu_type: str | None) -> str:
    return "GPUs" if gpu_type is None else f"GPUs of type {gpu_type}"


def _known(what: str, word: str, there: Iterable[str]) -> None:
    SLURM.refuse_unknown(f"--{what}", word, there, _LACKS.get(what, f"there is no {what}"))


def _memory_s(text: str) -> float:
    """Seconds from ``MinJobAge``, like ``300 sec``; 0 means for ever."""
    number = text.partition(" ")[0]
    if not (number.isascii() and number.isdigit()):
        return _DEFAULT_MEMORY_S
    return float(number) or math.inf


def _number(text: str) -> int:
    digits = text.rstrip("+")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 else 0


# --- the doctor's checks ----------------------------------------------------------------------------------------------


def find_slurm() -> list[CheckResult]:
    """SLURM in as many lines as there is something to say."""
    return SLURM.diagnose(_checks)


def _checks() -> list[CheckResult]:
    config = SLURM.config()
    try:
        last = check_partitions(partitions_now())
    except GpuherdError as problem:
        last = CheckResult("SLURM partitions", Status.FAIL, str(problem), "see sinfo")
    return [check_controller(config), check_accounting(config), last]


def check_controller(config: str) -> CheckResult:
    """Judges that the controller has answered with this."""
    values = _values(config)
    name, version = values.get("ClusterName", "?"), values.get("SLURM_VERSION", "?")
    return CheckResult("SLURM", Status.OK, f"cluster {name}, SLURM {version}; its controller answers")


def check_accounting(config: str) -> CheckResult:
    """Judges whether jobs are remembered after their end."""
    if settings(config).accounting:
        return CheckResult("SLURM accounting", Status.OK, "sacct tells how jobs have ended")
    detail = "switched off: who ended a job, and how, is forgotten some minutes after its end (MinJobAge)"
    remedy = "jobs run all the same, and tell their own ends; accounting (slurmdbd) is the administrator's to switch on"
    return CheckResult("SLURM accounting", Status.WARN, detail, remedy)


def check_partitions(found: Mapping[str, Partition]) -> CheckResult:
    """Judges whether there are GPUs to be had, and tells where."""
    name = "SLURM partitions"
    if not found:
        return CheckResult(name, Status.FAIL, "this user sees none", "ask its administrator for one")
    partitions = [_in_words(each) for each in found.values()]
    more = f" and {len(partitions) - _MOST_PARTITIONS} more" if len(partitions) > _MOST_PARTITIONS else ""
    detail = "; ".join(partitions[:_MOST_PARTITIONS]) + more
    if not any(node.count(None) for each in found.values() for node in each.nodes):
        remedy = "jobs on GPUs can't be submitted; GresTypes=gpu and Gres= of the nodes are the administrator's"
        return CheckResult(name, Status.WARN, f"{detail}; no node has a GPU that SLURM knows", remedy)
    if not any(each.default for each in found.values()):
        return CheckResult(name, Status.WARN, f"{detail}; none is the default", "name one with --partition")
    return CheckResult(name, Status.OK, detail)


def _in_words(found: Partition) -> str:
    counts: dict[str, int] = {}
    for node in found.nodes:
        for kind, number in node.gpus.items():
            counts[kind or "GPU"] = counts.get(kind or "GPU", 0) + number
    gpus = " + ".join(f"{number} {kind}" for kind, number in counts.items()) or "no GPUs"
    nodes = f"{len(found.nodes)} node{'s' if len(found.nodes) != 1 else ''}"
    marks = ", ".join([*(["default"] if found.default else []), *([found.state] if found.state != "up" else [])])
    return f"{found.name}{f' ({marks})' if marks else ''}: {nodes}, {gpus}"
