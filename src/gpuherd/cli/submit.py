"""``gpuherd submit``: puts a command into the user's own queue."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

from gpuherd.batch.job_options import JobOptions
from gpuherd.cli.parsing import add_command, check_node_gpus, command_words, keep_simulation_here
from gpuherd.cli.run_folder import add_own_queue, usual_engine
from gpuherd.engines.options import as_for_jobs
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import ExitCode, printable
from gpuherd.options import Parser, add_options, build

if TYPE_CHECKING:
    from gpuherd.batch.job_options import Planner
    from gpuherd.jobs.job import Job

DESCRIPTION = """\
Puts a command into your own queue, which gpuherd up works off in the background, and prints the job's name. It runs in
the folder and with the environment that it was submitted from.

examples:
  gpuherd submit -- python train.py --seed 1
  gpuherd submit --num-gpus 1-4 --mem 30GB --name large --priority 5 -- python train.py
  gpuherd submit --needs large --timeout 2h -- python evaluate.py
  gpuherd submit --model llama-3.1-70b --batch 8 -- python generate.py     GPUs and memory by the model's plan
  gpuherd submit --engine slurm --nodes 2 --num-gpus 4 -- torchrun --nproc-per-node 4 train.py
  gpuherd up                                       begin to work the queue off
  gpuherd status                                   how it stands

The queue is in ~/.local/state/gpuherd/queue, or where GPUHERD_QUEUE says; there is one for each engine, those of
clusters beside it (queue-slurm). Partition, account and the like are gpuherd up's to say, once for the whole queue.
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "submit", DESCRIPTION)
    add_options(parser, JobOptions)
    add_own_queue(parser, "what is to run it: your queue for this engine (default: that of your settings, or local)")
    parser.add_argument("--node-gpus", metavar="GPUS", help=as_for_jobs("node_gpus").metadata["option"].help)
    parser.add_argument("--dry-run", action="store_true", help="show what would be submitted")
    parser.add_argument("--json", action="store_true", help="print the job as JSON")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the command and its words")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Submits the command and prints the job's name."""
    from gpuherd.batch.user_queue import check, make_job, submit

    argv = command_words(args)
    _warn_of_missing_program(argv[0])
    options = build(JobOptions, args)
    keep_simulation_here(args)
    engine = usual_engine(starts_jobs=True) if args.engine is None else args.engine
    planner = _planner(engine, args.node_gpus)
    job = make_job(options, argv, os.environ, os.getcwd(), planner)  # noqa: PTH109 - as text, whatever it is
    if args.dry_run:
        check(job, named=options.name is not None, engine=engine)
        print(json.dumps(_told(job, options, engine), indent=2) if args.json else _said(job, options, engine))
        return ExitCode.OK
    submitted = submit(job, named=options.name is not None, engine=engine)
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


def _told(job: Job, options: JobOptions, engine: str) -> dict[str, Any]:
    return {
        "name": options.name,
        "argv": list(job.argv),
        "cwd": job.cwd,
        "engine": engine,
        "gpus": job.gpus,
        "memory_mb": job.memory_mb,
        "nodes": job.nodes,
        "cpus": job.cpus,
        "host_memory_mb": job.host_memory_mb,
    }


def _said(job: Job, options: JobOptions, engine: str) -> str:
    to = ""
    if engine != LOCAL:
        from gpuherd.jobs.feasibility import in_words, would_ask
        from gpuherd.jobs.options import DispatchOptions

        to = f" to {engine}, for {in_words(would_ask(job, DispatchOptions()))}"
    return f"would submit {options.name or '(the next number)'}{to}: {printable(shlex.join(job.argv))}"


def _planner(engine: str, node_gpus: str | None) -> Planner:
    from gpuherd.cli.planning import of_a_cluster, of_the_queue, planner
    from gpuherd.engines.options import EngineOptions

    check_node_gpus(node_gpus)
    cluster = EngineOptions(engine=engine, node_gpus=node_gpus)  # refuses GPUs of a node where there is no cluster
    return planner(of_the_queue if engine == LOCAL else lambda: of_a_cluster(cluster))


def _warn_of_missing_program(word: str) -> None:
    """Says so when there is no such program now. No error: an earlier job may make it."""
    # Not shutil.which, which would cost as much time as a tenth of the whole command.
    if "/" not in word and not any(os.access(f"{folder}/{word}", os.X_OK) for folder in os.get_exec_path()):
        hint = "; write the words apart: -- python train.py" if " " in word else ""
        print(f"gpuherd: there is no program {printable(word)!r} in any folder of PATH yet{hint}", file=sys.stderr)
