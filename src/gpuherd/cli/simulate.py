"""``gpuherd simulate``: what would become of these jobs on those machines, in virtual time, and by which rules best."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_command
from gpuherd.errors import CannotWrite, ExitCode, UsageError
from gpuherd.options import Parser, add_options, build
from gpuherd.simulate.options import Rules, SimulateOptions

if TYPE_CHECKING:
    from gpuherd.jobs.job import Planner
    from gpuherd.simulate.scenario import Progress, Result, Scenario

SIMULATE = """\
Replays jobs on machines of any size in virtual time, with the policy that real runs use, and tells how long it would
take, how well the GPUs would be used, and how long jobs would wait. Nothing is started.

examples:
  gpuherd simulate results --machine 8x80GB                  a run folder again: the lengths that its jobs had
  gpuherd simulate jobs.yaml --seconds 20m --machine 4x24GB  a job file, of which nothing has run yet
  gpuherd simulate --jobs 2000 --seconds lognormal:5m,1 --machine 8x80GB --compare order=age,longest max_checks=1,10
  gpuherd simulate --jobs 64 --seconds 5m --machine 8x80GB --compare policy=gpuherd,guides
  gpuherd simulate --jobs 100000 --num-gpus 1:8,4:2 --seconds exponential:5m --machines 125x8x80GB
  gpuherd simulate --jobs 20000 --num-nodes 1:9,2:1 --seconds 5m --machines 125x8x80GB --policy handover --at-most 1100
  gpuherd simulate results --machine 8x80GB --background busy=0.3,mean=2h,barge=0.1 --compare yield=ignore,pause,requeue

docs/what-if.md says what is modelled and what is not.
"""


def add_simulate(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "simulate", SIMULATE)
    parser.add_argument(
        "source", nargs="?", metavar="SOURCE", help="a run folder, or a job file as for gpuherd batch (or say --jobs)"
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
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw all runs into this file")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON in place of tables")
    parser.set_defaults(run=run_simulate)


def run_simulate(args: argparse.Namespace) -> int:
    """Simulates and prints. Exit code 0, also when jobs failed in the simulation: that is a result."""
    from gpuherd.simulate.options import variants
    from gpuherd.simulate.scenario import simulate

    options = build(SimulateOptions, args)
    found = variants(build(Rules, args), args.compare)
    scenario = _scenario(args.source, options)
    with _progress([variant.name for variant in found]) as progress:
        results = simulate(scenario, found, progress)
    if args.plot is not None:
        _plot(args.plot, scenario, results)
    if args.json:
        print(json.dumps(_as_json(scenario, options, results), indent=2, allow_nan=False))
    else:
        _print(scenario, results)
    return ExitCode.OK


def _scenario(source: str | None, options: SimulateOptions) -> Scenario:
    from gpuherd.simulate.cluster import MONDAY
    from gpuherd.simulate.scenario import Scenario

    if (source is None) == (options.jobs is None):
        raise UsageError("name a run folder or a job file, or say --jobs N, one of them; see gpuherd simulate --help")
    if (options.machine is None) == (options.machines is None):
        raise UsageError("say which GPUs: --machine 8x80GB, or --machines 125x8x80GB")
    return Scenario(
        machines=options.machine or options.machines or (),
        works=_works(source, options),
        background=options.background,
        seed=options.seed,
        starts_at=options.begin or MONDAY,
    )


def _works(source: str | None, options: SimulateOptions) -> Any:
    from random import Random

    from gpuherd.jobs.run_dir import RunDirectory
    from gpuherd.simulate.workload import drawn, listed

    chance = Random(options.seed)  # noqa: S311 - a simulation, no secret
    recipe = options.recipe()
    if source is None:
        if recipe is None:
            raise UsageError("--jobs needs --seconds: how long a job runs, like 5m or lognormal:5m,1")
        return drawn(options.jobs or 0, recipe, chance)
    options.refuse_for_given_jobs()
    path = Path(source)
    if path.is_dir() or path.suffix == ".sqlite":
        from gpuherd.simulate.workload import read_queue, replayed

        return replayed(read_queue(RunDirectory(path).queue if path.is_dir() else path), recipe, chance)

    from gpuherd.batch.assemble import FileRules, read_jobs

    if recipe is None:
        raise UsageError(f"{source} does not say how long its jobs run; say --seconds 10m, or --seconds cost")
    return listed(read_jobs(source, FileRules(planner=_planner(options))), recipe, chance)


def _planner(options: SimulateOptions) -> Planner:
    """What jobs that name a model need on the largest of the machines: a job runs on one."""
    from gpuherd.cli.job_start import JOB_FILE, Having, of_gpus, planner

    def largest() -> Having:
        machines = options.machine or options.machines or ()
        return of_gpus(max(machines, key=lambda gpus: sum(gpu.total_mb for gpu in gpus)))

    return planner(largest, spelling=JOB_FILE)


# --- what is printed ------------------------------------------------------------------------------------------


def _as_json(scenario: Scenario, options: SimulateOptions, results: Sequence[Result]) -> dict[str, Any]:
    """The figures; docs/what-if.md describes them."""
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


@contextmanager
def _progress(names: Sequence[str]) -> Iterator[Progress | None]:
    """A bar on standard error while people look; nothing else there."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=float(len(names)))

        def told(number: int, done: int, total: int) -> None:
            name = names[number] or "simulating"
            bar.update(task, completed=number + done / max(1, total), description=name)

        yield told


def _plot(path: Path, scenario: Scenario, results: Sequence[Result]) -> None:
    from gpuherd.atomic import atomic_write
    from gpuherd.simulate.charts import Panel, gantt, headline, line

    panels = [Panel(result.variant.name, line(result), result.history) for result in results]
    try:
        atomic_write(path, gantt(panels, scenario.works, title=headline(scenario)).encode())
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}; name another file with --plot") from None
