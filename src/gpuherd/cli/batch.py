"""``gpuherd batch``: the commands of a file, each a job, on free GPUs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gpuherd.batch.assemble import read_engine
from gpuherd.batch.batch import BatchOptions, PlannedJob
from gpuherd.batch.job_options import BadJobFile
from gpuherd.cli.engine_key import fill_from_block
from gpuherd.cli.parsing import add_command, load_for
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import ExitCode
from gpuherd.options import Parser, add_options, build

if TYPE_CHECKING:
    from gpuherd.batch.job_options import Planner
    from gpuherd.jobs.records import Outcome
    from gpuherd.jobs.run_dir import RunDirectory

DESCRIPTION = """\
Runs the commands of a file on free GPUs, each as a job: commands.txt, a line a command, or jobs.yaml, with a matrix or
a sweep of values to expand. The same command again goes on where it stopped; what is done is not done twice.

examples:
  gpuherd batch commands.txt --max-gpus 4
  gpuherd batch commands.txt --dry-run                    what would run, and what can't
  gpuherd batch jobs.yaml --output-dir sweep --order longest --timeout 2h
  generate-commands | gpuherd batch - --shell
  gpuherd batch commands.txt --engine slurm --partition gpu --time-limit 4h --array-limit 16
  salloc --gres=gpu:4, and in it: gpuherd batch commands.txt --engine slurm --in-allocation     on the GPUs of that job
  gpuherd --simulate 4x40GB batch commands.txt            try it without GPUs

In commands.txt a line above a command says what it needs:
  #gpuherd gpus=2 mem=20GB priority=5 name=large needs=small timeout=2h retries=1
  #gpuherd model=llama-3.1-70b dtype=bf16 batch=8         GPUs and memory by the model's plan

In jobs.yaml twenty settings are drawn, the same ones each time, by
  sweep: {samples: 20, parameters: {lr: {low: 1e-5, high: 1e-1, log: true}, opt: [adam, sgd]}}

Exit codes: 0 all done, 1 some failed (in a dry run: can never run), 2 wrong usage, 65 the file is wrong, 66 it is not
there, 130 stopped by Ctrl-C.
"""
_MOST_PROBLEMS = 100


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "batch", DESCRIPTION)
    parser.add_argument("file", metavar="FILE", help="commands.txt, jobs.yaml, or - for commands on standard input")
    add_options(parser, BatchOptions)
    parser.add_argument("--json", action="store_true", help="print the plan or the outcome as JSON on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the file's jobs. Returns the exit code."""
    try:
        fill_from_block(args, read_engine(args.file))
        load_for(args, BatchOptions)
        options = build(BatchOptions, args)
        return _plan(args, options) if options.dry_run else _work_off(args, options)
    except BadJobFile as problem:
        # All that is wrong, not only the first of it, which is what the error itself says; but some file that is no
        # job file at all has an error in each line.
        lines = problem.lines()
        more = [f"… and {len(lines) - _MOST_PROBLEMS} more"] if len(lines) > _MOST_PROBLEMS else []
        print("\n".join(f"gpuherd: {line}" for line in (*lines[:_MOST_PROBLEMS], *more)), file=sys.stderr)
        if args.json:
            errors = [{"line": each.line or None, "error": each.text} for each in problem.problems]
            _print_json({"exit_code": int(problem.exit_code), "error": str(problem), "errors": errors})
        return problem.exit_code


def _plan(args: argparse.Namespace, options: BatchOptions) -> int:
    from gpuherd.batch.batch import plan

    planned = plan(args.file, options, _planner(options))
    # Inside of a SLURM job they may run on this machine.
    engine = LOCAL if planned and planned[0].asks is None else options.engine
    if args.json:
        _print_json({"engine": engine, "jobs": [_planned_entry(each) for each in planned]})
    else:
        from rich.console import Console

        from gpuherd.batch.batch import print_plan

        print_plan(Console(highlight=False), planned, None if engine == LOCAL else engine)
    return ExitCode.FAILED if any(each.never is not None for each in planned) else ExitCode.OK


def _work_off(args: argparse.Namespace, options: BatchOptions) -> int:
    from datetime import datetime

    from rich.console import Console

    from gpuherd.batch.batch import jobs_of, print_outcome, run_folder, run_record, with_sharing
    from gpuherd.jobs.monitor.display import display
    from gpuherd.jobs.run import run_jobs
    from gpuherd.report.log import run_log

    # With --json standard output belongs to the JSON alone.
    console = Console(stderr=args.json, highlight=False)
    jobs, unfit = jobs_of(args.file, options, _planner(options))
    options = with_sharing(options, jobs)
    directory = run_folder(args.file, options)
    directory.create()

    def record() -> None:
        directory.write_run_record(run_record(args.file, options, jobs))

    with run_log(directory.logs, datetime.now(), "batch"), display(console) as shown:
        outcome = run_jobs(
            jobs,
            options,
            directory,
            before=record,
            refused=unfit,
            display=shown,
            enqueue_only=options.enqueue_only,
        )
    print_outcome(console, outcome, directory)
    if args.json:
        _print_json(_outcome_entry(outcome, directory))
    return outcome.exit_code


def _planner(options: BatchOptions) -> Planner:
    from functools import partial

    from gpuherd.cli.planning import JOB_FILE, of_a_run, planner

    return planner(partial(of_a_run, options, options.max_gpus), spelling=JOB_FILE)


def _planned_entry(planned: PlannedJob) -> dict[str, Any]:
    job = planned.job
    return {
        "name": job.name,
        "argv": list(job.argv),
        "gpus": job.gpus,
        "gpus_at_most": job.gpus_at_most,
        "memory_mb": job.memory_mb,
        "nodes": job.nodes,
        "cpus": job.cpus,
        "host_memory_mb": job.host_memory_mb,
        "asks": planned.asks,
        "priority": job.priority,
        "needs": list(job.needs),
        "round": job.round,
        "state": planned.state,
        "reason": planned.never,
    }


def _outcome_entry(outcome: Outcome, directory: RunDirectory) -> dict[str, Any]:
    return {
        "exit_code": int(outcome.exit_code),
        "interrupted": outcome.interrupted,
        "counts": {
            "done": outcome.done,
            "failed": outcome.failed,
            "waiting": outcome.waiting,
            "cancelled": outcome.cancelled,
        },
        "failures": [asdict(failure) for failure in outcome.failures],
        "output_dir": str(directory.root),
        "logs": str(directory.logs),
    }


def _print_json(told: dict[str, Any]) -> None:
    print(json.dumps(told, indent=2, allow_nan=False))
