"""``gpuherd simulate``: predicts how jobs would run on given machines, in virtual time, and compares rules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_json, print_json, progress_bar, progress_of, write_file
from gpuherd.errors import ExitCode, UsageError
from gpuherd.options import Parser, add_options, build
from gpuherd.simulate.options import Rules, SimulateOptions

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress

    from gpuherd.cli.job_start import AvailableGpus
    from gpuherd.jobs.job import Planner
    from gpuherd.simulate.results import Result
    from gpuherd.simulate.workload import Scenario

SIMULATE = """\
Replays jobs on machines of any size in virtual time, with the policy of real runs. Shows how long the jobs would take,
how well they would use the GPUs, and how long they would wait. Nothing is started.

examples:
  gpuherd simulate results --machine 8x80GB                  a run folder again, with the durations of its jobs
  gpuherd simulate jobs.yaml --seconds 20m --machine 4x24GB  a job file that has not run yet
  gpuherd simulate --jobs 2000 --seconds lognormal:5m,1 --machine 8x80GB --compare order=age,longest max_checks=1,10
  gpuherd simulate --jobs 64 --seconds 5m --machine 8x80GB --compare policy=gpuherd,guides
  gpuherd simulate --jobs 100000 --num-gpus 1:8,4:2 --seconds exponential:5m --machines 125x8x80GB
  gpuherd simulate --jobs 20000 --num-nodes 1:9,2:1 --seconds 5m --machines 125x8x80GB --policy handover --at-most 1100
  gpuherd simulate results --machine 8x80GB --background busy=0.3,mean=2h,barge=0.1 --compare yield=ignore,pause,requeue

docs/what-if.md describes what is modelled and what is not.
"""


def add_simulate(parser: Parser) -> None:
    parser.add_argument(
        "source", nargs="?", metavar="SOURCE", help="a run folder, or a job file as for gpuherd batch (or give --jobs)"
    )
    add_options(parser, SimulateOptions)
    add_options(parser, Rules)
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="RULE=A,B",
        help="simulate every combination of these rules: order=age,longest max_checks=1,10 share=on,off …",
    )
    parser.add_argument("--plot", metavar="FILE.svg", help="draw all runs into this file")
    add_json(parser, "the figures")


def run_simulate(args: argparse.Namespace) -> int:
    """Simulates and prints. Returns 0 also if jobs failed in the simulation, because that is a result."""
    from gpuherd.simulate import simulate
    from gpuherd.simulate.options import variants

    options = build(SimulateOptions, args)
    found = variants(build(Rules, args), args.compare)
    scenario = _scenario(args.source, options)
    with progress_bar() as bar:
        results = simulate(scenario, found, _progress(bar, [variant.name for variant in found]))
    if args.plot is not None:
        from pathlib import Path

        _plot(Path(args.plot), scenario, results)
    if args.json:
        print_json(_as_json(scenario, options, results))
    else:
        _print(scenario, results)
    return ExitCode.OK


def _scenario(source: str | None, options: SimulateOptions) -> Scenario:
    from gpuherd.simulate.workload import MONDAY, Scenario

    if (source is None) == (options.jobs is None):
        raise UsageError("name a run folder or a job file, or say --jobs N, one of them; see gpuherd simulate --help")
    if (options.machine is None) == (options.machines is None):
        raise UsageError("say which GPUs: --machine 8x80GB, or --machines 125x8x80GB")
    return Scenario(
        machines=options.machine or options.machines or (),
        works=_jobs(source, options),
        background=options.background,
        seed=options.seed,
        starts_at=options.begin or MONDAY,
    )


def _jobs(source: str | None, options: SimulateOptions) -> Any:
    """The jobs to simulate: random ones, those of an earlier run, or those of a job file."""
    from pathlib import Path
    from random import Random

    from gpuherd.jobs.run_dir import RunDirectory
    from gpuherd.simulate.workload import drawn, listed

    random = Random(options.seed)  # noqa: S311 - a simulation, no secret
    recipe = options.recipe()
    if source is None:
        if recipe is None:
            raise UsageError("--jobs needs --seconds: how long a job runs, like 5m or lognormal:5m,1")
        return drawn(options.jobs or 0, recipe, random)
    options.refuse_for_given_jobs()
    path = Path(source)
    if path.is_dir() or path.suffix == ".sqlite":
        from gpuherd.simulate.workload import read_queue, replayed

        return replayed(read_queue(RunDirectory(path).queue if path.is_dir() else path), recipe, random)

    from gpuherd.batch.assemble import FileRules, read_jobs

    if recipe is None:
        raise UsageError(f"{source} does not say how long its jobs run; give --seconds 10m, or --seconds cost")
    return listed(read_jobs(source, FileRules(planner=_planner(options))), recipe, random)


def _planner(options: SimulateOptions) -> Planner:
    """Memory plans for jobs that name a model, on the largest machine, because a job runs on one machine."""
    from gpuherd.cli.job_start import JOB_FILE_KEYS, gpus_as_idle, planner

    def largest() -> AvailableGpus:
        machines = options.machine or options.machines or ()
        return gpus_as_idle(max(machines, key=lambda gpus: sum(gpu.total_mb for gpu in gpus)))

    return planner(largest, spelling=JOB_FILE_KEYS)


# ---- output ----------------------------------------------------------------------------------------------------------


def _as_json(scenario: Scenario, options: SimulateOptions, results: Sequence[Result]) -> dict[str, Any]:
    """The figures, as docs/what-if.md describes them."""
    return {
        "jobs": len(scenario.works),
        "machines": len(scenario.machines),
        "gpus": sum(len(gpus) for gpus in scenario.machines),
        "seed": options.seed,
        "runs": [{"name": result.variant.name or "as given", **result.figures.to_dict()} for result in results],
    }


def _print(scenario: Scenario, results: Sequence[Result]) -> None:
    from rich.console import Console

    from gpuherd.simulate.charts import remarks, table, timeline

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    unicode = (sys.stdout.encoding or "ascii").lower().replace("-", "").startswith("utf")
    width = min(console.width, 80) if console.is_terminal else 80
    for result in results:
        if result.variant.name:
            print(result.variant.name)
        print(timeline(result.history, width=width, unicode=unicode), end="\n\n")
    console.print(table(results))
    for remark in remarks(scenario, results):
        print(remark)


def _progress(bar: Progress | None, names: Sequence[str]) -> Callable[[int, int, int], None] | None:
    """Returns a callback for the jobs done of a run, by its number; None without a bar."""
    update = progress_of(bar, "simulating")
    if update is None:
        return None
    return lambda number, done, total: update(
        number + done / max(1, total), float(len(names)), names[number] or "simulating"
    )


def _plot(path: Path, scenario: Scenario, results: Sequence[Result]) -> None:
    from gpuherd.simulate.charts import Panel, gantt, headline, line

    panels = [Panel(result.variant.name, line(result), result.history) for result in results]
    write_file(path, gantt(panels, scenario.works, title=headline(scenario)).encode(), "--plot")
