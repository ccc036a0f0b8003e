"""Translates a batch into qsub's arguments and the script that nodes run. Pure.

A batch is one array, and one job where it is a single parcel; task numbers begin with 1, places in a batch with 0. An
array that is longer than the site allows is refused by Grid Engine, and the dispatcher then tries a shorter one.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

from gpuherd.engines.base import Batch, Placement
from gpuherd.engines.batch_system import check_argument, notice_s
from gpuherd.engines.export import IS_AMD
from gpuherd.engines.gridengine.commands import DELETED, GRID_ENGINE, MADE_ROOM, Complex
from gpuherd.engines.gridengine.node import GPUS, lease
from gpuherd.engines.gridengine.options import GridEngineOptions
from gpuherd.engines.local.process import THREAD_VARIABLES
from gpuherd.errors import UsageError
from gpuherd.gpus.state import Maker
from gpuherd.gpus.visible import CUDA, HIP, ORDER, PCI_ORDER, ROCR, environment, showing

# Options of qsub that gpuherd sets itself, and why a user can't.
_OURS = {
    "-t": "an array's tasks are the jobs (--array-limit limits how many run at once)",
    "-tc": "use --array-limit",
    "-N": "a job is found again by its name",
    "-hold_jid": "the order of jobs is in their needs",
    "-hold_jid_ad": "the order of jobs is in their needs",
    "-r": "a job that is to run again is submitted again",
    "-terse": "it is given already",
    "-sync": "nothing waits for qsub itself",
    "-now": "jobs wait in Grid Engine's queue",
    "-w": "gpuherd verifies what a job asks for",
    "-verify": "nothing would be submitted",
    "-b": "the script is written here",
    "-C": "the script is written here",
    "-S": "the script is written here",
    "-o": "the output goes into the job's own log",
    "-e": "the output goes into the job's own log",
    "-j": "the output goes into the job's own log",
    "-pe": "use --sge-pe; the slots follow from nodes and cpus",
    "-q": "use --sge-queue",
    "-P": "use --sge-project",
    "-notify": "it is given already",
    "-help": "nothing would be submitted",
}
_MB = "M"
# Variables that Grid Engine sets for every job, or that the user's lines of --setup extend.
_HIDDEN = (
    *("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "MANPATH", "PYTHONPATH", "SHELL", "TERM", "LANG", "LC_ALL"),
    *("MODULEPATH", "LOADEDMODULES", "_LMFILES_"),
)

# Not empty where GPUs have been named for the job.
_ARE_NAMED = f"${{{CUDA}+set}}${{{ROCR}+set}}"
_IN_ALL = {"mem_free": "mem_total", "mf": "mem_total", "virtual_free": "virtual_total", "vf": "virtual_total"}


class CannotRequest(Exception):
    """This cluster has no terms for a placement; the message says why."""


def job_name(batch: str) -> str:
    """The job's name: that of the batch, which may begin with a digit, as no job's name can."""
    return batch if batch[:1].isalpha() else f"g-{batch}"


def arguments(batch: Batch, request: Sequence[str]) -> list[str]:
    """The words for qsub. ``request``: from ``requests``."""
    words = ["-terse", "-N", job_name(batch.name), "-r", "n", "-notify", *_own_options()]
    if len(batch.parcels) > 1:
        words += ["-t", f"1-{len(batch.parcels)}"]
        if batch.at_once is not None and batch.at_once < len(batch.parcels):
            words += ["-tc", str(batch.at_once)]
    if batch.after:
        # A job can wait for whole arrays only; the engine lets it go when the tasks that it needs have ended.
        words += ["-hold_jid", ",".join(dict.fromkeys(GRID_ENGINE.parts(each)[0] for each in batch.after))]
    return [*words, *request]


def _own_options() -> list[str]:
    # The script itself says where it writes: in qsub's words a path can't hold everything that a path can hold.
    return ["-b", "n", "-C", "", "-S", "/bin/bash", "-o", "/dev/null", "-e", "/dev/null", "-wd", "/"]


def verification(request: Sequence[str], known: Mapping[str, Complex]) -> list[str]:
    """The words by which qsub says whether an empty cluster could ever run such a job; nothing is submitted.

    Grid Engine knows no amount of free memory of an empty cluster and takes it for none: the request is for the node's
    memory in all instead.
    """
    words = ["-w", "v", *_own_options()]
    for before, word in zip(("", *request), request, strict=False):
        if before == "-l":
            pairs = (each.partition("=") for each in word.split(","))
            word = ",".join(f"{_in_all(name, known)}={value}" for name, _, value in pairs)
        words.append(word)
    return words


def _in_all(name: str, known: Mapping[str, Complex]) -> str:
    found = known.get(name)
    return name if found is None or found.consumable != "NO" else _IN_ALL.get(name, name)


def requests(
    placement: Placement,
    options: GridEngineOptions,
    known: Mapping[str, Complex],
    environment: tuple[str, int] | None = None,
) -> list[str]:
    """The words that request the resources, the queue and the project.

    Args:
        known: the cluster's resources.
        environment: the parallel environment and the slots that it gives on each node; None for a single slot.

    Raises CannotRequest, and UsageError for words of the user's that can't be.
    """
    slots = 1 if environment is None else environment[1]
    words = []
    for flag, value in (("-q", options.sge_queue), ("-P", options.sge_project)):
        if value is not None:
            words += [flag, value]
    if environment is not None:
        words += ["-pe", environment[0], str(slots * placement.nodes)]
    resources = []
    if placement.gpus:
        resources.append(_gpus(placement, options.sge_gpu, known, slots))
    if placement.memory_mb is not None:
        resources.append(_memory(placement.memory_mb, options.sge_memory, known, slots))
    if placement.time_s is not None:
        limit = math.ceil(placement.time_s)
        resources += [f"h_rt={limit}", f"s_rt={max(1, limit - notice_s(options.notice, limit))}"]
    if resources:
        words += ["-l", ",".join(resources)]
    return [*words, *checked(options.sge_args)]


def _resource(name: str, known: Mapping[str, Complex], what: str, flag: str) -> Complex:
    if name not in known:
        raise CannotRequest(
            f"this Grid Engine has no resource {name} for {what}; name the one that `qconf -sc` lists by {flag}"
        )
    return known[name]


def _gpus(placement: Placement, name: str, known: Mapping[str, Complex], slots: int) -> str:
    found = _resource(name, known, "GPUs", "--sge-gpu")
    if found.consumable == "JOB":
        if placement.nodes > 1:
            raise CannotRequest(
                f"this Grid Engine counts {name} once for a job (consumable JOB), so GPUs of further nodes can't be "
                "requested; request one node"
            )
        return f"{name}={placement.gpus}"
    if found.consumable == "YES" and slots > 1:
        if found.kind == "INT" and placement.gpus % slots:
            raise CannotRequest(
                f"this Grid Engine counts {name} by slot (consumable YES), and {placement.gpus} GPUs can't be shared "
                f"out among {slots} slots; request a number of CPU cores that divides the GPUs, or none (the "
                "administrator can make it consumable JOB)"
            )
        share = placement.gpus / slots
        return f"{name}={int(share) if share == int(share) else f'{share:.6f}'}"
    return f"{name}={placement.gpus}"


def _memory(memory_mb: int, name: str, known: Mapping[str, Complex], slots: int) -> str:
    found = _resource(name, known, "memory", "--sge-memory")
    return f"{name}={math.ceil(memory_mb / slots) if found.consumable == 'YES' else memory_mb}{_MB}"


def slots_of(placement: Placement) -> int | None:
    """Slots on each node; None where any number does."""
    return placement.cpus if placement.cpus is not None else 1 if placement.nodes == 1 else None


def suitable(placement: Placement, environments: Mapping[str, Mapping[str, str]]) -> list[tuple[str, int]]:
    """The parallel environments that can grant a placement, each with its slots on a node; the best first.

    On one node it is one that gives all slots on one host (``$pe_slots``), on several one that gives a fixed number on
    each, and lets the job start tasks there (``control_slaves``). ``environments``: the fields of each, by name.
    """
    slots, found = slots_of(placement), []
    for name in sorted(environments):
        rule = environments[name].get("allocation_rule", "")
        starts_tasks = environments[name].get("control_slaves", "").upper() == "TRUE"
        if placement.nodes == 1 and slots is not None and rule in ("$pe_slots", str(slots)):
            found.append((rule != "$pe_slots", name, slots))
        elif placement.nodes > 1 and starts_tasks and rule.isdigit() and slots in (None, int(rule)) and int(rule) > 0:
            found.append((bool(placement.gpus % int(rule)), name, int(rule)))
    return [(name, slots) for _, name, slots in sorted(found)]


def script(batch: Batch, options: GridEngineOptions, own: Mapping[str, str]) -> str:
    """What Grid Engine runs on the first node: the user's lines, the choice of GPUs, then the command.

    The shell waits for it. Grid Engine signals all of the job's process group: SIGUSR1 when its time is nearly up
    (s_rt), SIGUSR2 before SIGKILL (``-notify``). The command obeys them itself; from the shell's exit status accounting
    learns that the second one has come.

    Args:
        own: the variables of this process. Grid Engine passes none on, and its own PATH would hide the user's.
    """
    folder, index = shlex.quote(str(batch.folder)), "0" if len(batch.parcels) == 1 else "$((SGE_TASK_ID - 1))"
    lines = [
        "#!/bin/bash",
        f"# {job_name(batch.name)}: {len(batch.parcels)} of gpuherd's jobs.",
        f"cd {folder} || exit 1",
        f"exec >>{folder}/{shlex.quote(batch.name)}.{index}.out 2>&1",
        *[f"export {name}={shlex.quote(own[name])}" for name in _HIDDEN if own.get(name)],
        *_threads(batch.placement, own),
        f"export {GPUS}={batch.placement.gpus}",
        *options.setup,
        *_choice_of_gpus(batch.placement.gpus, job_name(batch.name)),
        "gpuherd_deleted=",
        # They are heard when the command has ended.
        "trap gpuherd_deleted=yes USR2",
        "trap : USR1 HUP INT TERM",
        f'"${{gpuherd_lease[@]}}" {shlex.join(batch.command)} "{index}"',
        "gpuherd_code=$?",
        f'[ "$gpuherd_code$gpuherd_deleted" = {MADE_ROOM}yes ] && exit {DELETED}',
        'exit "$gpuherd_code"',
    ]
    return "\n".join(lines) + "\n"


def _threads(placement: Placement, own: Mapping[str, str]) -> list[str]:
    """Lines that keep numeric libraries to the slots of the job, which Grid Engine itself does not do. Where the job
    requests cores, its leader does that; threads that the user has set stay."""
    if placement.cpus is not None or any(name in own for name in THREAD_VARIABLES):
        return []
    return [f"export {name}=$((${{NSLOTS:-1}} / ${{NHOSTS:-1}}))" for name in THREAD_VARIABLES]


def gpus_of_site(gpus: int) -> list[str]:
    """Lines of bash that show a job the GPUs that the site names for it, of whichever maker: by the variables of CUDA
    and ROCm, or in SGE_GPU, as its prologs and successors do. Grid Engine itself only counts GPUs."""
    if gpus == 0:
        return [f"export {name}={value}" for name, value in environment(()).items()]
    return [
        'site_gpus="${SGE_HGR_gpu:-${SGE_GPU:-}}"',
        f'if [ -z "{_ARE_NAMED}" ] && [ -n "$site_gpus" ]; then',
        f"    if {IS_AMD}; then",
        f'        export {ROCR}="${{site_gpus// /,}}" {HIP}={showing([""] * gpus, Maker.AMD)[HIP]}',
        "    else",
        f'        export {CUDA}="${{site_gpus// /,}}"',
        "    fi",
        "fi",
        f"export {ORDER}={PCI_ORDER}",
    ]


def _choice_of_gpus(gpus: int, name: str) -> list[str]:
    """Lines that find out which GPUs the job has: those that the site names; else gpuherd's leases choose free ones, as
    they do among all gpuherds of a machine."""
    lines = [*gpus_of_site(gpus), "gpuherd_lease=()"]
    if gpus:
        lines.append(f'if [ -z "{_ARE_NAMED}" ]; then gpuherd_lease=({shlex.join(lease(gpus, name))}); fi')
    return lines


def checked(words: Sequence[str]) -> tuple[str, ...]:
    """The user's own words for qsub: an option and its value in one, as ``--sge-args='-M me@x.org'``. Raises UsageError
    for what is no option, or is ours to say."""
    found: list[str] = []
    for word in words:
        try:
            parts = shlex.split(word)
        except ValueError as problem:
            raise UsageError(f"--sge-args {word!r}: {problem}") from None
        given = next((part for part in parts if part in _OURS), None)
        check_argument("--sge-args", word if parts else "", given, _OURS, "qsub", "--sge-args='-m e'")
        found += parts
    return tuple(found)
