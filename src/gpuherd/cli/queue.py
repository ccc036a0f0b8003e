"""Queues: ``gpuherd submit``, ``up`` and ``down`` for the user's own; ``cancel``, ``set`` and the like change a run."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import (
    add_command_words,
    add_folder,
    add_folder_and_jobs,
    add_json,
    add_own_queue,
    command_words,
    console_for,
    default_engine,
    engine_flag,
    hint_at_folder,
    print_json,
    print_note,
    run_of,
    split_jobs,
)
from gpuherd.engines.registry import LOCAL, ClusterOptions, names
from gpuherd.errors import ExitCode, UsageError, printable
from gpuherd.options import Option, Parser, add_options, build, given, option_fields, same_option, spellings

if TYPE_CHECKING:
    from gpuherd.jobs.job import Job, Planner


SUBMIT = """\
Puts a command into your own queue, which gpuherd up works off in the background, and prints the name of the job. The
job runs in the current folder and with the current environment.

examples:
  gpuherd submit -- python train.py --seed 1
  gpuherd submit --num-gpus 1-4 --mem 30GB --name large --priority 5 -- python train.py
  gpuherd submit --needs large --timeout 2h -- python evaluate.py
  gpuherd submit --model llama-3.1-70b --batch 8 -- python generate.py     GPUs and memory by the model's plan
  gpuherd up                                       start to work off the queue
  gpuherd status                                   the state of the queue

The queue is in ~/.local/state/gpuherd/queue or in GPUHERD_QUEUE. Each engine has a queue of its own; those of clusters
have the engine's name behind it (queue-slurm). Partition, account and the like are options of gpuherd up, for the whole
queue.
"""


def add_submit(parser: Parser) -> None:
    from gpuherd.jobs.job import Job, ModelUse

    add_options(parser, Job)
    add_options(parser, ModelUse)
    add_own_queue(parser, "what is to run it: your queue for this engine (default: that of your settings, or local)")
    parser.add_argument(
        "--node-gpus", metavar="GPUS", help=same_option(ClusterOptions, "node_gpus").metadata["option"].help
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    add_json(parser, "the job")
    add_command_words(parser)


def run_submit(args: argparse.Namespace) -> int:
    """Submits the command and prints the job's name."""
    from gpuherd.batch.user_queue import check, submit, with_surroundings
    from gpuherd.cli.job_start import simulate_here
    from gpuherd.jobs.job import Job, ModelUse, job_fields

    argv = command_words(args)
    _warn_of_missing_program(argv[0])
    options = given(Job, args) | given(ModelUse, args)
    name = options.get("name")
    simulate_here(args)
    engine = default_engine(starts_jobs=True) if args.engine is None else args.engine
    # A job without a name gets the next number in the queue.
    job = Job(**{"name": "new", **job_fields(options, planner=_planner(engine, args.node_gpus)), "argv": tuple(argv)})
    job = with_surroundings(job, os.environ, os.getcwd())  # noqa: PTH109 - as text, whatever it is
    if args.dry_run:
        check(job, named=name is not None, engine=engine)
        if args.json:
            print_json(_planned(job, name, engine))
        else:
            print(_sentence(job, name, engine))
        return ExitCode.OK
    submitted = submit(job, named=name is not None, engine=engine)
    if args.json:
        print_json({"name": submitted.job.name, "state": submitted.state.value, "worker": submitted.worker})
    else:
        print(submitted.job.name)
    if submitted.state.value == "done":
        print_note(f"{submitted.job.name} is done already; gpuherd retry runs it again")
    elif submitted.worker is None:
        print_note(f"no gpuherd works off this queue now; start it with: gpuherd up{engine_flag(engine)}")
    return ExitCode.OK


def _planned(job: Job, name: str | None, engine: str) -> dict[str, Any]:
    return {
        "name": name,
        "argv": list(job.argv),
        "cwd": job.cwd,
        "engine": engine,
        "gpus": job.gpus,
        "memory_mb": job.memory_mb,
        "nodes": job.nodes,
        "cpus": job.cpus,
        "host_memory_mb": job.host_memory_mb,
    }


def _sentence(job: Job, name: str | None, engine: str) -> str:
    to = ""
    if engine != LOCAL:
        from gpuherd.jobs.feasibility import in_words, would_ask
        from gpuherd.jobs.options import DispatchOptions

        to = f" to {engine}, for {in_words(would_ask(job, DispatchOptions()))}"
    return f"would submit {name or '(the next number)'}{to}: {printable(shlex.join(job.argv))}"


def _planner(engine: str, node_gpus: str | None) -> Planner:
    from gpuherd.cli.job_start import check_node_gpus, gpus_of_cluster, gpus_of_own_queue, planner
    from gpuherd.engines.options import EngineOptions

    check_node_gpus(node_gpus)
    cluster = EngineOptions(engine=engine, node_gpus=node_gpus)  # refuses --node-gpus without a cluster
    return planner(gpus_of_own_queue if engine == LOCAL else partial(gpus_of_cluster, cluster))


def _warn_of_missing_program(word: str) -> None:
    """Warns if there is no such program now. That is no error, because an earlier job may create it."""
    # shutil.which would take a tenth of the time of the whole command.
    if "/" not in word and not any(os.access(f"{folder}/{word}", os.X_OK) for folder in os.get_exec_path()):
        hint = "; write the words apart: -- python train.py" if " " in word else ""
        print_note(f"there is no program {printable(word)!r} in any folder of PATH yet{hint}")


UP = """\
Starts to work off your own queue, to which gpuherd submit adds, in the background. It goes on after logout, and while
the queue is empty, until gpuherd down.

examples:
  gpuherd up --max-gpus 4
  gpuherd up --gpu-list 4 5 6 7 --yield requeue
  gpuherd up --foreground                          for systemd, or to watch it
  gpuherd status                                   the state of the queue
  gpuherd set --max-gpus 2                         change options while it works
  gpuherd down

Exit codes: 0 it works, 75 another one works already; with --foreground 130 and 143 if a signal left jobs undone.
"""


def add_up(parser: Parser) -> None:
    from gpuherd.jobs.options import DispatchOptions

    # No --share: a job shares its GPU if it was submitted with that.
    add_options(parser, DispatchOptions, only={field.name for field, _ in option_fields(DispatchOptions)} - {"share"})
    parser.add_argument("--foreground", action="store_true", help="stay in the foreground and show what happens")
    add_json(parser, "the dispatcher's pid and folder")


def run_up(args: argparse.Namespace) -> int:
    """Starts the dispatcher, or with ``--foreground`` becomes it."""
    from gpuherd.batch.daemon import forget_environment, log_file, up
    from gpuherd.batch.user_queue import open_folder
    from gpuherd.cli.job_start import load_for
    from gpuherd.jobs.options import DispatchOptions

    load_for(args, DispatchOptions, stays=False)
    options = replace(build(DispatchOptions, args), share=True)
    foreground = options.spec.foreground()
    notice = None if foreground is None else foreground.queue_notice(options)
    if notice is not None:
        print_note(notice)
    directory = open_folder(engine=options.engine)
    if args.foreground:
        from gpuherd.jobs.monitor.display import display
        from gpuherd.jobs.run import work_off

        console = console_for(args, highlight=False)
        forget_environment(options.engine)
        with display(console) as live:
            return work_off(directory, options, serve=True, display=live).exit_code
    pid = up(options, directory)
    if args.json:
        print_json({"pid": pid, "queue": str(directory.root), "log": str(log_file(directory))})
    else:
        print(f"gpuherd (pid {pid}) works off {directory.root}; log: {log_file(directory)}")
    return ExitCode.OK


DOWN = """\
Stops what gpuherd up has started. Running jobs go on to their end; with --now they are stopped and put back into the
queue. Waiting jobs wait for the next gpuherd up. Jobs on a cluster go on there, too, except with --now.

examples:
  gpuherd down
  gpuherd down --now
"""


def add_down(parser: Parser) -> None:
    parser.add_argument("--now", action="store_true", help="stop running jobs and put them back into the queue")
    add_own_queue(parser, "the queue for this engine (default: the one that is worked off)")
    add_json(parser, "the response")


def run_down(args: argparse.Namespace) -> int:
    """Requests the dispatcher to exit. Returns 0 also if there is none."""
    from gpuherd.batch.daemon import down

    answer = down(now=args.now, engine=_active_engine(args))
    ok, text = (True, "nothing works your queue off") if answer is None else (answer.ok, answer.text)
    if args.json:
        print_json({"ok": ok, "was_up": answer is not None, "text": text})
    else:
        print(text)
    return ExitCode.OK if ok else ExitCode.FAILED


def _active_engine(args: argparse.Namespace) -> str:
    """The engine of the queue to stop: without ``--engine`` the one whose queue has a dispatcher.

    Raises UsageError if several queues have one, and that of the default engine has none.
    """
    from gpuherd.batch.user_queue import folder
    from gpuherd.jobs.lock import DispatcherLock
    from gpuherd.jobs.run_dir import RunDirectory

    if args.engine is not None:
        return str(args.engine)
    default = default_engine()
    active = [each for each in names() if DispatcherLock.holder(RunDirectory(folder(each)).lock) is not None]
    if len(active) > 1 and default not in active:
        raise UsageError(f"your queues for {' and '.join(active)} are worked off; say which: --engine {active[0]}")
    return default if default in active or not active else active[0]


# ---- commands that change a run while it is active -------------------------------------------------------------------
#
# ``gpuherd.jobs.control.client`` sends the request and waits for the response; here are the flags and the output.

CANCEL = """\
Ends jobs for good: waiting ones never start, running ones get SIGTERM and, 10 seconds later, SIGKILL. Jobs that need
them are cancelled with them. gpuherd retry runs them again.

examples:
  gpuherd cancel train-7                       in your own queue
  gpuherd cancel --run results model-3 model-4
  gpuherd cancel --run results --all
"""
RETRY = """\
Puts failed and cancelled jobs back into the queue with a full number of retries, together with the jobs that were
cancelled because of them.

examples:
  gpuherd retry train-7                        in your own queue
  gpuherd retry --run results model-3
  gpuherd retry --run results --all            all failed and cancelled jobs
"""
PAUSE = """\
Pauses jobs: waiting ones are not started, the processes of running ones are stopped (SIGSTOP). Stopped processes keep
their GPUs and their memory, and their time limits do not run.

examples:
  gpuherd pause train-7                        in your own queue
  gpuherd pause --run results --all
"""
RESUME = """\
Resumes paused jobs.

examples:
  gpuherd resume train-7                       in your own queue
  gpuherd resume --run results --all
"""
PRIORITY = """\
Gives waiting and running jobs another priority: a whole number, 0 where none was given. Jobs with a higher one start
first; running ones go on, and have it if they are tried again.

examples:
  gpuherd priority train-7 --to 5              in your own queue
  gpuherd priority train-8 --to -1             after all others
  gpuherd priority --run results model-3 model-4 --to 5
"""
DRAIN = """\
Makes the gpuherd that works on a run start no more jobs and exit when its running jobs have ended, as Ctrl-C does.
Waiting jobs stay in the queue for the next time.

examples:
  gpuherd drain                                your own queue
  gpuherd drain results                        or --run results
"""
SET = """\
Changes options of a run while it is active. Running jobs keep what they have; jobs that start from now on follow the
new options. The options hold until the run ends.

examples:
  gpuherd set --gpus 4,5 --max-checks 3        your own queue
  gpuherd set --run results --max-gpus 2
  gpuherd set --run results --gpus all --max-concurrent none
"""


def _add_for_jobs(parser: Parser) -> None:
    """The arguments of a request about some jobs of a run, or about all."""
    add_folder_and_jobs(parser)
    parser.add_argument("--all", action="store_true", dest="all_jobs", help="all jobs to which this applies")
    add_json(parser, "the response")


add_cancel = add_retry = add_pause = add_resume = _add_for_jobs


def add_priority(parser: Parser) -> None:
    """The new priority, and the jobs."""
    parser.add_argument("--to", dest="priority", metavar="NUMBER", required=True, help="the new priority")
    _add_for_jobs(parser)


def add_drain(parser: Parser) -> None:
    add_folder(parser)
    add_json(parser, "the response")


def add_set(parser: Parser) -> None:
    """A flag for each dispatch option that can be changed."""
    from gpuherd.jobs.options import SETTABLE, DispatchOptions

    add_drain(parser)
    group = parser.add_argument_group("what to set")
    for field, spec in option_fields(DispatchOptions):
        if field.name not in SETTABLE:
            continue
        visible, aliases = spellings(field.name, spec)
        # The dispatcher parses the words, as it parsed those of its own command line.
        common = {"dest": field.name, "default": argparse.SUPPRESS, "nargs": "+" if spec.many else None}
        group.add_argument(*visible, help=spec.help.replace("%", "%%"), metavar=_metavar(spec), **common)  # type: ignore[arg-type]
        if aliases:
            group.add_argument(*aliases, help=argparse.SUPPRESS, **common)  # type: ignore[arg-type]


def _metavar(spec: Option) -> str:
    if spec.choices is not None:
        return "|".join(spec.choices)
    return spec.metavar or "yes|no"


def run_set(args: argparse.Namespace) -> int:
    """Sends the options that are given. Raises UsageError if there are none."""
    from gpuherd.jobs.options import SETTABLE

    given = {name: getattr(args, name) for name in SETTABLE if hasattr(args, name)}
    if not given:
        raise UsageError("set: say what to set, for example --max-gpus 2")
    return _request(args, settings={name: w if isinstance(w, str) else ",".join(w) for name, w in given.items()})


def run_drain(args: argparse.Namespace) -> int:
    """Sends the request."""
    return _request(args)


def _run_for_jobs(args: argparse.Namespace) -> int:
    """Sends the request for the named jobs, or for all. Raises UsageError if both or neither are given."""
    split_jobs(args)
    if bool(args.jobs) == args.all_jobs:
        raise UsageError(f"{args.command}: name the jobs, or say --all" + (", not both" if args.jobs else ""))
    settings = {"priority": args.priority} if args.command == "priority" else None
    return _request(args, tuple(dict.fromkeys(args.jobs)), settings)


run_cancel = run_retry = run_pause = run_resume = run_priority = _run_for_jobs


def _request(args: argparse.Namespace, jobs: tuple[str, ...] = (), settings: Mapping[str, str] | None = None) -> int:
    """Sends the request of this command and prints the response.

    Returns 0 if all of it was carried out, 1 if not, and 75 if no response came in time: then it stays in the queue.
    """
    from gpuherd.jobs.control.client import send
    from gpuherd.jobs.control.messages import ControlKind, Request

    with hint_at_folder(args, jobs, "write --run {}"):
        answer = send(run_of(args), Request(ControlKind(args.command), jobs, settings or {}))
    if args.json:
        print_json(
            {"ok": answer.ok, "text": answer.text, "applied_by": answer.applied_by, "changed": list(answer.changed)}
        )
    elif answer.ok:
        print(printable(answer.text))
    else:
        print_note(printable(answer.text))
    if answer.applied_by is None:
        return ExitCode.BUSY
    return ExitCode.OK if answer.ok else ExitCode.FAILED
