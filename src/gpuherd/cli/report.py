"""``gpuherd report``: one self-contained HTML page of a run of spectra, of answers, or of post-training."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpuherd.cli.common import add_command, add_run
from gpuherd.errors import CannotWrite, ExitCode, UsageError, naming_extras, printable
from gpuherd.options import Parser, add_options, build
from gpuherd.qa.working.options import RunsOptions

REPORT = """\
Makes one HTML page of a run's results. Of a run of gpuherd esd: a table of all models, their lineage by alpha, outliers
and failures; for each model a heat map of alpha by layer and module, and the spectrum with its fit for any layer. Of a
run of answers (gpuherd generate): measures of uncertainty with their intervals and curves, how far the labels can be
believed, and every answer with its tokens coloured by probability and relevance. Of a run of gpuherd posttrain, or the
output of gpuherd train: every policy's figures with their intervals, round by round and against its distance from the
reference, learning curves, jobs in time, failures, and completions to look at. The page has everything inside it, asks
nothing of any network, and can be mailed.

examples:
  gpuherd report results                        writes results/report.html and opens it in a browser
  gpuherd report my-run                         a run of answers, by its name in --runs-dir
  gpuherd report my-run --evaluation 1a2b3c4d   this evaluation of it, not the latest
  gpuherd report outputs/first/2026-11-22_04-30-00 --plot curves.svg     also a figure for a paper
  gpuherd report results --output page.html
  gpuherd report results --open no --json       says where it is, as JSON
"""

_EXTRAS = {"jinja2": "page", "markupsafe": "page", "matplotlib": "page", "numpy": "esd"}
Progress = Callable[[int, int], None]


def add_report(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "report", REPORT)
    add_run(
        parser,
        "run_folder",
        metavar="RUN",
        help_text="the run's folder; a run of answers also by its name",
        required=True,
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="where the page goes (default: RUN/report.html)")
    parser.add_argument("--evaluation", metavar="NAME", help="of a run of answers: which (default: the latest, if any)")
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="of post-training: also curves as a figure, *.png, *.svg or *.pdf"
    )
    add_options(parser, RunsOptions)
    parser.add_argument(
        "--open",
        choices=("yes", "no", "auto"),
        default="auto",
        help="open the page in a browser; auto: where a person looks on at a desktop (default: auto)",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON; implies --open no")
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Writes the page. Exit code 0, also when models of the run have failed: the page tells."""
    from gpuherd.posttrain.look.kinds import made_by

    trained = made_by(Path(args.run_folder)) is not None
    folder = None if trained else _answers_folder(args.run_folder, build(RunsOptions, args).runs_dir)
    if args.plot is not None and not trained:
        other = "gpuherd evaluate RUN --plot FILE" if folder is not None else "gpuherd esd plot RUN"
        raise UsageError(f"--plot is of post-training, and {args.run_folder} is none; {other} draws its figures")
    if folder is not None:
        return _answers(args, folder)
    if not trained and not Path(args.run_folder).is_dir():
        raise UsageError(
            f"there is no folder {printable(args.run_folder)}, and no run of answers of this name; "
            "name the output folder of a gpuherd esd, generate, posttrain or train"
        )
    if args.evaluation is not None:
        raise UsageError(f"{args.run_folder} is no run of answers: it has no evaluations")
    return _policies(args) if trained else _spectra(args)


def _policies(args: argparse.Namespace) -> int:
    """The page of a run of ``gpuherd posttrain``, or of an output of ``gpuherd train``, and its figure."""
    with naming_extras(_EXTRAS):
        from gpuherd.posttrain.look.page import write_page
        from gpuherd.posttrain.look.plot import run_figure
        from gpuherd.posttrain.look.reading import read_run
        from gpuherd.report.pictures import check_format, picture_bytes

        picture = None if args.plot is None else check_format(args.plot.name)
        with _progress() as progress:
            shown = read_run(Path(args.run_folder), progress("reading"))
        path = (args.output or Path(args.run_folder) / "report.html").absolute()
        if args.plot is not None and picture is not None:
            _write(args.plot.absolute(), picture_bytes(run_figure(shown), picture), "--plot")
        page = write_page(shown, path)
    told = {
        "page": str(path),
        "bytes": len(page.html),
        "policies": page.policies,
        "with_completions": page.samples,
        "trainings": len(shown.trainings),
        "failures": 0 if shown.timeline is None else len(shown.timeline.failures),
        "plot": None if args.plot is None else str(args.plot.absolute()),
    }
    policies = "1 policy" if page.policies == 1 else f"{page.policies} policies"
    trainings = "1 training" if len(shown.trainings) == 1 else f"{len(shown.trainings)} trainings"
    _tell(args, path, told, f"{policies}, {trainings}")
    return ExitCode.OK


def _spectra(args: argparse.Namespace) -> int:
    """The page of a run of ``gpuherd esd``."""
    with naming_extras(_EXTRAS):
        from gpuherd.esd.look.page import make_page
        from gpuherd.esd.look.results import read_results

        with _progress() as progress:
            results = read_results(Path(args.run_folder), progress("reading"))
            page = make_page(results, on_progress=progress("drawing"))
    path = (args.output or results.directory.root / "report.html").absolute()
    _write(path, page.html)
    told = {
        "page": str(path),
        "bytes": len(page.html),
        "models": page.models,
        "with_figures": page.with_figures,
        "with_spectra": page.with_spectra,
        "failures": len(results.failures),
    }
    _tell(args, path, told, "1 model" if page.models == 1 else f"{page.models} models")
    return ExitCode.OK


def _answers(args: argparse.Namespace, folder: Path) -> int:
    """The page of a run of answers."""
    from rich.console import Console

    console = Console(stderr=True) if sys.stderr.isatty() else None
    with naming_extras(_EXTRAS):
        from gpuherd.qa.look.page import write_page
        from gpuherd.qa.look.reading import evaluation_of
        from gpuherd.qa.runs import run_of_path

        opened = run_of_path(folder)
        evaluation = evaluation_of(opened, args.evaluation)
        path = (args.output or opened.folder.root / "report.html").absolute()
        page = write_page(opened, evaluation, path, console)
    told = {
        "page": str(path),
        "bytes": len(page.html),
        "answers": opened.questions,
        "with_texts": page.answers,
        "evaluation": None if evaluation is None else evaluation.name,
    }
    _tell(args, path, told, "1 answer" if opened.questions == 1 else f"{opened.questions} answers")
    return ExitCode.OK


def _answers_folder(name: str, runs_dir: str) -> Path | None:
    """The folder of the run of answers of this name or path; None where it is no such run, but perhaps another.

    Raises NoSuchRun, which names the nearest, where there are runs of answers but none of this name.
    """
    from gpuherd.qa.folder import KIND, QADirectory
    from gpuherd.qa.runs import folder_of

    folder = Path(name)
    if not folder.exists() and Path(runs_dir).is_dir():
        folder = folder_of(name, runs_dir)
    try:
        record = json.loads((folder / "run.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        # A run of answers whose run.json is damaged is still one; run_of_path says what is wrong with it.
        return folder if QADirectory(folder).questions.exists() or QADirectory(folder).answers.exists() else None
    return folder if isinstance(record, dict) and record.get("kind") == KIND else None


def _tell(args: argparse.Namespace, path: Path, told: Mapping[str, object], what: str) -> None:
    if args.json:
        print(json.dumps(told, indent=2))
    else:
        print(f"{path}  ({what}, {path.stat().st_size / 2**20:.1f} MB)")
        _open(path, args.open)


def _write(path: Path, data: bytes, flag: str = "--output") -> None:
    from gpuherd.atomic import atomic_write

    try:
        atomic_write(path, data)
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}; name another file with {flag}") from None


def _open(path: Path, wish: str) -> None:
    """Opens the page where that is wished, or where a person at a desktop would be glad of it."""
    import os

    desktop = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if wish == "yes" or (wish == "auto" and desktop and sys.stdout.isatty()):
        import webbrowser

        if not webbrowser.open(path.as_uri()):
            print("no browser could be opened", file=sys.stderr)


@contextmanager
def _progress() -> Iterator[Callable[[str], Progress | None]]:
    """Makes a progress callback by a word; a bar on standard error while people look, nothing else there."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:

        def begin(word: str) -> Progress:
            task: Any = bar.add_task(word)
            return lambda done, total: bar.update(task, completed=done, total=total)

        yield begin
