"""One command in the foreground of SLURM: srun's words for it (pure), and the SLURM job of which it may become a step.

srun stays between the terminal and the command: signals, standard streams and the exit status go through it, and a
terminal, where there is one, is the command's own. Of several processes the first leads: it starts all by an srun of
its own, as the leader of a batch's job does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpuherd.engines import host
from gpuherd.engines.base import Placement
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.slurm import commands, translate
from gpuherd.engines.slurm.site import Allocation, Node, allocation
from gpuherd.engines.world import SHELL_MEETING, SHELL_PLACE
from gpuherd.errors import ExitCode
from gpuherd.gpus.visible import ORDER, PCI_ORDER, named_in, without
from gpuherd.gpus.visible import environment as visible_environment

# By these srun is told what to end with. The command is not to find them: it may start an srun of its own.
_EXIT_CODES = ("SLURM_EXIT_IMMEDIATE", "SLURM_EXIT_ERROR")
_FORGET = f"unset {' '.join(_EXIT_CODES)}"
_LEADER = f"""\
[ "$SLURM_PROCID" = 0 ] || exit 0
{_FORGET}
{SHELL_MEETING}
exec "$@\""""
# Higher numbers are SLURM's own: the script of sbatch, the shell of salloc.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
# What only the script of a job of its own can follow.
_OF_OWN_JOBS = ("setup", "slurm_args", "ntasks_per_node", "mpi")


def srun(
    argv: Sequence[str],
    asked: Placement,
    options: EngineOptions,
    *,
    name: str,
    wait_s: float | None = None,
    terminal: bool = False,
    within: Allocation | None = None,
    in_step: bool = False,
) -> list[str]:
    """The argument list that runs the command on what is asked for.

    Args:
        name: what SLURM's users see of it.
        wait_s: give up when the nodes are not there after so many seconds; None: wait for ever.
        terminal: the command gets a terminal of its own.
        within: the job of which this becomes a step; None for a job of its own.
        in_step: we are in a step of that job, which holds all that it has: it is shared with that.

    Raises UsageError for words of the user's that can't be.
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
    words += translate.resources(asked, options)
    if wait_s is not None:
        words.append(f"--immediate={max(1, math.ceil(wait_s))}")
    words += ["--pty"] if terminal else ["--quit-on-interrupt"]
    words += translate.checked(options.slurm_args, "srun")
    each = _on_the_node(argv, asked, options.setup)
    if asked.nodes * asked.tasks == 1:
        return [*words, *each]
    # The first process leads, as on the first node of a job for sbatch: it alone can see which port is free there, and
    # an address of its node that the others reach. Its srun has all that the outer one has.
    cpus = translate.cpus_of_task(asked)
    more = ["--overlap", "--mem=0", *([] if terminal else ["--quit-on-interrupt"])]
    inner = translate.steps(asked, cpus=None if cpus is None else str(cpus), mpi=options.mpi, more=more)
    return [*words, "--mpi=none", "--wait=0", "/bin/sh", "-c", _LEADER, "gpuherd-run", *inner, *each]


def environment(own: Mapping[str, str], asked: Placement) -> dict[str, str]:
    """What srun inherits, and the command after it. GPUs are as SLURM gives them, none where none were asked for."""
    found = without(commands.environment(own))
    found |= {ORDER: PCI_ORDER} if asked.gpus else visible_environment(())
    if asked.cpus is not None:
        found["SRUN_CPUS_PER_TASK"] = str(translate.cpus_of_task(asked))
    return found | dict.fromkeys(_EXIT_CODES, str(int(ExitCode.BUSY)))


def allocated(own: Mapping[str, str], asked: Placement, options: EngineOptions) -> Allocation | str | None:
    """The SLURM job that we are in, where all that is asked for fits there, else why it does not; None outside of any.
    Raises EngineMissing, EngineAway."""
    number = own.get("SLURM_JOB_ID")
    if number is None:
        return None
    found = allocation(commands.Programs().job(number))
    if found is None:
        return f"SLURM job {number}, in which this is typed, does not run any more"
    reason = found.lacks(asked, options)
    return found if reason is None else f"SLURM job {number}, in which this is typed, can't give it: {reason}"


def only_node(own: Mapping[str, str]) -> Allocation | str:
    """The SLURM job of one node that this is typed in; else why jobs of this machine's engine can't run in one. Raises
    EngineMissing, EngineAway."""
    number = own.get("SLURM_JOB_ID")
    if number is None:
        return "this is not typed in a SLURM job (SLURM_JOB_ID is not set); salloc starts one"
    found = allocation(commands.Programs().job(number))
    if found is None:
        return f"SLURM job {number}, in which this is typed, does not run any more"
    if len(found.nodes) != 1:
        return (
            f"SLURM job {number}, in which this is typed, has {len(found.nodes)} nodes, and jobs would run on one "
            "of them only; to use all, start this command with --engine local on each node (srun --nodes=1)"
        )
    return found


def is_on(node: Node, own: Mapping[str, str]) -> bool:
    """Whether this process runs on the node; the shell of salloc often runs on the login node."""
    return own.get("SLURMD_NODENAME") == node.name


def place_for(wanted: Sequence[Placement], options: EngineOptions, own: Mapping[str, str]) -> Allocation | str:
    """The SLURM job in which jobs with these wishes can all run from here, on this node; else why they can't.

    ``own``: this process's variables. Raises EngineMissing, EngineAway.
    """
    found = only_node(own)
    if isinstance(found, str):
        return found
    (node,) = found.nodes
    if not is_on(node, own):
        return f"this does not run on {node.name}, the node of that job; --in-allocation runs it there"
    for name in _OF_OWN_JOBS:
        if getattr(options, name):
            return f"--{name.replace('_', '-')} is for SLURM jobs of their own"
    found = replace(found, nodes=(_part(node, own),))
    return found.lacks_for_all(wanted, options) or found


def _part(node: Node, own: Mapping[str, str]) -> Node:
    """What of the job's node this process may use: a step can have less than its job."""
    visible = len(named_in(own))
    cpus = own.get("SLURM_CPUS_ON_NODE", "")
    return replace(
        node,
        gpus=node.gpus if visible >= node.count(None) else {next(iter(node.gpus)): visible},
        cpus=min(node.cpus, int(cpus)) if cpus.isdigit() else node.cpus,
        memory_mb=min(node.memory_mb, host.memory_mb() or node.memory_mb),
    )


def in_step(own: Mapping[str, str]) -> bool:
    """Whether these variables are those of a step that holds its resources; the shells of sbatch and salloc don't."""
    step = own.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _FIRST_SPECIAL_STEP


def _on_the_node(argv: Sequence[str], asked: Placement, setup: Sequence[str]) -> list[str]:
    """The command behind a shell that becomes it, after the user's own lines."""
    hidden = [] if asked.gpus else [f"export {name}={value}" for name, value in visible_environment(()).items()]
    several = [SHELL_PLACE] if asked.nodes * asked.tasks > 1 else []
    text = "\n".join([_FORGET, *hidden, *several, *setup, 'exec "$@"'])
    # As in a script for sbatch: what sites define for their users ("module") they define for bash.
    return ["/bin/bash" if setup else "/bin/sh", "-c", text, "gpuherd-run", *argv]
