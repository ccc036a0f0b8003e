"""A command in the foreground of SLURM: srun's arguments for it (pure), and the SLURM job of which it may become a
step.

srun stays between the terminal and the command: signals, standard streams and the exit status pass through it, and the
command gets the terminal, where there is one. Of several processes the first one leads: it starts all by an srun of its
own, as the leader of a batch's job does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from gpuherd.engines import host
from gpuherd.engines.base import CommandRequest, Inside, Placement, Replacement
from gpuherd.engines.slurm import commands
from gpuherd.engines.slurm.engine import checked, cpus_of_task, resources
from gpuherd.engines.slurm.node import SHELL_MEETING, SHELL_PLACE, steps
from gpuherd.engines.slurm.options import SlurmOptions
from gpuherd.engines.slurm.site import Allocation, SlurmNode, allocation, refuse_mpi
from gpuherd.errors import ExitCode, JobCannotFit, UsageError
from gpuherd.gpus.visible import ORDER, PCI_ORDER, named_in, without
from gpuherd.gpus.visible import environment as visible_environment

# They set srun's exit codes. The command must not inherit them: it may start an srun of its own.
_EXIT_CODES = ("SLURM_EXIT_IMMEDIATE", "SLURM_EXIT_ERROR")
_FORGET = f"unset {' '.join(_EXIT_CODES)}"
_LEADER = f"""\
[ "$SLURM_PROCID" = 0 ] || exit 0
{_FORGET}
{SHELL_MEETING}
exec "$@\""""
# Steps with higher numbers are SLURM's own: the script of sbatch, the shell of salloc.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
# Options that only the script of a new SLURM job can follow.
_OF_OWN_JOBS = ("setup", "slurm_args", "ntasks_per_node", "mpi")
# Options about waiting in SLURM's queue and about the time limit: SLURM has settled both for a running job.
_OF_THE_QUEUE = frozenset({"partition", "account", "qos", "array_limit", "at_most", "time_limit", "notice"})
_NUMBER = "SLURM_JOB_ID"
_NOT_FOR_A_QUEUE = (
    "what will be added to this queue may ask for more than a SLURM job has, and for longer; to use the GPUs of the "
    "SLURM job that this is typed in, work off your queue of this machine there: gpuherd up --engine local"
)


def srun(
    argv: Sequence[str],
    asked: Placement,
    options: SlurmOptions,
    *,
    name: str,
    wait_s: float | None = None,
    terminal: bool = False,
    within: Allocation | None = None,
    in_step: bool = False,
) -> list[str]:
    """The argument list that runs the command with these resources.

    Args:
        name: the job's name for SLURM's users.
        wait_s: give up when the resources are not granted after so many seconds; None: wait for ever.
        terminal: the command gets a terminal of its own.
        within: the job of which this becomes a step; None for a new job.
        in_step: this process is in a step that holds the whole job, which the new step has to share.

    Raises UsageError for wrong ``--slurm-args``.
    """
    words = ["srun", f"--job-name={name}", "--export=ALL"]
    if within is not None:
        asked = within.share(asked, options.gpu_type)
        words += [
            f"--jobid={within.job}",
            f"--ntasks={asked.nodes * asked.tasks}",
            "--overlap" if in_step else "--exact",
        ]
        options = replace(options, partition=None, account=None, qos=None, constraint=None)
    words += resources(asked, options)
    if wait_s is not None:
        words.append(f"--immediate={max(1, math.ceil(wait_s))}")
    words += ["--pty"] if terminal else ["--quit-on-interrupt"]
    words += checked(options.slurm_args, "srun")
    each = _on_the_node(argv, asked, options.setup)
    if asked.nodes * asked.tasks == 1:
        return [*words, *each]
    # The first process leads, as on the first node of a job for sbatch: it alone can see which port is free there, and
    # an address of its node that the others reach. Its srun has all the resources of the outer one.
    cpus = cpus_of_task(asked)
    more = ["--overlap", "--mem=0", *([] if terminal else ["--quit-on-interrupt"])]
    inner = steps(asked.nodes, asked.tasks, cpus=None if cpus is None else str(cpus), mpi=options.mpi, more=more)
    return [*words, "--mpi=none", "--wait=0", "/bin/sh", "-c", _LEADER, "gpuherd-run", *inner, *each]


def environment(own: Mapping[str, str], asked: Placement) -> dict[str, str]:
    """The environment of srun, and so of the command. GPUs are as SLURM sets them, none where none were requested."""
    found = without(commands.environment(own))
    found |= {ORDER: PCI_ORDER} if asked.gpus else visible_environment(())
    if asked.cpus is not None:
        found["SRUN_CPUS_PER_TASK"] = str(cpus_of_task(asked))
    return found | dict.fromkeys(_EXIT_CODES, str(int(ExitCode.BUSY)))


def replacement(command: CommandRequest, options: SlurmOptions) -> Replacement:
    """The srun that runs a command: as a step of the SLURM job that we are in where that fits, else as a new job.

    Raises JobCannotFit and UsageError where it must be a step and can't be, UsageError for wrong options;
    EngineMissing, EngineAway.
    """
    asked = command.placement
    within = _allocated(asked, options, command.tell)
    refuse_mpi(options)
    words = srun(
        command.argv,
        asked,
        options,
        name=command.name,
        wait_s=command.wait_s,
        terminal=asked.nodes * asked.tasks == 1 and _is_terminal(),
        within=within,
        in_step=in_step(),
    )
    return Replacement(
        argv=tuple(words),
        environment=environment(os.environ, asked),
        within=None if within is None else f"SLURM job {within.job}",
    )


def _allocated(asked: Placement, options: SlurmOptions, tell: Callable[[str], None]) -> Allocation | None:
    """The SLURM job of which a command is to be a step; None for a new job."""
    if options.in_allocation is False or not (options.in_allocation or _NUMBER in os.environ):
        return None
    found = _own_job()
    if _NUMBER not in os.environ:
        raise UsageError(f"--in-allocation: {found}")
    if not isinstance(found, str):
        lacks = found.lacks(asked, options)
        if lacks is None:
            return found
        found = f"SLURM job {found.job}, in which this is typed, can't give it: {lacks}"
    if options.in_allocation:
        raise JobCannotFit(f"--in-allocation: {found}")
    tell(f"{found}; asking for a job of its own")
    return None


def _own_job() -> Allocation | str:
    """The SLURM job that this is typed in; else why there is none. Raises EngineMissing, EngineAway."""
    if _NUMBER not in os.environ:
        return f"this is not typed in a SLURM job ({_NUMBER} is not set); salloc starts one"
    found = allocation(commands.SLURM.job(os.environ[_NUMBER]))
    return found or f"SLURM job {os.environ[_NUMBER]}, in which this is typed, does not run any more"


def inside(
    wanted: Callable[[], Sequence[Placement]],
    options: SlurmOptions,
    submitted: str | None,
    tell: Callable[[str], None],
) -> Inside | None:
    """As ``Foreground.inside``."""
    if options.in_allocation is False or not (options.in_allocation or _NUMBER in os.environ):
        return None
    placements = wanted()
    found: Allocation | str
    if not options.in_allocation and submitted is not None:
        found = f"jobs of {submitted} were submitted before (--in-allocation runs what is left in this one)"
    else:
        found = place_for(placements, options)
    if not isinstance(found, str):
        tell(f"the jobs run in SLURM job {found.job}, on {found.nodes[0].name} (--no-in-allocation submits them)")
        return _inside(found, placements, options)
    if options.in_allocation:
        raise JobCannotFit(f"--in-allocation: {found}; leave it out to submit jobs of their own")
    tell(f"inside of SLURM job {os.environ[_NUMBER]}: new jobs are submitted, and wait in SLURM's queue: {found}")
    return None


def take_over(given: SlurmOptions, usual: SlurmOptions, argv: Sequence[str]) -> Inside | Replacement | None:
    """As ``Foreground.take_over``: where the user wants the SLURM job that this is typed in."""
    if not usual.in_allocation:
        return None
    if given.node_gpus is not None:
        raise UsageError("--node-gpus: with --in-allocation models are planned for the GPUs of this node; leave it out")
    there = _only_node()
    if not isinstance(there, str) and not _is_on(there.nodes[0]):
        (node,) = there.nodes
        all_of_it = Placement(gpus=node.count(None), cpus=node.cpus, memory_mb=node.memory_mb)
        plain = SlurmOptions(engine=given.engine)
        words = srun(argv, all_of_it, plain, name="gpuherd", terminal=_is_terminal(), within=there, in_step=True)
        return Replacement(
            argv=tuple(words), environment=environment(os.environ, all_of_it), within=f"SLURM job {there.job}"
        )
    defaults: dict[str, Any] = {each.name: each.default for each in fields(SlurmOptions) if each.name in _OF_THE_QUEUE}
    asked = replace(given, **defaults)
    least = Placement(gpus=1 if asked.gpu_type else 0, cpus=asked.cpus_per_job, memory_mb=asked.host_mem)
    found = place_for([least], asked)
    if isinstance(found, str):
        raise UsageError(f"--in-allocation: {found}; leave --in-allocation out to submit jobs of their own")
    return _inside(found, [least], given)


def _inside(found: Allocation, wanted: Sequence[Placement], options: SlurmOptions) -> Inside:
    most = [each for each in (options.array_limit, found.at_once(wanted)) if each is not None]
    return Inside(title=f"SLURM job {found.job}", node=found.nodes[0].name, at_once=min(most, default=None))


def queue_notice(options: SlurmOptions) -> str | None:
    """As ``Foreground.queue_notice``."""
    if options.in_allocation:
        raise UsageError(f"--in-allocation: {_NOT_FOR_A_QUEUE}")
    if _NUMBER not in os.environ or options.in_allocation is False:
        return None
    return f"inside of SLURM job {os.environ[_NUMBER]}: jobs are submitted to SLURM's queue; {_NOT_FOR_A_QUEUE}"


def _only_node() -> Allocation | str:
    """The SLURM job of one node that this is typed in; else why jobs of this machine's engine can't run in one."""
    found = _own_job()
    if isinstance(found, str) or len(found.nodes) == 1:
        return found
    return (
        f"SLURM job {found.job}, in which this is typed, has {len(found.nodes)} nodes, and jobs would run on one of "
        "them only; to use all, start this command with --engine local on each node (srun --nodes=1)"
    )


def _is_terminal() -> bool:
    return os.isatty(0) and os.isatty(1)


def _is_on(node: SlurmNode) -> bool:
    """Whether this process runs on the node; the shell of salloc often runs on the login node."""
    return os.environ.get("SLURMD_NODENAME") == node.name


def place_for(wanted: Sequence[Placement], options: SlurmOptions) -> Allocation | str:
    """The SLURM job in which jobs with these placements can all run, on this node; else why they can't.

    Raises EngineMissing, EngineAway.
    """
    found = _only_node()
    if isinstance(found, str):
        return found
    (node,) = found.nodes
    if not _is_on(node):
        return f"this does not run on {node.name}, the node of that job; --in-allocation runs it there"
    for name in _OF_OWN_JOBS:
        if getattr(options, name):
            return f"--{name.replace('_', '-')} is for SLURM jobs of their own"
    found = replace(found, nodes=(_part(node),))
    return found.lacks_for_all(wanted, options) or found


def _part(node: SlurmNode) -> SlurmNode:
    """The part of the job's node that this process may use: a step can have less than its job."""
    visible = len(named_in(os.environ))
    cpus = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return replace(
        node,
        gpus=node.gpus if visible >= node.count(None) else {next(iter(node.gpus)): visible},
        cpus=min(node.cpus, int(cpus)) if cpus.isdigit() else node.cpus,
        memory_mb=min(node.memory_mb, host.memory_mb() or node.memory_mb),
    )


def in_step() -> bool:
    """Whether this is a step that holds its resources, by its variables; the shells of sbatch and salloc hold none."""
    step = os.environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _FIRST_SPECIAL_STEP


def _on_the_node(argv: Sequence[str], asked: Placement, setup: Sequence[str]) -> list[str]:
    """The command behind a shell that runs the user's own lines and then becomes it."""
    hidden = [] if asked.gpus else [f"export {name}={value}" for name, value in visible_environment(()).items()]
    several = [SHELL_PLACE] if asked.nodes * asked.tasks > 1 else []
    text = "\n".join([_FORGET, *hidden, *several, *setup, 'exec "$@"'])
    # As in a script for sbatch: what sites define for their users ("module") they define for bash.
    return ["/bin/bash" if setup else "/bin/sh", "-c", text, "gpuherd-run", *argv]
