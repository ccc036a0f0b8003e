"""Jobs as files for SLURM. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from gpuherd.engines.base import ExportJob
from gpuherd.engines.export import (
    ONE_PROCESS,
    RUN,
    ClusterFiles,
    ExportGroup,
    grouped_dependencies,
    groups_of,
    run_with_notice,
)
from gpuherd.engines.slurm.commands import SLURM
from gpuherd.engines.slurm.engine import checked, notice, resources
from gpuherd.engines.slurm.node import SHELL_MEETING, SHELL_PLACE, steps
from gpuherd.engines.slurm.options import SlurmOptions
from gpuherd.gpus.visible import ORDER, PCI_ORDER, environment

_HOLDING = """\
# What others need is held until all is handed over: a job that has ended badly, and that SLURM has forgotten, counts as
# succeeded there.
held=()
trap 'if [ "${#held[@]}" -gt 0 ]; then scontrol release "${held[@]}"; fi' EXIT
"""
_SEVERAL = """\
# {comment} They meet at this port of the first node, or the next that is free there.
{meeting}
place=$(cat <<'PLACE'
{place}
PLACE
)
run=({srun} bash -c 'trap : TERM; eval "$2"; eval "$1"' bash "$line" "$place")
"""


def files(jobs: Sequence[ExportJob], options: SlurmOptions) -> Mapping[str, str]:
    """As ``Exporter.files``."""
    return SlurmFiles(groups_of(jobs), options).files()


class SlurmFiles(ClusterFiles):
    """The files for groups of jobs."""

    title = SLURM.title
    suffix = ".sbatch"
    directive = "#SBATCH"
    commands = '"$SLURM_SUBMIT_DIR/{}.commands"'
    submit_comments = """\
# Each group begins when all that it needs has succeeded. What was handed over stays when a later one is
# refused: scancel takes it back, by the numbers that are printed.
"""

    def __init__(self, groups: Sequence[ExportGroup], options: SlurmOptions):
        super().__init__(groups)
        self._options = options
        self._needed = [grouped_dependencies(group.after, groups) for group in groups]
        # Groups that others need; none where the user holds all of them.
        self._held: frozenset[int] = frozenset()
        if not {"--hold", "-H"} & set(options.slurm_args):
            self._held = frozenset(number for group in groups for number in {place.group for place in group.after})
        self.submit_setup = "mkdir -p logs\n" + (_HOLDING if self._held else "")

    def directives(self, group: ExportGroup) -> Sequence[str]:
        """As ``ClusterFiles.directives``; sbatch takes a line apart much as a shell does."""
        options, jobs = self._options, len(group.jobs)
        words = [f"--job-name={group.name}", f"--output=logs/%x{'.%a' if jobs > 1 else ''}.log"]
        if jobs > 1:
            limit = "" if options.array_limit is None else f"%{options.array_limit}"
            words.append(f"--array=0-{jobs - 1}{limit}")
        words += resources(group.placement, options)
        if options.time_limit is not None:
            words.append(f"--signal=B:TERM@{notice(options, options.time_limit)}")
        words += ["--no-requeue", "--kill-on-invalid-dep=yes", *checked(options.slurm_args)]
        return [shlex.quote(word) for word in words]

    def line_number(self, group: ExportGroup) -> str:  # noqa: ARG002
        """As ``ClusterFiles.line_number``."""
        return "$((${SLURM_ARRAY_TASK_ID:-0} + 1))"

    def before(self, group: ExportGroup) -> Sequence[str]:
        """As ``ClusterFiles.before``."""
        # SLURM names the GPUs where it has given any.
        shown = {ORDER: PCI_ORDER} if group.placement.gpus else environment(())
        lines = [f"export {name}={value}" for name, value in shown.items() if value or name != ORDER]
        if group.placement.cpus is not None:
            lines.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK")
        return [*lines, *self._options.setup]

    def run(self, group: ExportGroup) -> str:
        """As ``ClusterFiles.run``."""
        asked, process = group.placement, ONE_PROCESS
        if asked.nodes * asked.tasks > 1:
            where = f"The job spans {asked.nodes} nodes" if asked.nodes > 1 else "The job runs on one node"
            how = "one process of it starts on each." if asked.tasks == 1 else f"{asked.tasks} processes start on each."
            srun = shlex.join(steps(asked.nodes, asked.tasks, mpi=self._options.mpi, more=()))
            process = _SEVERAL.format(comment=f"{where}: {how}", meeting=SHELL_MEETING, place=SHELL_PLACE, srun=srun)
        return process + (RUN if self._options.time_limit is None else run_with_notice("TERM") + 'exit "$code"\n')

    def submission(self, number: int, group: ExportGroup) -> Sequence[str]:
        """As ``ClusterFiles.submission``."""
        whole, single = self._needed[number]
        needed = [f"${{job_{other + 1}}}" for other in sorted(whole)]
        needed += [f"${{job_{place.group + 1}}}_{place.index}" for place in single]
        # What must have succeeded has ended too.
        ended = [f"${{job_{other + 1}}}" for other in group.behind if other not in whole]
        after = ",".join(":".join((word, *jobs)) for word, jobs in (("afterok", needed), ("afterany", ended)) if jobs)
        return [
            "sbatch --parsable",
            *([f'--dependency="{after}"'] if after else []),
            *(["--hold"] if number in self._held else []),
            f"{group.name}{self.suffix}",
        ]

    def after_submission(self, number: int) -> Sequence[str]:
        """As ``ClusterFiles.after_submission``."""
        return [f'held+=("$job_{number + 1}")'] if number in self._held else []
