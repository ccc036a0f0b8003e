"""``gpuherd batch`` runs a file's commands as jobs, ``run`` one command at once; ``export`` writes jobs as files."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import (
    add_command_words,
    add_json,
    add_run_name,
    command_words,
    console_for,
    print_json,
    print_note,
)
from gpuherd.cli.job_start import JOB_FILE_KEYS, fill_from_block, gpus_of_cluster, gpus_of_run, load_for, planner
from gpuherd.engines.registry import LOCAL, EngineSpec, specs
from gpuherd.errors import ExitCode, JobCannotFit, UsageError, printable
from gpuherd.options import Parser, add_options, build
from gpuherd.units import count

if TYPE_CHECKING:
    from gpuherd.batch.batch import PlannedJob
    from gpuherd.batch.export import Found
    from gpuherd.batch.options import BatchOptions, RunOptions
    from gpuherd.batch.run import Waiter
    from gpuherd.engines.options import EngineOptions
    from gpuherd.jobs.job import Planner
    from gpuherd.jobs.options import DispatchOptions
    from gpuherd.jobs.records import Outcome
    from gpuherd.jobs.run_dir import RunDirectory


BATCH = """\
Runs the commands of a file on free GPUs, each as a job. The file is commands.txt with one command per line, or
jobs.yaml with a matrix or a sweep of values to expand. The same command again continues where it stopped; jobs that
are done are not run twice.

examples:
  gpuherd batch commands.txt --max-gpus 4
  gpuherd batch commands.txt --dry-run                    what would run, and what can't
  gpuherd batch jobs.yaml --output-dir sweep --order longest --timeout 2h
  generate-commands | gpuherd batch - --shell
  gpuherd --simulate 4x40GB batch commands.txt            try it without GPUs

In commands.txt a line above a command says what it needs:
  #gpuherd gpus=2 mem=20GB priority=5 name=large needs=small timeout=2h retries=1
  #gpuherd model=llama-3.1-70b dtype=bf16 batch=8         GPUs and memory by the model's plan

In jobs.yaml a sweep samples settings, here 20, the same ones each time:
  sweep: {samples: 20, parameters: {lr: {low: 1e-5, high: 1e-1, log: true}, opt: [adam, sgd]}}

Exit codes: 0 all done, 1 some failed (with --dry-run: can never run), 2 wrong usage, 65 the file has errors, 66 it
does not exist, 130 stopped by Ctrl-C.
"""
_MOST_PROBLEMS = 100


def add_batch(parser: Parser) -> None:
    from gpuherd.batch.options import BatchOptions

    parser.add_argument("file", metavar="FILE", help="commands.txt, jobs.yaml, or - for commands on standard input")
    add_options(parser, BatchOptions)
    add_json(parser, "the plan or the outcome")


def run_batch(args: argparse.Namespace) -> int:
    """Runs the file's jobs. Returns the exit code."""
    from gpuherd.batch.assemble import BadJobFile, read_engine
    from gpuherd.batch.options import BatchOptions

    try:
        fill_from_block(args, read_engine(args.file))
        load_for(args, BatchOptions)
        options = build(BatchOptions, args)
        return _plan(args, options) if options.dry_run else _run_jobs(args, options)
    except BadJobFile as problem:
        # All errors, not only the first one as in the exception's text. A file that is no job file at all has one per
        # line, so there is a limit.
        lines = problem.lines()
        more = [f"… and {len(lines) - _MOST_PROBLEMS} more"] if len(lines) > _MOST_PROBLEMS else []
        for line in (*lines[:_MOST_PROBLEMS], *more):
            print_note(line)
        if args.json:
            errors = [{"line": each.line or None, "error": each.text} for each in problem.problems]
            print_json({"exit_code": int(problem.exit_code), "error": str(problem), "errors": errors})
        return problem.exit_code


def _plan(args: argparse.Namespace, options: BatchOptions) -> int:
    from gpuherd.batch.batch import plan, print_plan

    planned = plan(args.file, options, _planner(options, options.max_gpus))
    # Inside a job of the cluster the jobs may run on this machine.
    engine = LOCAL if planned and planned[0].asks is None else options.engine
    if args.json:
        print_json({"engine": engine, "jobs": [_planned_entry(each) for each in planned]})
    else:
        print_plan(console_for(args, highlight=False), planned, None if engine == LOCAL else engine)
    return ExitCode.FAILED if any(each.never is not None for each in planned) else ExitCode.OK


def _run_jobs(args: argparse.Namespace, options: BatchOptions) -> int:
    from datetime import datetime

    from gpuherd.batch.batch import jobs_of, print_outcome, run_folder, run_record, with_sharing
    from gpuherd.jobs.monitor.display import display
    from gpuherd.jobs.run import run_jobs
    from gpuherd.runs.console import run_log

    console = console_for(args, highlight=False)
    file = jobs_of(args.file, options, _planner(options, options.max_gpus))
    options = with_sharing(options, file.jobs)
    directory = run_folder(args.file, options)
    directory.create()

    def record() -> None:
        directory.write_run_record(run_record(args.file, options, file.jobs))

    with run_log(directory.logs, datetime.now(), "batch"), display(console) as live:
        outcome = run_jobs(
            file.jobs,
            options,
            directory,
            before=record,
            refused=file.unfit,
            display=live,
            enqueue_only=options.enqueue_only,
        )
    print_outcome(console, outcome, directory)
    if args.json:
        print_json(_outcome_entry(outcome, directory))
    return outcome.exit_code


def _planner(options: DispatchOptions, limit: int | None) -> Planner:
    """Memory plans for jobs that name a model, on the GPUs of this machine or of the cluster's nodes."""
    return planner(partial(gpus_of_run, options, limit), spelling=JOB_FILE_KEYS)


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


# ---- gpuherd export --------------------------------------------------------------------------------------------------

EXPORT = """\
Writes jobs as files that a person can read, change and submit by hand. For a cluster these are a script for each group
of similar jobs, and submit.sh, which submits them with their resource requests; for a shell it is one script with a
block per job. The files run the commands themselves and do not need gpuherd.

The jobs are those of a job file, as for gpuherd batch, or the waiting ones of a run's folder. So the jobs of every
command can be exported: run the command with --enqueue-only, and export its folder.

examples:
  gpuherd export --to shell commands.txt --output by-hand
  gpuherd esd --model-list models.csv --output-dir results --enqueue-only
"""


def add_export(parser: Parser) -> None:
    from gpuherd.engines.options import EngineOptions

    help_text = "a job file, - for standard input, or a run's folder"
    add_run_name(parser, "path", metavar="FILE|DIR", help_text=help_text, required=True)
    parser.add_argument("--to", required=True, choices=tuple(_exporters()), help="what runs the files")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the files; created if missing")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    parser.add_argument("--dry-run", action="store_true", help="show the files and write none")
    parser.add_argument("--shell", action="store_true", help="the command lines of the file are for /bin/sh")
    parser.add_argument(
        "--gpus-per-job",
        type=count,
        default=1,
        metavar="N",
        help="GPUs of jobs that don't say how many; 0: none (default: 1)",
    )
    add_json(parser, "the files")
    add_options(parser, EngineOptions, only={name for spec in _exporters().values() for name in _options_of(spec)})


def _exporters() -> dict[str, EngineSpec]:
    """Engines by their word for ``--to``, clusters first."""
    return {spec.exporter.to: spec for spec in (*specs()[1:], specs()[0]) if spec.exporter is not None}


def _options_of(spec: EngineSpec) -> frozenset[str]:
    return frozenset() if spec.exporter is None else frozenset(spec.fields) - spec.exporter.ignores


def run_export(args: argparse.Namespace) -> int:
    """Writes or shows the files."""
    from gpuherd.batch.export import files as files_of
    from gpuherd.batch.export import of, write
    from gpuherd.engines.options import engine_values
    from gpuherd.jobs.options import DispatchOptions

    options = _export_options(args)
    dispatch = DispatchOptions(**engine_values(options))
    found = of(args.path, shell=args.shell, gpus=args.gpus_per_job, planner=_planner(dispatch, None))
    files = files_of(found.jobs, options, found.folder)
    folder = Path(args.output).absolute()
    if not args.dry_run:
        write(folder, files, force=args.force)
    if args.json:
        print_json(
            {
                "to": args.to,
                "folder": str(folder),
                "written": not args.dry_run,
                "jobs": [job.name for job in found.jobs],
                "left_out": dict(found.left_out),
                "files": {name: _as_bytes(text).decode("utf-8", "replace") for name, text in files.items()},
            }
        )
    elif args.dry_run:
        for name, text in files.items():
            sys.stdout.buffer.write(_as_bytes(f"==> {name} <==\n{text}\n"))
        sys.stdout.flush()
    else:
        _print_exported(found, folder, options.spec)
    return ExitCode.OK


def _export_options(args: argparse.Namespace) -> EngineOptions:
    """The options of the engine for which the files are, completed from the job file and the settings; none for a
    shell.

    Raises UsageError for an option that the files do not use.
    """
    from gpuherd.engines.options import EngineOptions, engine_values

    spec = _exporters()[args.to]
    possible = _options_of(spec)
    for name in engine_values(args):
        if name not in possible:
            users = " or --to ".join(word for word, each in _exporters().items() if name in _options_of(each))
            raise UsageError(f"--{name.replace('_', '-')} is for --to {users}")
    args.engine = spec.name  # not that of the job file or the settings, which is for running the jobs
    if spec.name != LOCAL:
        from gpuherd.batch.assemble import read_engine
        from gpuherd.jobs.settings import load

        fill_from_block(args, read_engine(args.path))
        load().fill(args, EngineOptions)
    given = {name: getattr(args, name) for name in possible if hasattr(args, name)}
    return EngineOptions(engine=spec.name, **given)


def _as_bytes(text: str) -> bytes:
    """The bytes of a file: a command may contain some that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def _print_exported(found: Found, folder: Path, spec: EngineSpec) -> None:
    from gpuherd.batch.export import left_over

    script = spec.exporter.submit_file if spec.exporter else ""
    jobs = f"{len(found.jobs)} job{'s' if len(found.jobs) != 1 else ''}"
    print(printable(f"{jobs} written to {folder}; to run them: bash {shlex.quote(str(folder / script))}"))
    for option, number in left_over(found.jobs).items():
        print_note(f"these files leave out {option}, set for {number} of the jobs")
    if found.left_out:
        first = next(iter(found.left_out.items()))
        more = f" (and {len(found.left_out) - 1} more)" if len(found.left_out) > 1 else ""
        print_note(printable(f"{first[0]} is left out: {first[1]}{more}"))


# ---- gpuherd run -----------------------------------------------------------------------------------------------------

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
    from gpuherd.batch.options import RunOptions

    add_options(parser, RunOptions)
    parser.add_argument("--json", action="store_true", help="with --dry-run: as JSON")
    add_command_words(parser)


def run_run(args: argparse.Namespace) -> int:
    """Becomes the command. Returns only if that is impossible, or with ``--dry-run``."""
    from gpuherd.batch.options import RunOptions
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
        taken = waiter.take()
        become(program, argv, taken, inherited, options.cpus, name=options.name, project=options.project)
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
    request = run_remote.placement_of(options)
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
