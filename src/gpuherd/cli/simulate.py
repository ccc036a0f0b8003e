"""``gpuherd simulate``: predicts how jobs would run on given machines, in virtual time, and compares rules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_json, print_json, progress_bar, progress_of, write_file
from gpuherd.errors import ExitCode, UsageError
from gpuherd.options import Parser, add_options, build
from gpuherd.simulate.options import Rules, SimulateOptions

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

    from rich.progress import Progress

    from gpuherd.cli.job_start import AvailableGpus
    from gpuherd.jobs.job import Planner
    from gpuherd.simulate.people import User
    from gpuherd.simulate.results import Result
    from gpuherd.simulate.workload import Scenario, Work

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
  gpuherd simulate --users alice:2,bob,carol --jobs 40 --seconds 3m --machine 4x80GB --user-arrives carol=30m
  gpuherd simulate alice=sweep bob=jobs.yaml --seconds 20m --machine 8x80GB --compare turns=on,off

docs/what-if.md describes what is modelled and what is not.
"""


def add_simulate(parser: Parser) -> None:
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="a run folder, or a job file as for gpuherd batch (or give --jobs); for several users one USER=SOURCE "
        "after the other",
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
    scenario = _scenario(args.sources, options)
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


def _scenario(sources: Sequence[str], options: SimulateOptions) -> Scenario:
    from gpuherd.simulate.workload import MONDAY, Scenario

    if not sources and options.jobs is None and options.users is None:
        raise UsageError("name a run folder or a job file, or say --jobs N, one of them; see gpuherd simulate --help")
    if (options.machine is None) == (options.machines is None):
        raise UsageError("say which GPUs: --machine 8x80GB, or --machines 125x8x80GB")
    users, works = _shared_work(sources, options)
    return Scenario(
        machines=options.machine or options.machines or (),
        works=works,
        background=options.background,
        seed=options.seed,
        starts_at=options.begin or MONDAY,
        users=users,
    )


def _shared_work(sources: Sequence[str], options: SimulateOptions) -> tuple[tuple[User, ...], tuple[Work, ...]]:
    """The users and the jobs of all; no users where there is one alone."""
    from random import Random

    by_user = _by_user(sources)
    if not by_user and options.users is None:
        if options.user_arrives is not None or options.user_hours is not None:
            raise UsageError("--user-arrives and --user-hours are for several users; name them: --users alice:2,bob")
        if sources and options.jobs is not None:
            raise UsageError("name a run folder or a job file, or say --jobs N, one of them")
        return (), _jobs(sources[0] if sources else None, options, Random(options.seed))  # noqa: S311 - no secret

    from gpuherd.simulate.people import with_histories, works_of

    if sources and not by_user:
        raise UsageError(f"{sources[0]}: whose jobs are these? With --users write alice={sources[0]}")
    users = with_histories(_users(by_user, options), options.user_arrives or {}, options.user_hours or {})
    if options.jobs is not None and all(user.name in by_user for user in users):
        raise UsageError("--jobs: each of the users has a source of jobs already")
    work = [
        # So that one user more changes nothing for the others.
        (user, _expected(by_user.get(user.name), options, Random(f"{options.seed}/{user.name}")))  # noqa: S311
        for user in users
    ]
    return users, works_of(work)


def _by_user(sources: Sequence[str]) -> dict[str, str]:
    """The source of each user who has one; {} where the only source names no user."""
    from pathlib import Path

    found: dict[str, str] = {}
    for source in sources:
        name, equals, path = source.partition("=")
        if not equals or "/" in name or (len(sources) == 1 and Path(source).exists()):
            if len(sources) == 1:
                return {}
            raise UsageError(f"{source}: whose jobs are these? With several sources write alice={source}")
        if name in found:
            raise UsageError(f"{name} has two sources, {found[name]} and {path}; give each user one")
        found[name] = path
    return found


def _users(by_user: Mapping[str, str], options: SimulateOptions) -> tuple[User, ...]:
    """The users that --users names with their weights; those of the sources where it is not given."""
    from gpuherd.options import did_you_mean
    from gpuherd.simulate.people import users

    if options.users is None:
        try:
            return users(",".join(by_user))
        except ValueError as problem:
            raise UsageError(str(problem)) from None
    names = [user.name for user in options.users]
    for name in by_user:
        if name not in names:
            raise UsageError(f"{name}={by_user[name]}: --users does not name {name}{did_you_mean(name, names, '')}")
    return options.users


def _expected(source: str | None, options: SimulateOptions, chance: Random) -> tuple[Work, ...]:
    """The jobs of one of several users, with the lengths that are expected where their costs tell them."""
    from gpuherd.simulate.people import with_expected_costs

    if source is None and options.jobs is None:
        raise UsageError("--users: say how many jobs each user has (--jobs 40), or where they come from: alice=FOLDER")
    works = _jobs(source, options, chance)
    if source is None:
        return with_expected_costs(works)
    return with_expected_costs(works, options.seconds) if isinstance(options.seconds, float) else works


def _jobs(source: str | None, options: SimulateOptions, random: Random) -> tuple[Work, ...]:
    """The jobs to simulate: random ones, those of an earlier run, or those of a job file."""
    from pathlib import Path

    from gpuherd.jobs.run_dir import RunDirectory
    from gpuherd.simulate.workload import drawn, listed

    recipe = options.recipe()
    if source is None:
        if recipe is None:
            raise UsageError("--jobs needs --seconds: how long a job runs, like 5m or lognormal:5m,1")
        return drawn(options.jobs or 0, recipe, random)
    if options.jobs is None:
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
        "runs": [_run_as_json(result) for result in results],
    }


def _run_as_json(result: Result) -> dict[str, Any]:
    figures = {"name": result.variant.name or "as given", **result.figures.to_dict()}
    return {**figures, "users": [user.to_dict() for user in result.users]} if result.users else figures


def _print(scenario: Scenario, results: Sequence[Result]) -> None:
    from rich.console import Console

    from gpuherd.simulate.charts import remarks, table, timeline
    from gpuherd.simulate.user_charts import user_table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    unicode = (sys.stdout.encoding or "ascii").lower().replace("-", "").startswith("utf")
    width = min(console.width, 80) if console.is_terminal else 80
    for result in results:
        if result.variant.name:
            print(result.variant.name)
        print(timeline(result.history, scenario.works, width=width, unicode=unicode), end="\n\n")
    console.print(table(results))
    if scenario.users:
        print()
        console.print(user_table(results))
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
