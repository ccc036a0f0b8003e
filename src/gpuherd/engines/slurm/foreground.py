"""One command in the foreground of SLURM: srun's words for it. Pure.

srun stays between the terminal and the command: signals, standard streams and the exit status go through it, and a
terminal, where there is one, is the command's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gpuherd.engines.cluster import Placement
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.slurm import commands, translate
from gpuherd.errors import ExitCode

# By these srun is told what to end with. The command is not to find them: it may start an srun of its own.
_EXIT_CODES = ("SLURM_EXIT_IMMEDIATE", "SLURM_EXIT_ERROR")
# Of several nodes each runs the command once; so they find each other, by torchrun's own names too.
_RENDEZVOUS = (
    'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    "export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) NNODES=$SLURM_NNODES NODE_RANK=$SLURM_NODEID",
    "export PET_MASTER_ADDR=$MASTER_ADDR PET_MASTER_PORT=$MASTER_PORT PET_NNODES=$NNODES PET_NODE_RANK=$NODE_RANK",
)
_ORDER, _VISIBLE = "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"


def srun(
    argv: Sequence[str],
    asked: Placement,
    options: EngineOptions,
    *,
    name: str,
    wait_s: float | None = None,
    terminal: bool = False,
) -> list[str]:
    """The argument list that runs the command on what is asked for.

    Args:
        name: what SLURM's users see of it.
        wait_s: give up when the nodes are not there after so many seconds; None: wait for ever.
        terminal: the command gets a terminal of its own.

    Raises UsageError for words of the user's that can't be.
    """
    words = ["srun", f"--job-name={name}", "--export=ALL", *translate.resources(asked, options)]
    if wait_s is not None:
        words.append(f"--immediate={max(1, math.ceil(wait_s))}")
    words += ["--pty"] if terminal else ["--quit-on-interrupt"]
    words += translate.checked(options.slurm_args, "srun")
    return [*words, *_on_the_node(argv, asked, options.setup)]


def environment(own: Mapping[str, str], asked: Placement) -> dict[str, str]:
    """What srun inherits, and the command after it. GPUs are as SLURM gives them, none where none were asked for."""
    found = {**commands.environment(own), _ORDER: "PCI_BUS_ID"}
    found.pop(_VISIBLE, None)
    if asked.gpus == 0:
        found[_VISIBLE] = ""
    if asked.cpus is not None:
        found["SRUN_CPUS_PER_TASK"] = str(asked.cpus)
    return found | dict.fromkeys(_EXIT_CODES, str(int(ExitCode.BUSY)))


def _on_the_node(argv: Sequence[str], asked: Placement, setup: Sequence[str]) -> list[str]:
    """The command behind a shell that becomes it, after the user's own lines."""
    hidden = [f"export {_VISIBLE}="] if asked.gpus == 0 else []
    several = _RENDEZVOUS if asked.nodes > 1 else ()
    ours = "; ".join([f"unset {' '.join(_EXIT_CODES)}", *hidden, *several])
    text = "\n".join([ours, *setup, 'exec "$@"']) if setup else f'{ours}; exec "$@"'
    # As in a script for sbatch: what sites define for their users ("module") they define for bash.
    return ["/bin/bash" if setup else "/bin/sh", "-c", text, "gpuherd-run", *argv]
