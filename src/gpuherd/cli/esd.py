"""``gpuherd esd`` analyses models on free GPUs; ``esd import`` reads published results; ``esd plot`` draws spectra."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.cli.common import add_json, add_run_name
from gpuherd.cli.job_start import load_for
from gpuherd.cli.output import console_for, print_json, write_file
from gpuherd.errors import BadModel, ExitCode, UsageError, naming_extras, printable
from gpuherd.esd.config import ExperimentConfig
from gpuherd.esd.look.plot import KINDS
from gpuherd.options import Parser, add_options, build, option_fields

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpuherd.esd.tables.importing import Imported

ESD = """\
Computes the spectra of the weight matrices of models and fits power laws to their tails, one job per model, on free
GPUs. The same command again continues where it stopped; models that are done are not analysed twice.

examples:
  gpuherd esd --model-list models.csv --max-gpus 4 --output-dir results
  gpuherd esd --model-list models.csv --gpu-list 4 5 6 7 --gpu-mem-threshold 1000 --max-checks 15
  gpuherd esd --single-model openai-community/gpt2 --max-gpus 1
  gpuherd esd --model-list models.csv --dry-run           what would run, and which rows are refused
  gpuherd esd --resume results                            continue with the list and the options of an earlier run
  gpuherd --simulate 4x40GB esd --model-list models.csv   try it without GPUs

The list is a CSV file with the columns model_id (or full_name), source_model and base_model_relation.
Exit codes: 0 all done, 1 some failed or were refused (with --dry-run: can never run), 2 wrong usage, 130 stopped by
Ctrl-C.
"""


def add_esd(parser: Parser) -> None:
    add_options(parser, ExperimentConfig)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="continue the run in DIR (default: --output-dir) with its own list and options; options that do not "
        "affect the results may be changed",
    )
    add_json(parser, "the plan or the outcome")


def run_esd(args: argparse.Namespace) -> int:
    """Runs the experiment. Returns its exit code."""
    if args.resume is not None:
        _load_resumed(args)
    load_for(args, ExperimentConfig)
    config = build(ExperimentConfig, args)

    from gpuherd.esd import ESDExperiment

    experiment = ESDExperiment(config, console=console_for(args))
    outcome = experiment.run()
    if args.json:
        print_json(experiment.to_dict())
    return outcome.exit_code


def _load_resumed(args: argparse.Namespace) -> None:
    """Puts the options of the run to continue into ``args``, and changes to the folder where it was started, to which
    the paths in its list are relative."""
    from gpuherd.esd.folder import ESDDirectory
    from gpuherd.esd.resuming import earlier_run, resumed

    names = [field.name for field, _ in option_fields(ExperimentConfig)]
    given = {name: getattr(args, name) for name in names if name in args}
    named = given.pop("output_dir", None)
    if args.resume and named is not None and Path(args.resume).absolute() != Path(named).absolute():
        raise UsageError(f"--resume {args.resume} and --output-dir {named} are two folders; name one")
    earlier = earlier_run(ESDDirectory(args.resume or named or str(ExperimentConfig.output_dir)))
    for name in ("log_dir", "model_list"):
        if name in given:
            given[name] = str(Path(given[name]).absolute())
    for name, value in resumed(earlier, given).items():
        setattr(args, name, value)
    try:
        os.chdir(earlier.cwd)
    except OSError as problem:
        raise UsageError(
            f"the run in {earlier.root} was started in {earlier.cwd}, which can't be entered: {problem.strerror}; "
            "give its list and options again, with paths as seen from here"
        ) from None


ESD_IMPORT = """\
Converts published stats files (the form of the Model-Zoo, one CSV per model) into a results folder, so that report,
compare and export work on them. A row whose alpha is -1 becomes a row without a fit, with its reason. The published
xmin is left out, because its meaning there is another one.

examples:
  gpuherd esd import Model-Zoo/output/results/stats --output-dir published
  gpuherd report published
"""


def add_esd_import(parser: Parser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="folder with the published files, *.csv")
    parser.add_argument("--output-dir", "--output_dir", metavar="DIR", required=True, help="folder for the results")
    add_json(parser, "the imported models")


def run_esd_import(args: argparse.Namespace) -> int:
    """Imports the folder. Returns 0 if every file was imported, else 1."""
    from gpuherd.esd.folder import ESDDirectory
    from gpuherd.esd.tables.importing import import_published

    source = Path(args.folder)
    if not source.is_dir():
        raise BadModel(f"there is no folder {args.folder}")
    directory = ESDDirectory(args.output_dir)
    files: list[Imported] = []
    for each in import_published(source, directory):
        files.append(each)
        if not args.json:
            print(_import_line(each), flush=True)
    good = [each for each in files if each.problem is None]
    refused = [each for each in files if each.problem is not None]
    if args.json:
        models = [
            {"model": each.model_id, "file": str(each.file), "layers": each.layers, "fits": each.fits} for each in good
        ]
        problems = [{"file": str(each.file), "reason": each.problem} for each in refused]
        print_json({"output_dir": str(directory.root), "models": models, "refused": problems})
    else:
        print(f"{len(good)} imported, {len(refused)} refused; results: {directory.stats}")
    return ExitCode.FAILED if refused else ExitCode.OK


def _import_line(each: Imported) -> str:
    if each.problem is not None:
        return printable(f"refused  {each.problem}")
    return printable(f"{each.model_id}: {each.fits} of {each.layers} matrices with a fit")


ESD_PLOT = """\
Draws the spectrum of each matching layer in log-log with its fitted power law and xmin, or all alphas of a model by
layer and module.

examples:
  gpuherd esd plot results --model gpt2 --layer h.0.mlp.c_fc
  gpuherd esd plot results --model gpt2 --layer '*.mlp.c_fc' --kind both --output c_fc.svg
  gpuherd esd plot results --model gpt2 --kind alpha --output alpha.png
"""

_EXTRAS = {"matplotlib": "page", "numpy": "esd"}


def add_esd_plot(parser: Parser) -> None:
    add_run_name(parser, "run_folder", metavar="RUN", help_text="the run's folder (its --output-dir)", required=True)
    parser.add_argument("--model", metavar="M", help="its id, or a part of it (not needed for a run of one model)")
    parser.add_argument("--layer", metavar="PATTERN", help="layers to draw, like h.0.mlp.c_fc or '*.q_proj'")
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default="ccdf",
        help="the cumulative distribution of the eigenvalues from above (ccdf), their histogram, both, or a heat map "
        "of alpha (default: ccdf)",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, default=Path("esd.png"), help="*.png, *.svg or *.pdf")
    add_json(parser, "what was drawn")


def run_esd_plot(args: argparse.Namespace) -> int:
    """Draws and writes the picture."""
    with naming_extras(_EXTRAS):
        drawn, figure = _draw(args)
        from gpuherd.report.pictures import check_format, picture_bytes

        data = picture_bytes(figure, check_format(args.output.name))
    path = args.output.absolute()
    write_file(path, data, "--output")
    if args.json:
        print_json({"plot": str(path), "kind": args.kind, **drawn})
    else:
        print(path)
    return ExitCode.OK


def _draw(args: argparse.Namespace) -> tuple[dict[str, object], Figure]:
    """The names of what is drawn, for ``--json``, and the figure. Raises UsageError, MissingModel."""
    from gpuherd.esd.folder import ESDDirectory
    from gpuherd.esd.look.plot import alpha_figure, matching, spectra_figure, title_of
    from gpuherd.esd.look.results import finite_or_none, table_of
    from gpuherd.esd.tables.results import model_in, read_model
    from gpuherd.report.pictures import check_format

    check_format(args.output.name)
    if args.kind != "alpha" and args.layer is None:
        raise UsageError("say which layers: --layer '*.q_proj' (or --kind alpha for all alphas)")
    directory = ESDDirectory(args.run_folder)
    model = table_of(read_model(model_in(directory, args.model)))
    title = title_of(model.model_id, model.convention)
    if args.kind == "alpha":
        if args.layer is not None:
            raise UsageError("--kind alpha draws all layers; leave --layer out")
        alphas = [(name, finite_or_none(float(alpha))) for name, alpha in zip(model.names, model.alpha, strict=True)]
        return {"model": model.model_id}, alpha_figure(alphas, title)

    from gpuherd.esd.tables.spectra_file import read_spectra

    path = directory.spectra / f"{model.stem}.npz"
    if not path.exists():
        raise UsageError(
            f"{directory.root} holds no spectra of {model.model_id!r}: imported results have none; "
            "analyse it again with gpuherd esd --overwrite"
        )
    stored = read_spectra(path).layers
    drawable = {layer.longname for layer in stored}
    pairs = zip(model.names, model.status, strict=True)
    layers = matching(stored, args.layer, {name: status for name, status in pairs if name not in drawable})
    drawn: dict[str, object] = {"model": model.model_id, "layers": [layer.longname for layer in layers]}
    return drawn, spectra_figure(layers, args.kind, title)
