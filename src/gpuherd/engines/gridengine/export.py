"""Jobs as files for Grid Engine: for each group of like jobs a script and a file of commands, and a script that submits
all. Pure.

``-hold_jid`` waits for an end, good or bad, and for whole arrays only. So a job that has succeeded leaves a file in
``done/``, and one that needs it looks for that before it begins.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from gpuherd.engines.base import ExportJob, Placement
from gpuherd.engines.export import Group, Place, comment, groups_of
from gpuherd.engines.gridengine import translate
from gpuherd.engines.gridengine.options import GridEngineOptions
from gpuherd.engines.gridengine.parse import Complex
from gpuherd.errors import UsageError

SUBMIT = "submit.sh"
# Used where no Grid Engine answers: GPUs are requested once for a job.
_ASSUMED = "JOB"
_USUAL_ENVIRONMENT = "smp"
_GPUS = """\
# Grid Engine counts GPUs; which they are the site says, by CUDA_VISIBLE_DEVICES or SGE_GPU.
if [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
    gpus="${SGE_HGR_gpu:-${SGE_GPU:-}}"
    if [ -n "$gpus" ]; then export CUDA_VISIBLE_DEVICES="${gpus// /,}"; fi
fi
export CUDA_DEVICE_ORDER=PCI_BUS_ID"""
_RUN = """\
# Before its time is up, and before it is deleted, Grid Engine signals this script; the job gets SIGTERM, to save what
# it has.
set -m
bash -c "$line" &
job=$!
trap 'kill -TERM -- "-$job"' USR1 USR2 TERM
wait "$job"
code=$?
while kill -0 "$job" 2>/dev/null; do
    wait "$job"
    code=$?
done"""
_TAIL = """\
# 99 and 100 mean something else to Grid Engine: run again, and keep in error.
if [ "$code" = 99 ] || [ "$code" = 100 ]; then code=1; fi
exit "$code"
"""


def files(
    jobs: Sequence[ExportJob], options: GridEngineOptions, known: Mapping[str, Complex] | None
) -> Mapping[str, str]:
    """Texts by file name. ``known``: the cluster's resources, None where they can't be asked for.

    Raises UsageError for jobs and options that can't be exported.
    """
    groups = groups_of(jobs)
    found: dict[str, str] = {}
    for group in groups:
        found[f"{group.name}.commands"] = "".join(f"{job.line}  # {comment(job.name)}\n" for job in group.jobs)
        found[f"{group.name}.qsub"] = _script(group, groups, options, known)
    found[SUBMIT] = _submit(groups)
    return found


def _script(
    group: Group, groups: Sequence[Group], options: GridEngineOptions, known: Mapping[str, Complex] | None
) -> str:
    jobs, name = len(group.jobs), group.name
    task = "${SGE_TASK_ID}" if jobs > 1 else "1"
    lines = [
        "#!/bin/bash",
        f"# {jobs} job{'s' if jobs > 1 else ''}, one a line of {name}.commands. To be submitted from this folder, as "
        f"{SUBMIT} does.",
        *(f"#$ {_word(word)}" for word in _directives(group, options, known)),
        "",
        _GPUS if group.placement.gpus else "export CUDA_VISIBLE_DEVICES=",
        *options.setup,
        *_needs(group.after, groups),
        f'line=$(sed -n "{task}p" {name}.commands)',
        f'if [ -z "$line" ]; then echo "{name}.commands has no such line" >&2; exit 2; fi',
        _RUN,
        f'if [ "$code" = 0 ]; then : >"done/{name}.{task}"; fi',
    ]
    return "\n".join(lines) + "\n" + _TAIL


def _needs(after: Sequence[Place], groups: Sequence[Group]) -> list[str]:
    if not after:
        return []
    files_there = [f"done/{groups[place.group].name}.{place.index + 1}" for place in after]
    return [
        f"for needed in {' '.join(files_there)}; do",
        '    if [ ! -e "$needed" ]; then echo "left out: $needed is not there, it has not succeeded" >&2; exit 1; fi',
        "done",
    ]


def _directives(group: Group, options: GridEngineOptions, known: Mapping[str, Complex] | None) -> list[str]:
    jobs, placement = len(group.jobs), group.placement
    words = [f"-N {translate.job_name(group.name)}", "-S /bin/bash", "-cwd", "-j y", "-r n", "-notify"]
    words.append(f"-o logs/{group.name}{'.$TASK_ID' if jobs > 1 else ''}.log")
    if jobs > 1:
        words.append(f"-t 1-{jobs}")
        if options.array_limit is not None and options.array_limit < jobs:
            words.append(f"-tc {options.array_limit}")
    requests = _requests(placement, options, known)
    # A directive a line: an option with its value.
    for word in requests:
        if word.startswith("-"):
            words.append(word)
        else:
            words[-1] += f" {word}"
    return words


def _requests(placement: Placement, options: GridEngineOptions, known: Mapping[str, Complex] | None) -> Sequence[str]:
    if placement.nodes > 1:
        raise UsageError(f"a job spans {placement.nodes} nodes; exported files can't start that in Grid Engine")
    environment = None
    if placement.cpus is not None and placement.cpus > 1:
        environment = (options.sge_pe or _USUAL_ENVIRONMENT, placement.cpus)
    if known is None:
        known = {options.sge_gpu: Complex("INT", _ASSUMED), options.sge_memory: Complex("MEMORY", "NO")}
    try:
        return translate.requests(placement, options, known, environment)
    except translate.CannotRequest as problem:
        raise UsageError(str(problem)) from None


def _word(word: str) -> str:
    """A line of qsub's own directives."""
    if not word.isprintable():
        raise UsageError(f"{word!r} can't be written into a script for qsub; take out what is not printable")
    return word


def _submit(groups: Sequence[Group]) -> str:
    jobs = sum(len(group.jobs) for group in groups)
    lines = [
        "#!/bin/bash",
        f"# Hands {jobs} job{'s' if jobs != 1 else ''} to Grid Engine: bash {SUBMIT}",
        "# A group begins when all that it needs has ended; a job runs if that has succeeded. What was submitted stays",
        "# when a later one is refused: qdel takes it back, by the numbers that are printed.",
        "set -euo pipefail",
        "unset CDPATH",
        "here=${BASH_SOURCE[0]}",
        'if [[ $here == */* ]]; then cd -- "${here%/*}"; fi',
        "rm -rf done",
        "mkdir -p logs done",
    ]
    for number, group in enumerate(groups, start=1):
        after = sorted({place.group for place in group.after} | set(group.behind))
        held = [f'-hold_jid "{",".join(f"$job_{each + 1}" for each in after)}"'] if after else []
        more = f" and {len(group.jobs) - 1} more" if len(group.jobs) > 1 else ""
        lines += [
            "",
            f"# {comment(group.jobs[0].name)}{more}",
            f"job_{number}=$({' '.join(['qsub', '-terse', *held, shlex.quote(f'{group.name}.qsub')])})",
            f"job_{number}=${{job_{number}%%.*}}",
            f'echo "{group.name}: $job_{number}"',
        ]
    return "\n".join(lines) + "\n"
