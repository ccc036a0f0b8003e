"""The user's own queue: ``gpuherd submit`` adds a command, ``up`` starts its dispatcher, ``down`` ends it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_command, add_own_queue, command_words, usual_engine
from gpuherd.cli.job_start import check_node_gpus, keep_simulation_here, load_for, on_stderr
from gpuherd.engines.options import ENGINES, EngineOptions
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import ExitCode, UsageError, printable
from gpuherd.jobs.job import Job, ModelUse, job_fields
from gpuherd.jobs.options import DispatchOptions
from gpuherd.options import Parser, add_options, build, given, option, same_option

if TYPE_CHECKING:
    from gpuherd.jobs.job import Planner

SUBMIT = """\
Puts a command into your own queue, which gpuherd up works off in the background, and prints the job's name. It runs in
the folder and with the environment that it was submitted from.

examples:
  gpuherd submit -- python train.py --seed 1
  gpuherd submit --num-gpus 1-4 --mem 30GB --name large --priority 5 -- python train.py
  gpuherd submit --needs large --timeout 2h -- python evaluate.py
  gpuherd submit --model llama-3.1-70b --batch 8 -- python generate.py     GPUs and memory by the model's plan
  gpuherd up                                       begin to work the queue off
  gpuherd status                                   how it stands

The queue is in ~/.local/state/gpuherd/queue, or where GPUHERD_QUEUE says; there is one for each engine, those of
clusters beside it (queue-slurm). Partition, account and the like are gpuherd up's to say, once for the whole queue.
"""


def add_submit(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "submit", SUBMIT)
    add_options(parser, Job)
    add_options(parser, ModelUse)
    add_own_queue(parser, "what is to run it: your queue for this engine (default: that of your settings, or local)")
    parser.add_argument(
        "--node-gpus", metavar="GPUS", help=same_option(EngineOptions, "node_gpus").metadata["option"].help
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    parser.add_argument("--json", action="store_true", help="print the job as JSON")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the command and its words")
    parser.set_defaults(run=run_submit)


def run_submit(args: argparse.Namespace) -> int:
    """Submits the command and prints the job's name."""
    from gpuherd.batch.user_queue import check, submit, with_surroundings

    argv = command_words(args)
    _warn_of_missing_program(argv[0])
    options = given(Job, args) | given(ModelUse, args)
    name = options.get("name")
    keep_simulation_here(args)
    engine = usual_engine(starts_jobs=True) if args.engine is None else args.engine
    planner = _planner(engine, args.node_gpus)
    # Without a name of its own it gets the next number in the queue.
    job = Job(**{"name": "new", **job_fields(options, planner=planner), "argv": tuple(argv)})
    job = with_surroundings(job, os.environ, os.getcwd())  # noqa: PTH109 - as text, whatever it is
    if args.dry_run:
        check(job, named=name is not None, engine=engine)
        print(json.dumps(_planned(job, name, engine), indent=2) if args.json else _sentence(job, name, engine))
        return ExitCode.OK
    submitted = submit(job, named=name is not None, engine=engine)
    if args.json:
        told = {"name": submitted.job.name, "state": submitted.state.value, "worker": submitted.worker}
        print(json.dumps(told, indent=2))
    else:
        print(submitted.job.name)
    if submitted.state.value == "done":
        print(f"gpuherd: {submitted.job.name} has been done before; gpuherd retry runs it anew", file=sys.stderr)
    elif submitted.worker is None:
        flag = "" if engine == LOCAL else f" --engine {engine}"
        print(f"gpuherd: nothing works the queue off yet; start it with: gpuherd up{flag}", file=sys.stderr)
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

        to = f" to {engine}, for {in_words(would_ask(job, DispatchOptions()))}"
    return f"would submit {name or '(the next number)'}{to}: {printable(shlex.join(job.argv))}"


def _planner(engine: str, node_gpus: str | None) -> Planner:
    from gpuherd.cli.job_start import of_a_cluster, of_the_queue, planner

    check_node_gpus(node_gpus)
    cluster = EngineOptions(engine=engine, node_gpus=node_gpus)  # refuses GPUs of a node where there is no cluster
    return planner(of_the_queue if engine == LOCAL else lambda: of_a_cluster(cluster))


def _warn_of_missing_program(word: str) -> None:
    """Says so when there is no such program now. No error: an earlier job may make it."""
    # Not shutil.which, which would cost as much time as a tenth of the whole command.
    if "/" not in word and not any(os.access(f"{folder}/{word}", os.X_OK) for folder in os.get_exec_path()):
        hint = "; write the words apart: -- python train.py" if " " in word else ""
        print(f"gpuherd: there is no program {printable(word)!r} in any folder of PATH yet{hint}", file=sys.stderr)


UP = """\
Begins to work off your own queue, to which gpuherd submit adds, in the background. It goes on when the terminal is
closed and after logout, also while the queue is empty, until gpuherd down.

examples:
  gpuherd up --max-gpus 4
  gpuherd up --gpu-list 4 5 6 7 --yield requeue
  gpuherd up --foreground                          for systemd, or to look on
  gpuherd status                                   how it stands
  gpuherd set --max-gpus 2                         other options while it works
  gpuherd down

Exit codes: 0 it is at work, 75 another one is already; with --foreground 130 and 143 when a signal left jobs undone.
"""


@dataclass(frozen=True, kw_only=True)
class UpOptions(DispatchOptions):
    """How the queue is worked off."""

    # No flag: a job shares its GPU when it was submitted so (gpuherd submit --share).
    share: bool = True
    foreground: bool = option(False, help="stay in the foreground and show what happens")

    def dispatch_options(self) -> DispatchOptions:
        """The part that a dispatcher knows."""
        values = {name: value for name, value in vars(self).items() if name != "foreground"}
        return DispatchOptions(**values)


def add_up(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "up", UP)
    add_options(parser, UpOptions)
    parser.add_argument("--json", action="store_true", help="print the dispatcher's pid and folder as JSON")
    parser.set_defaults(run=run_up)


def run_up(args: argparse.Namespace) -> int:
    """Starts the dispatcher, or is it."""
    from gpuherd.batch.daemon import forget_environment, log_file, up
    from gpuherd.batch.user_queue import open_folder

    load_for(args, UpOptions, stays=False)
    options = build(UpOptions, args)
    notice = options.spec.queue_notice(options)
    if notice is not None:
        on_stderr(notice)
    directory = open_folder(engine=options.engine)
    if options.foreground:
        from rich.console import Console

        from gpuherd.jobs.monitor.display import display
        from gpuherd.jobs.run import work_off

        console = Console(highlight=False, stderr=args.json)
        forget_environment(options.engine)
        with display(console) as shown:
            return work_off(directory, options.dispatch_options(), serve=True, display=shown).exit_code
    pid = up(options.dispatch_options(), directory)
    if args.json:
        told = {"pid": pid, "queue": str(directory.root), "log": str(log_file(directory))}
        print(json.dumps(told, indent=2))
    else:
        print(f"gpuherd (pid {pid}) works off {directory.root}; log: {log_file(directory)}")
    return ExitCode.OK


DOWN = """\
Ends what gpuherd up has begun. Jobs that run go on to their end; with --now they are stopped and put back into the
queue. What waits, waits for the next gpuherd up. What a cluster has goes on there, too, unless --now is said.

examples:
  gpuherd down
  gpuherd down --now
"""


def add_down(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "down", DOWN)
    parser.add_argument("--now", action="store_true", help="stop the jobs that run and put them back into the queue")
    add_own_queue(parser, "the queue for this engine (default: the one that is worked off)")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.set_defaults(run=run_down)


def run_down(args: argparse.Namespace) -> int:
    """Asks the dispatcher to end. Returns 0 also when there is none."""
    from gpuherd.batch.daemon import down

    answer = down(now=args.now, engine=_engine_at_work(args))
    ok, text = (True, "nothing works your queue off") if answer is None else (answer.ok, answer.text)
    print(json.dumps({"ok": ok, "was_up": answer is not None, "text": text}, indent=2) if args.json else text)
    return ExitCode.OK if ok else ExitCode.FAILED


def _engine_at_work(args: argparse.Namespace) -> str:
    """The engine of the queue that is meant: the one that somebody works off, where none is named."""
    from gpuherd.batch.user_queue import folder
    from gpuherd.jobs.lock import DispatcherLock
    from gpuherd.jobs.run_dir import RunDirectory

    if args.engine is not None:
        named: str = args.engine
        return named
    usual = usual_engine()
    at_work = [each for each in ENGINES if DispatcherLock.holder(RunDirectory(folder(each)).lock) is not None]
    if len(at_work) > 1 and usual not in at_work:
        raise UsageError(f"your queues for {' and '.join(at_work)} are worked off; say which: --engine {at_work[0]}")
    return usual if usual in at_work or not at_work else at_work[0]
