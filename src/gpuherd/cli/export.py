"""``gpuherd export``: a plan of jobs as files that a person can read, change and submit by hand."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.cli.engine_key import fill_from_block
from gpuherd.cli.parsing import add_command
from gpuherd.cli.run_folder import add_run
from gpuherd.engines.options import EngineOptions, engine_values
from gpuherd.engines.registry import LOCAL, EngineSpec, specs
from gpuherd.errors import ExitCode, UsageError, printable
from gpuherd.jobs.options import count
from gpuherd.options import Parser, add_options

if TYPE_CHECKING:
    from gpuherd.batch.export import Found
    from gpuherd.batch.job_options import Planner

DESCRIPTION = """\
Writes jobs as files that a person can read, change and submit by hand: for SLURM a script and a file of commands for
each group of like jobs, and submit.sh, which submits them with what they need; for a shell one script, a block a job.
They run the commands themselves: gpuherd need not be there.

The jobs are those of a job file, as for gpuherd batch, or the waiting ones of a run's folder. So every command's plan
can be exported: give the command --enqueue-only, and export its folder.

examples:
  gpuherd export --to slurm jobs.yaml --output slurm --partition gpu --time-limit 4h
  gpuherd export --to shell commands.txt --output by-hand
  gpuherd export --to slurm commands.txt --output slurm --dry-run          shows the files, and writes none
  gpuherd esd --model-list models.csv --output-dir results --enqueue-only
  gpuherd export --to slurm results --output results/slurm --account lab
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "export", DESCRIPTION)
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
    parser.set_defaults(run=run)


def _exporters() -> dict[str, EngineSpec]:
    """Engines by the word of ``--to``, those of clusters first."""
    return {spec.export_to: spec for spec in (*specs()[1:], specs()[0]) if spec.export_to is not None}


def _options_of(spec: EngineSpec) -> frozenset[str]:
    return frozenset(spec.fields) - spec.not_exported


def run(args: argparse.Namespace) -> int:
    """Writes or shows the files."""
    from gpuherd.batch.export import files as files_of
    from gpuherd.batch.export import of, write

    options = _engine(args)
    found = of(args.path, shell=args.shell, gpus=args.gpus_per_job, planner=_planner(options))
    files = files_of(found.jobs, options, found.folder)
    folder = Path(args.output).absolute()
    if not args.dry_run:
        write(folder, files, force=args.force)
    if args.json:
        _print_json(args, found, files, folder)
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
        from gpuherd.batch.assemble import read_engine
        from gpuherd.jobs.settings import load

        fill_from_block(args, read_engine(args.path))
        load().fill(args, EngineOptions)
    named = {name: getattr(args, name) for name in possible if hasattr(args, name)}
    return EngineOptions(engine=spec.name, **named)


def _planner(options: EngineOptions) -> Planner:
    """For jobs that name a model: by the GPUs of the cluster, or of this machine."""
    from functools import partial

    from gpuherd.cli.planning import JOB_FILE, of_a_run, planner
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


def _print_json(args: argparse.Namespace, found: Found, files: Mapping[str, str], folder: Path) -> None:
    told = {
        "to": args.to,
        "folder": str(folder),
        "written": not args.dry_run,
        "jobs": [job.name for job in found.jobs],
        "left_out": dict(found.left_out),
        "files": {name: _bytes(text).decode("utf-8", "replace") for name, text in files.items()},
    }
    print(json.dumps(told, indent=2))
