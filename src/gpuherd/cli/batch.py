"""``gpuherd batch`` runs the commands of a file as jobs; ``gpuherd export`` writes jobs as files to submit by hand."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.batch.assemble import BadJobFile, read_engine
from gpuherd.batch.batch import BatchOptions, PlannedJob
from gpuherd.cli.common import add_command, add_run
from gpuherd.cli.job_start import fill_from_block, load_for
from gpuherd.engines.options import EngineOptions, engine_values
from gpuherd.engines.registry import LOCAL, EngineSpec, specs
from gpuherd.errors import ExitCode, UsageError, printable
from gpuherd.options import Parser, add_options, build
from gpuherd.units import count

if TYPE_CHECKING:
    from gpuherd.batch.export import Found
    from gpuherd.jobs.job import Planner
    from gpuherd.jobs.records import Outcome
    from gpuherd.jobs.run_dir import RunDirectory

BATCH = """\
Runs the commands of a file on free GPUs, each as a job: commands.txt, a line a command, or jobs.yaml, with a matrix or
a sweep of values to expand. The same command again goes on where it stopped; what is done is not done twice.

examples:
  gpuherd batch commands.txt --max-gpus 4
  gpuherd batch commands.txt --dry-run                    what would run, and what can't
  gpuherd batch jobs.yaml --output-dir sweep --order longest --timeout 2h
  generate-commands | gpuherd batch - --shell
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


def add_batch(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "batch", BATCH)
    parser.add_argument("file", metavar="FILE", help="commands.txt, jobs.yaml, or - for commands on standard input")
    add_options(parser, BatchOptions)
    parser.add_argument("--json", action="store_true", help="print the plan or the outcome as JSON on standard output")
    parser.set_defaults(run=run_batch)


def run_batch(args: argparse.Namespace) -> int:
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
    # Inside of a job of the cluster they may run on this machine.
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
    file = jobs_of(args.file, options, _planner(options))
    options = with_sharing(options, file.jobs)
    directory = run_folder(args.file, options)
    directory.create()

    def record() -> None:
        directory.write_run_record(run_record(args.file, options, file.jobs))

    with run_log(directory.logs, datetime.now(), "batch"), display(console) as shown:
        outcome = run_jobs(
            file.jobs,
            options,
            directory,
            before=record,
            refused=file.unfit,
            display=shown,
            enqueue_only=options.enqueue_only,
        )
    print_outcome(console, outcome, directory)
    if args.json:
        _print_json(_outcome_entry(outcome, directory))
    return outcome.exit_code


def _planner(options: BatchOptions) -> Planner:
    from functools import partial

    from gpuherd.cli.job_start import JOB_FILE, of_a_run, planner

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


EXPORT = """\
Writes jobs as files that a person can read, change and submit by hand: for a cluster the scripts of each group of like
jobs, and submit.sh, which submits them with what they need; for a shell one script, a block a job. They run the
commands themselves: gpuherd need not be there.

The jobs are those of a job file, as for gpuherd batch, or the waiting ones of a run's folder. So every command's plan
can be exported: give the command --enqueue-only, and export its folder.

examples:
  gpuherd export --to shell commands.txt --output by-hand
  gpuherd esd --model-list models.csv --output-dir results --enqueue-only
"""


def add_export(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "export", EXPORT)
    add_run(
        parser,
        "path",
        metavar="FILE|DIR",
        help_text="a job file, - for standard input, or a run's folder",
        required=True,
    )
    parser.add_argument("--to", required=True, choices=tuple(_exporters()), help="for whom the files are")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the files, made if it is not there")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.add_argument("--dry-run", action="store_true", help="show the files and write none")
    parser.add_argument("--shell", action="store_true", help="the file's command lines are for /bin/sh")
    parser.add_argument(
        "--gpus-per-job",
        type=count,
        default=1,
        metavar="N",
        help="GPUs of jobs that don't say how many; 0: none (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    add_options(parser, EngineOptions, only={name for spec in _exporters().values() for name in _options_of(spec)})
    parser.set_defaults(run=run_export)


def _exporters() -> dict[str, EngineSpec]:
    """Engines by the word of ``--to``, those of clusters first."""
    return {spec.export_to: spec for spec in (*specs()[1:], specs()[0]) if spec.export_to is not None}


def _options_of(spec: EngineSpec) -> frozenset[str]:
    return frozenset(spec.fields) - spec.not_exported


def run_export(args: argparse.Namespace) -> int:
    """Writes or shows the files."""
    from gpuherd.batch.export import files as files_of
    from gpuherd.batch.export import of, write

    options = _engine(args)
    found = of(args.path, shell=args.shell, gpus=args.gpus_per_job, planner=_planner_of_engine(options))
    files = files_of(found.jobs, options, found.folder)
    folder = Path(args.output).absolute()
    if not args.dry_run:
        write(folder, files, force=args.force)
    if args.json:
        _print_export_json(args, found, files, folder)
    elif args.dry_run:
        _show(files)
    else:
        _tell(options.spec.submit_file, found, folder)
    return ExitCode.OK


def _engine(args: argparse.Namespace) -> EngineOptions:
    """The options of the engine for which the files are, with what the job file and the settings say; none for a shell.

    Raises UsageError for an option that says nothing to the files.
    """
    spec = _exporters()[args.to]
    possible = _options_of(spec)
    for name in engine_values(args):
        if name not in possible:
            whose = " or --to ".join(word for word, each in _exporters().items() if name in _options_of(each))
            raise UsageError(f"--{name.replace('_', '-')} is for --to {whose}")
    args.engine = spec.name  # whatever file and settings take for running jobs
    if spec.name != LOCAL:
        from gpuherd.jobs.settings import load

        fill_from_block(args, read_engine(args.path))
        load().fill(args, EngineOptions)
    named = {name: getattr(args, name) for name in possible if hasattr(args, name)}
    return EngineOptions(engine=spec.name, **named)


def _planner_of_engine(options: EngineOptions) -> Planner:
    """For jobs that name a model: by the GPUs of the cluster, or of this machine."""
    from functools import partial

    from gpuherd.cli.job_start import JOB_FILE, of_a_run, planner
    from gpuherd.jobs.options import DispatchOptions

    return planner(partial(of_a_run, DispatchOptions(**engine_values(options)), None), spelling=JOB_FILE)


def _show(files: Mapping[str, str]) -> None:
    for name, text in files.items():
        sys.stdout.buffer.write(_bytes(f"==> {name} <==\n{text}\n"))
    sys.stdout.flush()


def _bytes(text: str) -> bytes:
    """As it is written: a command may hold bytes that are no UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def _tell(script: str, found: Found, folder: Path) -> None:
    from gpuherd.batch.export import left_over

    jobs = f"{len(found.jobs)} job{'s' if len(found.jobs) != 1 else ''}"
    print(printable(f"{jobs} written to {folder}; to run them: bash {shlex.quote(str(folder / script))}"))
    for what, many in left_over(found.jobs).items():
        print(f"gpuherd: these files don't keep {what}, which {many} of the jobs say", file=sys.stderr)
    if found.left_out:
        first = next(iter(found.left_out.items()))
        more = f" (and {len(found.left_out) - 1} more)" if len(found.left_out) > 1 else ""
        print(printable(f"gpuherd: {first[0]} is left out: {first[1]}{more}"), file=sys.stderr)


def _print_export_json(args: argparse.Namespace, found: Found, files: Mapping[str, str], folder: Path) -> None:
    told = {
        "to": args.to,
        "folder": str(folder),
        "written": not args.dry_run,
        "jobs": [job.name for job in found.jobs],
        "left_out": dict(found.left_out),
        "files": {name: _bytes(text).decode("utf-8", "replace") for name, text in files.items()},
    }
    print(json.dumps(told, indent=2))
