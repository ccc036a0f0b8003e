"""``gpuherd run``: waits for GPUs and becomes the command."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from gpuherd.batch.run import CannotBecome, RunOptions, Waiter, become, find_program, open_descriptors
from gpuherd.cli.common import add_command, command_words
from gpuherd.cli.job_start import load_for, of_a_cluster, of_a_run, planner
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import ExitCode, JobCannotFit, UsageError, printable
from gpuherd.jobs.feasibility import refuse_beyond_this_machine
from gpuherd.options import Parser, add_options, build

RUN = """\
Waits until GPUs are free, takes them, and becomes the command: signals, terminal, pipes and exit status are its own.
The GPUs are given back when it ends, however it ends. With the --engine of a cluster it becomes the cluster's own
program for that (SLURM: srun), or where there is none the command is a job of the cluster whose output is shown here;
Ctrl-C ends it, and so does a reader of the output that has gone (... | head).

examples:
  gpuherd run -- python train.py                     on one free GPU
  gpuherd run --num-gpus 2 --mem 30GB -- torchrun --nproc-per-node 2 train.py
  gpuherd run --wait 10m -- python train.py          give up after 10 minutes, with exit code 75
  gpuherd run --gpu-list 4 5 --no-wait -- python train.py
  gpuherd run --model llama-3.1-8b --batch 8 -- python generate.py      GPUs and memory by the model's plan

Exit codes: the command's own; 75 GPUs not free in time, 126 and 127 as shells do when it can't be run; of a dry
run 1 where it can never run.
"""


def add_run(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "run", RUN)
    add_options(parser, RunOptions)
    parser.add_argument("--json", action="store_true", help="with --dry-run: as JSON")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the command and its words")
    parser.set_defaults(run=run_run)


def run_run(args: argparse.Namespace) -> int:
    """Becomes the command. Returns only when that can't be, or with ``--dry-run``."""
    inherited = open_descriptors()
    argv = command_words(args)
    settings = load_for(args, RunOptions, stays=False)
    options = build(RunOptions, args)
    if args.json and not options.dry_run:
        raise UsageError("--json goes with --dry-run: without it the output is the command's own")

    def tell(sentence: str) -> None:
        if not options.quiet:
            print(f"gpuherd: {sentence}", file=sys.stderr, flush=True)

    for warning in settings.warnings:
        tell(warning)
    try:
        if options.engine != LOCAL:
            return _elsewhere(options, argv, inherited, tell, as_json=args.json)
        refuse_beyond_this_machine(options.nodes or 1, options.host_mem, "the command")
        program = find_program(argv[0])
        # A command in the foreground may have as many GPUs as there are.
        options = options.planned(planner(partial(of_a_run, options.gpu_options(), None), tell))
        if options.dry_run:
            return _dry_run(Waiter(options, tell, settings), options, argv, args.json)
        become(program, argv, Waiter(options, tell, settings).take(), inherited, options.cpus)
    except CannotBecome as problem:
        if args.json:
            print(json.dumps({"error": str(problem), "exit_code": problem.code}))
        print(f"gpuherd: {problem}", file=sys.stderr)
        return problem.code
    raise AssertionError("unreachable")


def _elsewhere(
    options: RunOptions, argv: list[str], inherited: Sequence[int], tell: Callable[[str], None], *, as_json: bool
) -> int:
    from gpuherd.batch import run_remote
    from gpuherd.jobs.feasibility import in_words

    options = options.planned(planner(partial(of_a_cluster, options), tell))
    found = run_remote.replacement(options, argv, tell)
    if not options.dry_run:
        if found is None:
            return run_remote.follow(options, argv, tell)
        if found.within is None:
            run_remote.refuse_if_never(options)
        run_remote.become(found, inherited)
    inside = found is not None and found.within is not None
    words = None if found is None else list(found.argv)
    never = None if inside else run_remote.why_never(options)
    asked = run_remote.asked(options)
    if as_json:
        told = {"argv": argv, "engine": options.engine, "asks": asdict(asked), "becomes": words}
        print(json.dumps(told | {"never": never}, indent=2))
    else:
        how = "" if words is None else f", as {printable(shlex.join(words))}"
        whom = found.within if found is not None and found.within is not None else options.engine
        print(f"would ask {whom} for {in_words(asked)}{how}")
        if never is not None:
            print(f"never: {printable(never)}")
    return ExitCode.OK if never is None else ExitCode.FAILED


def _dry_run(waiter: Waiter, options: RunOptions, argv: list[str], as_json: bool) -> int:
    never: str | None = None
    try:
        gpus, reason = waiter.look()
    except JobCannotFit as problem:
        gpus, reason, never = (), None, str(problem)
    if as_json:
        labels = [gpu.label for gpu in gpus]
        told = {"argv": argv, "engine": LOCAL, "gpus": labels, "waits_for": reason, "never": never}
        print(json.dumps(told, indent=2))
    elif never is not None:
        print(f"never: {printable(never)}")
    elif reason is not None:
        print(f"would wait: {reason}")
    elif gpus:
        checks = f"after {waiter.checks} checks, {options.check_interval:g} s apart"
        print(f"would run on GPU {', '.join(gpu.label for gpu in gpus)} {checks}")
    else:
        print("would run without a GPU")
    return ExitCode.OK if never is None else ExitCode.FAILED
