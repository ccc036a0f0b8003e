"""Jobs as files for Grid Engine. Pure but for the query of the cluster's resources.

``-hold_jid`` waits for an end, good or bad, and for whole arrays only. So a job that has succeeded leaves a file in
``done/``, and one that needs it looks for that before it begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuherd.engines.base import EngineAway, EngineMissing, ExportJob, Placement
from gpuherd.engines.export import ONE_PROCESS, ClusterFiles, ExportGroup, groups_of, run_with_notice
from gpuherd.engines.gridengine import translate
from gpuherd.engines.gridengine.commands import GRID_ENGINE, Complex
from gpuherd.engines.gridengine.options import GridEngineOptions
from gpuherd.errors import UsageError

_USUAL_ENVIRONMENT = "smp"
_SUCCESS = """\
if [ "$code" = 0 ]; then : >"done/{name}.{task}"; fi
# 99 and 100 mean something else to Grid Engine: run again, and keep in error.
if [ "$code" = 99 ] || [ "$code" = 100 ]; then code=1; fi
exit "$code"
"""


def files(jobs: Sequence[ExportJob], options: GridEngineOptions) -> Mapping[str, str]:
    """As ``Exporter.files``."""
    try:
        known = GRID_ENGINE.resources()
    except (EngineMissing, EngineAway):
        # Where no Grid Engine answers: GPUs are requested once for a job.
        known = {options.sge_gpu: Complex("INT", "JOB"), options.sge_memory: Complex("MEMORY", "NO")}
    return GridEngineFiles(groups_of(jobs), options, known).files()


class GridEngineFiles(ClusterFiles):
    """The files for groups of jobs. ``known``: the cluster's resources."""

    title = GRID_ENGINE.title
    suffix = ".qsub"
    directive = "#$"
    commands = "{}.commands"
    submit_comments = """\
# A group begins when all that it needs has ended; a job runs if that has succeeded. What was submitted stays
# when a later one is refused: qdel takes it back, by the numbers that are printed.
"""
    submit_setup = "rm -rf done\nmkdir -p logs done\n"

    def __init__(self, groups: Sequence[ExportGroup], options: GridEngineOptions, known: Mapping[str, Complex]):
        super().__init__(groups)
        self._options = options
        self._known = known

    def directives(self, group: ExportGroup) -> Sequence[str]:
        """As ``ClusterFiles.directives``."""
        jobs, limit = len(group.jobs), self._options.array_limit
        words = [f"-N {translate.job_name(group.name)}", "-S /bin/bash", "-cwd", "-j y", "-r n", "-notify"]
        # qsub, unlike sbatch, hands no environment on: with the PATH of the submitter a job finds the same programs.
        words.append("-v PATH")
        words.append(f"-o logs/{group.name}{'.$TASK_ID' if jobs > 1 else ''}.log")
        if jobs > 1:
            words.append(f"-t 1-{jobs}")
            words += [] if limit is None or limit >= jobs else [f"-tc {limit}"]
        for word in self._requests(group.placement):
            if word.startswith("-"):
                words.append(word)
            else:
                words[-1] += f" {word}"
        return words

    def _requests(self, placement: Placement) -> Sequence[str]:
        if placement.nodes > 1:
            raise UsageError(f"a job spans {placement.nodes} nodes; exported files can't start that in Grid Engine")
        environment = None
        if placement.cpus is not None and placement.cpus > 1:
            environment = (self._options.sge_pe or _USUAL_ENVIRONMENT, placement.cpus)
        try:
            return translate.requests(placement, self._options, self._known, environment)
        except translate.CannotRequest as problem:
            raise UsageError(str(problem)) from None

    def line_number(self, group: ExportGroup) -> str:
        """As ``ClusterFiles.line_number``."""
        return "${SGE_TASK_ID}" if len(group.jobs) > 1 else "1"

    def before(self, group: ExportGroup) -> Sequence[str]:
        """As ``ClusterFiles.before``."""
        lines = [*translate.gpus_of_site(group.placement.gpus), *self._options.setup]
        if group.after:
            needed = " ".join(f"done/{self.groups[place.group].name}.{place.index + 1}" for place in group.after)
            message = "left out: $needed is not there, it has not succeeded"
            lines.append(f"for needed in {needed}; do")
            lines.append(f'    if [ ! -e "$needed" ]; then echo "{message}" >&2; exit 1; fi')
            lines.append("done")
        return lines

    def run(self, group: ExportGroup) -> str:
        """As ``ClusterFiles.run``. Grid Engine also signals before it deletes a job."""
        success = _SUCCESS.format(name=group.name, task=self.line_number(group))
        return ONE_PROCESS + run_with_notice("USR1", "USR2", "TERM") + success

    def submission(self, number: int, group: ExportGroup) -> Sequence[str]:  # noqa: ARG002
        """As ``ClusterFiles.submission``."""
        after = sorted({place.group for place in group.after} | set(group.behind))
        held = [f'-hold_jid "{",".join(f"$job_{each + 1}" for each in after)}"'] if after else []
        return ["qsub -terse", *held, f"{group.name}{self.suffix}"]
