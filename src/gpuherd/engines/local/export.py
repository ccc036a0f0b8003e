"""Jobs as one script for bash on one machine: a block a job, one after the other, GPUs as variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuherd.engines.base import ExportJob
from gpuherd.engines.export import IS_AMD, comment, quoted
from gpuherd.engines.registry import LOCAL, specs
from gpuherd.errors import UsageError
from gpuherd.gpus.visible import CUDA, HIP, ORDER, PCI_ORDER, ROCR, environment

RUN = "run.sh"

_HEAD = """\
#!/bin/bash
# {jobs}, each after all that it needs: bash {name}
# Only some of them: bash {name} 2 5 (their numbers are above them). What one prints is in logs/.
unset CDPATH
here=${{BASH_SOURCE[0]}}
if [[ $here == */* ]]; then cd -- "${{here%/*}}" || exit; fi
mkdir -p logs || exit
{gpus}
wanted=" $* "
declare -A how
failures=0

# begin NUMBER NAME NEEDED...: whether the job is to run.
begin() {{
    local number=$1 name=$2 needed
    shift 2
    if [[ $wanted != "  " && $wanted != *" $number "* ]]; then return 1; fi
    for needed in "$@"; do
        if [[ ${{how[$needed]:-}} == failed ]]; then
            echo "$number: $name: left out, it needs $needed, which has failed"
            how[$number]=failed failures=$((failures + 1))
            return 1
        fi
    done
    echo "$number: $name"
}}

# ended NUMBER CODE
ended() {{
    if [[ $2 == 0 ]]; then how[$1]=done; return; fi
    echo "$1: failed with exit code $2; see logs/$1.log"
    how[$1]=failed failures=$((failures + 1))
}}
"""
_GPUS = """\
# The GPUs to use, by number or UUID; or from outside: {first}=2 bash {name}
{lines}
export {order}
# show GPU...: the variables of the GPUs' maker.
if {is_amd}; then
    unset {cuda} GPU_DEVICE_ORDINAL
    show() {{ local IFS=,; export {rocr}="$*" {hip}=$(seq -s, 0 $(($# - 1))); }}
else
    show() {{ local IFS=,; export {cuda}="$*"; }}
fi"""
_NO_GPUS = "\n".join(f"export {name}={value}" for name, value in environment(()).items())
_TAIL = """\

if [[ $failures != 0 ]]; then echo "$failures failed"; exit 1; fi
"""


def files(jobs: Sequence[ExportJob]) -> Mapping[str, str]:
    """The script by its name. Raises UsageError for jobs on several nodes."""
    for job in jobs:
        if job.placement.nodes > 1:
            raise UsageError(f"job {job.name!r} spans {job.placement.nodes} nodes; that is for --to {_clusters()}")
    return {RUN: _head(jobs) + "".join(_block(number, job) for number, job in enumerate(jobs, start=1)) + _TAIL}


def _clusters() -> str:
    return " or --to ".join(spec.exporter.to for spec in specs() if spec.exporter and spec.name != LOCAL)


def _head(jobs: Sequence[ExportJob]) -> str:
    most = max((job.placement.gpus for job in jobs), default=0)
    lines = "\n".join(f"GPU_{number}=${{GPU_{number}:-{number}}}" for number in range(most))
    words = {"order": f"{ORDER}={PCI_ORDER}", "is_amd": IS_AMD, "rocr": ROCR, "hip": HIP, "cuda": CUDA}
    gpus = _GPUS.format(first="GPU_0", name=RUN, lines=lines, **words) if most else _NO_GPUS
    return _HEAD.format(jobs="1 job" if len(jobs) == 1 else f"{len(jobs)} jobs", name=RUN, gpus=gpus)


def _block(number: int, job: ExportJob) -> str:
    needs = "".join(f" {need + 1}" for need in job.needs)
    gpus = " ".join(f'"$GPU_{gpu}"' for gpu in range(job.placement.gpus))
    shown = f"show {gpus}" if gpus else _NO_GPUS.replace("\n", "; ")
    name = quoted(comment(job.name))
    return (
        f"\n# {number}: {comment(job.name)}\n"
        f"if begin {number} {name}{needs}; then\n"
        f"    (\n        {shown}\n"
        f"        {job.line}\n"
        f"    ) >logs/{number}.log 2>&1 </dev/null\n"
        f"    ended {number} $?\n"
        "fi\n"
    )
