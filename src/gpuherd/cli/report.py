"""``gpuherd report``: one self-contained HTML page of a run of spectra, of answers, or of post-training."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from gpuherd.cli.common import add_run_name, print_json, progress_bar, progress_of, write_file
from gpuherd.errors import ExitCode, UsageError, naming_extras, printable
from gpuherd.options import Parser, add_options, build
from gpuherd.qa.folder import RunsOptions

REPORT = """\
Writes one HTML page of a run's results.

  gpuherd esd               a table of all models, their lineage by alpha, outliers and failures; for each model a heat
                            map of alpha by layer and module, and the spectrum of any layer with its fit
  gpuherd generate          the uncertainty measures with their intervals and curves, how reliable the labels are, and
                            every answer with its tokens coloured by probability and relevance
  gpuherd posttrain, train  the figures of every policy with their intervals, by round and by distance from the
                            reference; learning curves, the jobs over time, failures, and example completions

The page contains everything it needs: it loads nothing from a network, and can be mailed.

examples:
  gpuherd report results                        writes results/report.html and opens it in a browser
  gpuherd report my-run                         a run of answers, by its name in --runs-dir
  gpuherd report my-run --evaluation 1a2b3c4d   this evaluation of the run, not the latest
  gpuherd report outputs/first/2026-11-22_04-30-00 --plot curves.svg     also a figure for a paper
  gpuherd report results --output page.html
  gpuherd report results --open no --json       prints the path of the page, as JSON
"""

_EXTRAS = {"altair": "page", "jinja2": "page", "markupsafe": "page", "matplotlib": "page", "numpy": "esd"}


def add_report(parser: Parser) -> None:
    help_text = "the run's folder; a run of answers also by its name"
    add_run_name(parser, "run_folder", metavar="RUN", help_text=help_text, required=True)
    parser.add_argument("--output", metavar="FILE", type=Path, help="where to write it (default: RUN/report.html)")
    parser.add_argument(
        "--evaluation", metavar="NAME", help="of a run of answers: which evaluation (default: the latest, if any)"
    )
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="of post-training: also curves as a figure, *.png, *.svg or *.pdf"
    )
    add_options(parser, RunsOptions)
    parser.add_argument(
        "--open",
        choices=("yes", "no", "auto"),
        default="auto",
        help="open the page in a browser; auto: if the output is a terminal on a desktop (default: auto)",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON; implies --open no")


def run_report(args: argparse.Namespace) -> int:
    """Writes the page. Returns 0 also if models of the run have failed: the page shows that."""
    from gpuherd.posttrain.report import output_kind

    is_training = output_kind(Path(args.run_folder)) is not None
    folder = None if is_training else _answers_folder(args.run_folder, build(RunsOptions, args).runs_dir)
    if args.plot is not None and not is_training:
        other = "gpuherd evaluate RUN --plot FILE" if folder is not None else "gpuherd esd plot RUN"
        raise UsageError(f"--plot is for post-training, which {args.run_folder} is not; use {other}")
    if folder is not None:
        return _report_answers(args, folder)
    if not is_training and not Path(args.run_folder).is_dir():
        raise UsageError(
            f"there is no folder {printable(args.run_folder)}, and no run of answers of this name; "
            "name the output folder of a gpuherd esd, generate, posttrain or train"
        )
    if args.evaluation is not None:
        raise UsageError(f"{args.run_folder} is no run of answers: it has no evaluations")
    return _report_training(args) if is_training else _report_spectra(args)


def _report_training(args: argparse.Namespace) -> int:
    """The page of a run of ``gpuherd posttrain``, or of an output of ``gpuherd train``, and its figure."""
    with naming_extras(_EXTRAS):
        from gpuherd.posttrain.report.page import write_page
        from gpuherd.posttrain.report.plot import run_figure
        from gpuherd.posttrain.report.reading import read_run
        from gpuherd.report.charts import check_format, picture_bytes

        picture = None if args.plot is None else check_format(args.plot.name)
        with progress_bar() as bar:
            found = read_run(Path(args.run_folder), progress_of(bar, "reading"))
        path = (args.output or Path(args.run_folder) / "report.html").absolute()
        if args.plot is not None and picture is not None:
            write_file(args.plot.absolute(), picture_bytes(run_figure(found), picture), "--plot")
        page = write_page(found, path)
    written = {
        "page": str(path),
        "bytes": len(page.html),
        "policies": page.policies,
        "with_completions": page.samples,
        "trainings": len(found.trainings),
        "failures": 0 if found.timeline is None else len(found.timeline.failures),
        "plot": None if args.plot is None else str(args.plot.absolute()),
    }
    contents = f"{_count(page.policies, 'policy', 'policies')}, {_count(len(found.trainings), 'training')}"
    return _finish(args, path, written, contents)


def _report_spectra(args: argparse.Namespace) -> int:
    """The page of a run of ``gpuherd esd``."""
    with naming_extras(_EXTRAS):
        from gpuherd.esd.report.page import make_page
        from gpuherd.esd.report.reading import read_results

        with progress_bar() as bar:
            results = read_results(Path(args.run_folder), progress_of(bar, "reading"))
            page = make_page(results, on_progress=progress_of(bar, "drawing"))
    path = (args.output or results.directory.root / "report.html").absolute()
    write_file(path, page.html, "--output")
    written = {
        "page": str(path),
        "bytes": len(page.html),
        "models": page.models,
        "with_figures": page.with_figures,
        "with_spectra": page.with_spectra,
        "failures": len(results.failures),
    }
    return _finish(args, path, written, _count(page.models, "model"))


def _report_answers(args: argparse.Namespace, folder: Path) -> int:
    """The page of a run of answers."""
    from rich.console import Console

    console = Console(stderr=True) if sys.stderr.isatty() else None
    with naming_extras(_EXTRAS):
        from gpuherd.qa.report.page import write_page
        from gpuherd.qa.report.reading import evaluation_of
        from gpuherd.qa.runs import run_of_path

        opened = run_of_path(folder)
        evaluation = evaluation_of(opened, args.evaluation)
        path = (args.output or opened.folder.root / "report.html").absolute()
        page = write_page(opened, evaluation, path, console)
    written = {
        "page": str(path),
        "bytes": len(page.html),
        "answers": opened.questions,
        "with_texts": page.answers,
        "evaluation": None if evaluation is None else evaluation.name,
    }
    return _finish(args, path, written, _count(opened.questions, "answer"))


def _answers_folder(name: str, runs_dir: str) -> Path | None:
    """The folder of the run of answers with this name or path; None if it is not one, but perhaps another kind of run.

    Raises NoSuchRun, which names the nearest, if there are runs of answers but none with this name.
    """
    from gpuherd.qa.folder import KIND, QADirectory
    from gpuherd.qa.runs import folder_of

    folder = Path(name)
    if not folder.exists() and Path(runs_dir).is_dir():
        folder = folder_of(name, runs_dir)
    try:
        record = json.loads((folder / "run.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        # A run of answers with a damaged run.json is still one; run_of_path reports the damage.
        return folder if QADirectory(folder).questions.exists() or QADirectory(folder).answers.exists() else None
    return folder if isinstance(record, dict) and record.get("kind") == KIND else None


def _count(number: int, one: str, many: str = "") -> str:
    return f"1 {one}" if number == 1 else f"{number} {many or one + 's'}"


def _finish(args: argparse.Namespace, path: Path, written: Mapping[str, object], contents: str) -> ExitCode:
    """Prints what was written, and opens the page if ``--open`` or the environment says so."""
    if args.json:
        print_json(written)
        return ExitCode.OK
    print(f"{path}  ({contents}, {path.stat().st_size / 2**20:.1f} MB)")
    desktop = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if args.open == "yes" or (args.open == "auto" and desktop and sys.stdout.isatty()):
        import webbrowser

        if not webbrowser.open(path.as_uri()):
            print("no browser could be opened", file=sys.stderr)
    return ExitCode.OK
