"""``gpuherd run``: waits for GPUs and becomes the command."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from gpuherd.batch.options import RunOptions
from gpuherd.cli.common import add_command_words, command_words
from gpuherd.cli.job_start import gpus_of_cluster, gpus_of_run, load_for, planner
from gpuherd.cli.output import print_json, print_note
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import ExitCode, JobCannotFit, UsageError, printable
from gpuherd.options import Parser, add_options, build

if TYPE_CHECKING:
    from gpuherd.batch.run import Waiter

RUN = """\
Waits until GPUs are free, takes them, and becomes the command: signals, terminal, pipes and exit status are those of
the command. The GPUs are given back when it ends, however it ends. With the --engine of a cluster it becomes the
cluster's own program for that (SLURM: srun). A cluster without one runs the command as a job whose output is shown
here; Ctrl-C ends the job, and so does the end of the output's reader (... | head).

examples:
  gpuherd run -- python train.py                     on one free GPU
  gpuherd run --num-gpus 2 --mem 30GB -- torchrun --nproc-per-node 2 train.py
  gpuherd run --wait 10m -- python train.py          give up after 10 minutes, with exit code 75
  gpuherd run --gpu-list 4 5 --no-wait -- python train.py
  gpuherd run --model llama-3.1-8b --batch 8 -- python generate.py      GPUs and memory by the model's plan

Exit codes: the command's own; 75 GPUs not free in time; 126 and 127 if the command can't be run, as in a shell; with
--dry-run 1 if it can never run.
"""


def add_run(parser: Parser) -> None:
    add_options(parser, RunOptions)
    parser.add_argument("--json", action="store_true", help="with --dry-run: as JSON")
    add_command_words(parser)


def run_run(args: argparse.Namespace) -> int:
    """Becomes the command. Returns only if that is impossible, or with ``--dry-run``."""
    from gpuherd.batch.run import CannotBecome, Waiter, become, find_program, open_descriptors
    from gpuherd.jobs.feasibility import refuse_beyond_this_machine

    inherited = open_descriptors()
    argv = command_words(args)
    settings = load_for(args, RunOptions, stays=False)
    options = build(RunOptions, args)
    if args.json and not options.dry_run:
        raise UsageError("--json goes with --dry-run: without it the output is the command's own")

    def report(sentence: str) -> None:
        if not options.quiet:
            print_note(sentence)

    for warning in settings.warnings:
        report(warning)
    try:
        if options.engine != LOCAL:
            return _run_on_cluster(options, argv, inherited, report, as_json=args.json)
        refuse_beyond_this_machine(options.nodes or 1, options.host_mem, "the command")
        program = find_program(argv[0])
        # A command in the foreground may have as many GPUs as there are.
        options = options.planned(planner(partial(gpus_of_run, options.gpu_options(), None), report))
        waiter = Waiter(options, report, settings)
        if options.dry_run:
            return _dry_run(waiter, options, argv, args.json)
        become(program, argv, waiter.take(), inherited, options.cpus)
    except CannotBecome as problem:
        if args.json:
            print(json.dumps({"error": str(problem), "exit_code": problem.code}))
        print_note(str(problem))
        return problem.code
    raise AssertionError("unreachable")


def _run_on_cluster(
    options: RunOptions, argv: list[str], inherited: Sequence[int], report: Callable[[str], None], *, as_json: bool
) -> int:
    from gpuherd.batch import run_remote
    from gpuherd.jobs.feasibility import in_words

    options = options.planned(planner(partial(gpus_of_cluster, options), report))
    found = run_remote.replacement(options, argv, report)
    inside = None if found is None else found.within
    if not options.dry_run:
        if found is None:
            return run_remote.follow(options, argv, report)
        if inside is None:
            run_remote.refuse_if_never(options)
        run_remote.become(found, inherited)
    command = None if found is None else list(found.argv)
    never = None if inside is not None else run_remote.why_never(options)
    request = run_remote.asked(options)
    if as_json:
        values = {"argv": argv, "engine": options.engine, "asks": asdict(request), "becomes": command}
        print_json(values | {"never": never})
    else:
        how = "" if command is None else f", as {printable(shlex.join(command))}"
        print(f"would ask {inside or options.engine} for {in_words(request)}{how}")
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
        print_json({"argv": argv, "engine": LOCAL, "gpus": labels, "waits_for": reason, "never": never})
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
