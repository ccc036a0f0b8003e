"""Jobs as files for SLURM: for each group of like jobs a script and a file of commands, and a script that submits all.
Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from gpuherd.engines.base import ExportJob, Placement
from gpuherd.engines.export import Group, comment, groups_of, whole_groups
from gpuherd.engines.slurm import translate
from gpuherd.engines.slurm.node import SHELL_MEETING, SHELL_PLACE
from gpuherd.engines.slurm.options import SlurmOptions
from gpuherd.errors import UsageError
from gpuherd.gpus.visible import ORDER, PCI_ORDER, environment

SUBMIT = "submit.sh"
_HOLDING = """\
# What others need is held until all is handed over: a job that has ended badly, and that SLURM has forgotten, counts as
# succeeded there.
held=()
trap 'if [ "${#held[@]}" -gt 0 ]; then scontrol release "${held[@]}"; fi' EXIT
"""

_SEVERAL = """\
# {told} They meet at this port of the first node, or the next that is free there.
{meeting}
place=$(cat <<'PLACE'
{place}
PLACE
)
run=({srun} bash -c 'trap : TERM; eval "$2"; eval "$1"' bash "$line" "$place")
"""
_ONE_NODE = """\
run=(bash -c 'trap : TERM; eval "$1"' bash "$line")
"""
_RUN = """\
exec "${run[@]}"
"""
_RUN_WITH_NOTICE = """\
# Before the time is up SLURM sends SIGTERM to this script alone; the job gets it from here, to save what it has.
set -m
"${run[@]}" &
job=$!
trap 'kill -TERM -- "-$job"' TERM
wait "$job"
code=$?
while kill -0 "$job" 2>/dev/null; do
    wait "$job"
    code=$?
done
exit "$code"
"""


def files(jobs: Sequence[ExportJob], options: SlurmOptions) -> Mapping[str, str]:
    """Texts by file name. Raises UsageError for options that can't be."""
    return files_of(groups_of(jobs), options)


def files_of(groups: Sequence[Group], options: SlurmOptions) -> Mapping[str, str]:
    """The same for jobs that are in groups."""
    found: dict[str, str] = {}
    for group in groups:
        found[f"{group.name}.commands"] = "".join(f"{job.line}  # {comment(job.name)}\n" for job in group.jobs)
        found[f"{group.name}.sbatch"] = _script(group, options)
    found[SUBMIT] = _submit(groups, options)
    return found


def _script(group: Group, options: SlurmOptions) -> str:
    jobs = len(group.jobs)
    lines = [
        "#!/bin/bash",
        f"# {jobs} job{'s' if jobs > 1 else ''}, one a line of {group.name}.commands. To be submitted from this folder,"
        f" as {SUBMIT} does.",
        *(f"#SBATCH {_word(word)}" for word in _directives(group, options)),
        "",
    ]
    # SLURM names the GPUs where it has given any.
    shown = {ORDER: PCI_ORDER} if group.placement.gpus else environment(())
    lines += [f"export {name}={value}" for name, value in shown.items() if value or name != ORDER]
    if group.placement.cpus is not None:
        lines.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK")
    lines += options.setup
    lines += [
        f'line=$(sed -n "$((${{SLURM_ARRAY_TASK_ID:-0}} + 1))p" "$SLURM_SUBMIT_DIR/{group.name}.commands")',
        f'if [ -z "$line" ]; then echo "{group.name}.commands has no such line" >&2; exit 2; fi',
    ]
    text = "\n".join(lines) + "\n" + (_several(group.placement, options) or _ONE_NODE)
    return text + (_RUN if options.time_limit is None else _RUN_WITH_NOTICE)


def _several(asked: Placement, options: SlurmOptions) -> str | None:
    """How the processes of a job start, None where it is a single one."""
    if asked.nodes * asked.tasks == 1:
        return None
    where = f"The job spans {asked.nodes} nodes" if asked.nodes > 1 else "The job runs on one node"
    how = "one process of it starts on each." if asked.tasks == 1 else f"{asked.tasks} processes start on each."
    srun = shlex.join(translate.steps(asked.nodes, asked.tasks, mpi=options.mpi, more=()))
    return _SEVERAL.format(told=f"{where}: {how}", meeting=SHELL_MEETING, place=SHELL_PLACE, srun=srun)


def _directives(group: Group, options: SlurmOptions) -> list[str]:
    jobs = len(group.jobs)
    words = [f"--job-name={group.name}", f"--output=logs/%x{'.%a' if jobs > 1 else ''}.log"]
    if jobs > 1:
        limit = "" if options.array_limit is None else f"%{options.array_limit}"
        words.append(f"--array=0-{jobs - 1}{limit}")
    words += translate.resources(group.placement, options)
    if options.time_limit is not None:
        words.append(f"--signal=B:TERM@{translate.notice_s(options.notice, options.time_limit)}")
    return [*words, "--no-requeue", "--kill-on-invalid-dep=yes", *translate.checked(options.slurm_args)]


def _word(word: str) -> str:
    """A word of an #SBATCH line, which sbatch takes apart much as a shell does."""
    if not word.isprintable():
        raise UsageError(f"{word!r} can't be written into a script for sbatch; take out what is not printable")
    return shlex.quote(word)


def _submit(groups: Sequence[Group], options: SlurmOptions) -> str:
    held = _held(groups, options)
    jobs = sum(len(group.jobs) for group in groups)
    lines = [
        "#!/bin/bash",
        f"# Hands {jobs} job{'s' if jobs != 1 else ''} to SLURM: bash {SUBMIT}",
        "# Each group begins when all that it needs has succeeded. What was handed over stays when a later one is",
        "# refused: scancel takes it back, by the numbers that are printed.",
        "set -euo pipefail",
        "unset CDPATH",
        "here=${BASH_SOURCE[0]}",
        'if [[ $here == */* ]]; then cd -- "${here%/*}"; fi',
        "mkdir -p logs",
        *(_HOLDING.splitlines() if held else ()),
    ]
    for number, group in enumerate(groups, start=1):
        after = _dependency(group, groups)
        words = ["sbatch", "--parsable", *([f'--dependency="{after}"'] if after else [])]
        words += [*(["--hold"] if number in held else []), f"{group.name}.sbatch"]
        lines += [
            "",
            f"# {_told(group)}",
            f"job_{number}=$({' '.join(words)})",
            f"job_{number}=${{job_{number}%%;*}}",
            *([f'held+=("$job_{number}")'] if number in held else []),
            f'echo "{group.name}: ${{job_{number}}}"',
        ]
    return "\n".join(lines) + "\n"


def _held(groups: Sequence[Group], options: SlurmOptions) -> frozenset[int]:
    """The numbers of the groups that others need; none where the user holds all of them."""
    if {"--hold", "-H"} & set(options.slurm_args):
        return frozenset()
    found: set[int] = set()
    for group in groups:
        whole, single = whole_groups(group.after, groups)
        found |= {*whole, *(place.group for place in single)}
    return frozenset(number + 1 for number in found)


def _told(group: Group) -> str:
    more = f" and {len(group.jobs) - 1} more" if len(group.jobs) > 1 else ""
    return f"{comment(group.jobs[0].name)}{more}"


def _dependency(group: Group, groups: Sequence[Group]) -> str:
    whole, single = whole_groups(group.after, groups)
    needed = [f"${{job_{number + 1}}}" for number in sorted(whole)]
    needed += [f"${{job_{place.group + 1}}}_{place.index}" for place in single]
    parts = [f"afterok:{':'.join(needed)}"] if needed else []
    # What must have succeeded has ended too.
    behind = [f"${{job_{number + 1}}}" for number in group.behind if number not in whole]
    parts += [f"afterany:{':'.join(behind)}"] if behind else []
    return ",".join(parts)
