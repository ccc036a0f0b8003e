"""``gpuherd esd`` analyses models on free GPUs; its tools import published results, draw spectra, and make tables."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import (
    add_json,
    add_run_name,
    console_for,
    print_json,
    print_table,
    progress_bar,
    progress_of,
    write_file,
)
from gpuherd.cli.job_start import load_for
from gpuherd.columns import Column
from gpuherd.errors import BadModel, ExitCode, UsageError, naming_extras, printable
from gpuherd.esd.config import ExperimentConfig
from gpuherd.esd.folder import VIEWS
from gpuherd.esd.report.plot import KINDS
from gpuherd.options import Parser, add_options, build, option_fields

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpuherd.esd.allocation import By, Curve
    from gpuherd.esd.comparison import Comparison, Match
    from gpuherd.esd.published import Imported
    from gpuherd.esd.remake import Remade
    from gpuherd.esd.results import ModelTable


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
    from gpuherd.esd.folder import ESDDirectory, earlier_run, resumed

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
    from gpuherd.esd.published import import_published

    source = Path(args.folder)
    if not source.is_dir():
        raise BadModel(f"there is no folder {args.folder}")
    directory = ESDDirectory(args.output_dir)
    files: list[Imported] = []
    with progress_bar() as bar:
        for each in import_published(source, directory, progress_of(bar, "importing")):
            files.append(each)
            if not args.json:
                print(_import_line(each))
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


ESD_VIEWS = """\
Makes the views of a run's results again from its data set (stats/*.parquet): missing or damaged CSV files in stats/,
the tables of alphas in metrics/ and esd_results_summary.csv. Files that are as they should be are not written; a CSV
file that was changed by hand is kept, and the other views follow it.

examples:
  gpuherd esd views results --dry-run           which files are missing or differ
  gpuherd esd views results
  gpuherd esd views results --only summary

Exit codes: 0 all views are there, 1 some results can't be read, 2 wrong usage or no results.
"""


def add_esd_views(parser: Parser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="the run's folder (its --output-dir)")
    parser.add_argument(
        "--only", choices=VIEWS, nargs="+", metavar="VIEW", help=f"make only some views: {', '.join(VIEWS)}"
    )
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="list what would be written, write nothing")
    add_json(parser, "what was written")


def run_esd_views(args: argparse.Namespace) -> int:
    """Makes the views. Returns 0, or 1 if some results can't be read."""
    from gpuherd.esd.folder import ESDDirectory
    from gpuherd.esd.remake import make_views

    directory = ESDDirectory(args.folder)
    if not directory.root.is_dir():
        raise UsageError(f"there is no folder {args.folder}; name the --output-dir of a gpuherd esd run")
    with progress_bar() as bar:
        done = make_views(
            directory, args.only or VIEWS, dry_run=args.dry_run, on_progress=progress_of(bar, "making views")
        )
    problems = [problem for view in done.values() for problem in view.problems]
    if args.json:
        views = {
            kind: {
                "written": list(map(str, view.written)),
                "unchanged": view.unchanged,
                "kept": list(map(str, view.kept)),
            }
            for kind, view in done.items()
        }
        print_json({"output_dir": str(directory.root), "dry_run": args.dry_run, "views": views, "problems": problems})
    else:
        for kind, view in done.items():
            _print_view(kind, view, dry_run=args.dry_run)
        for problem in problems:
            print(printable(f"unreadable  {problem}"))
    return ExitCode.FAILED if problems else ExitCode.OK


def _print_view(kind: str, view: Remade, *, dry_run: bool) -> None:
    print(f"{kind}: {len(view.written)} {'to write' if dry_run else 'written'}, {view.unchanged} unchanged")
    for path in view.written[:_MOST_FILES] if dry_run else ():
        print(f"  {printable(str(path))}")
    if dry_run and len(view.written) > _MOST_FILES:
        print(f"  … and {len(view.written) - _MOST_FILES} more; --json has all")
    for path in view.kept:
        print(printable(f"  kept, because it was changed by hand: {path}"))


ESD_PLOT = """\
Draws the spectrum of each matching layer in log-log with its fitted power law and xmin, or all alphas of a model by
layer and module.

examples:
  gpuherd esd plot results --model gpt2 --layer h.0.mlp.c_fc
  gpuherd esd plot results --model gpt2 --layer '*.mlp.c_fc' --kind both --output c_fc.svg
  gpuherd esd plot results --model gpt2 --kind alpha --output alpha.png
"""

_EXTRAS = {"matplotlib": "page", "numpy": "esd"}
_MOST_FILES = 20  # of a dry run


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
        from gpuherd.report.charts import check_format, picture_bytes

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
    from gpuherd.esd.report.plot import alpha_figure, matching, spectra_figure, title_of
    from gpuherd.esd.results import has_spectra, model_in, read_model, stored_spectra
    from gpuherd.report.charts import check_format

    check_format(args.output.name)
    if args.kind != "alpha" and args.layer is None:
        raise UsageError("say which layers: --layer '*.q_proj' (or --kind alpha for all alphas)")
    directory = ESDDirectory(args.run_folder)
    model = read_model(model_in(directory, args.model))
    title = title_of(model.model_id, model.convention)
    if args.kind == "alpha":
        if args.layer is not None:
            raise UsageError("--kind alpha draws all layers; leave --layer out")
        return {"model": model.model_id}, alpha_figure(model.named_alphas(), title)

    if not has_spectra(directory, model.stem):
        raise UsageError(
            f"{directory.root} holds no spectra of {model.model_id!r}: imported results have none; "
            "analyse it again with gpuherd esd --overwrite"
        )
    stored = stored_spectra(directory, model.stem).layers
    drawable = {layer.longname for layer in stored}
    pairs = zip(model.names, model.status, strict=True)
    layers = matching(stored, args.layer, {name: status for name, status in pairs if name not in drawable})
    drawn: dict[str, object] = {"model": model.model_id, "layers": [layer.longname for layer in layers]}
    return drawn, spectra_figure(layers, args.kind, title)


# ---- tables from the results of a run: esd compare and export --------------------------------------------------------

ESD_COMPARE = """\
Compares alpha layer by layer. A and B are each a stats file, RUN:model, or RUN, the folder of a run. For two runs of
several models, models with the same id are compared, one line each.

examples:
  gpuherd esd compare results:org/base results:org/finetune
  gpuherd esd compare results/stats/gpt2.csv published/stats/gpt2.csv --across-conventions
  gpuherd esd compare last-week this-week --json

Exit codes: 0 compared, 1 no matrix has a fit in both, 2 wrong usage, no common model, or two conventions, 66 no such
model.
"""
_MOST_ROWS = 400
_MODEL_COLUMNS = (
    Column("matrix", 0, least=12, middle=True),
    Column("alpha A", 2, right=True),
    Column("alpha B", 3, right=True),
    Column("delta", 1, right=True),
)
_RUN_COLUMNS = (
    Column("model", 0, least=12, middle=True),
    Column("matrices", 3, right=True),
    Column("median |delta|", 1, right=True),
    Column("largest", 2, right=True),
)


def add_esd_compare(parser: Parser) -> None:
    parser.add_argument("a", metavar="A", help="a stats file, RUN:model or RUN")
    parser.add_argument("b", metavar="B", help="the same, to compare with it")
    parser.add_argument(
        "--across-conventions",
        "--across_conventions",
        action="store_true",
        help="compare also if alpha was computed in different ways (--fix-fingers, --ks, …), with a note",
    )
    add_json(parser, "the comparison")


def run_esd_compare(args: argparse.Namespace) -> int:
    """Compares. Returns 0, or 1 if no matrix has a valid fit in both."""
    from gpuherd.esd.comparison import compare, matched
    from gpuherd.esd.results import find, read_models

    match = matched(read_models(find(args.a)), read_models(find(args.b)))
    done = [compare(one, other, across_conventions=args.across_conventions) for one, other in match.pairs]
    if not done:
        raise UsageError(f"{args.a} and {args.b} have no model in common; compare two by name: RUN:model")
    if args.json:
        models = [each.as_dict() for each in done]
        print_json({"models": models, "only_a": list(match.only_a), "only_b": list(match.only_b)})
    elif len(done) == 1 and not match.only_a and not match.only_b:
        _print_model(done[0])
    else:
        _print_runs(done, match)
    return ExitCode.OK if any(each.deltas for each in done) else ExitCode.FAILED


def _print_model(comparison: Comparison) -> None:
    print(f"A  {printable(comparison.a)}")
    print(f"B  {printable(comparison.b)}")
    _print_conventions([comparison])
    rows = [
        [printable(pair.longname), _figure(pair.a), _figure(pair.b), _figure(pair.delta, sign=True)]
        for pair in comparison.pairs
    ]
    print_table(_MODEL_COLUMNS, rows[:_MOST_ROWS])
    if len(rows) > _MOST_ROWS:
        print(f"… and {len(rows) - _MOST_ROWS} more matrices; --json has all")
    for side, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            first = ", ".join(printable(name) for name in names[:5])
            print(f"only in {side}: {len(names)} ({first}{', …' if len(names) > 5 else ''})")
    print(_verdict(comparison))


def _print_runs(done: list[Comparison], match: Match) -> None:
    _print_conventions(done)
    rows = [
        [
            printable(each.a),
            str(len(each.deltas)),
            _figure(each.median),
            _figure(None if each.largest is None else each.largest.delta, sign=True),
        ]
        for each in done
    ]
    print_table(_RUN_COLUMNS, rows)
    print(f"{len(done)} models in both, {len(match.only_a)} only in A, {len(match.only_b)} only in B")


def _print_conventions(done: list[Comparison]) -> None:
    for a, b in dict.fromkeys(each.conventions for each in done if each.conventions is not None):
        print(f"two conventions: a difference is not due to the models alone: A {printable(a)}; B {printable(b)}")


def _verdict(comparison: Comparison) -> str:
    largest = comparison.largest
    if largest is None or comparison.median is None:
        return "no matrix with a valid fit in both"
    return (
        f"{len(comparison.deltas)} matrices with a fit in both: median |delta| {comparison.median:.4g}, "
        f"largest {_figure(largest.delta, sign=True)} at {printable(largest.longname)}"
    )


def _figure(value: float | None, *, sign: bool = False) -> str:
    return "-" if value is None else f"{value:+.4f}" if sign else f"{value:.4f}"


ESD_EXPORT = """\
Turns the alphas of an analysed model into parameters for training or pruning, one line per matrix.

--tempbalance   a factor on the learning rate, 0.5 to 1.5 (arXiv 2312.00359); with --lr the learning rate itself
--alphapruning  a sparsity; the mean over all weights is --sparsity (arXiv 2410.10912)

examples:
  gpuherd esd export results --model org/name --tempbalance --lr 3e-4 --csv > rates.csv
  gpuherd esd export results:org/name --alphapruning --sparsity 0.7 --json
  gpuherd esd export results/stats/gpt2.csv --tempbalance --mapping step
"""
DEFAULT_SPARSITY = 0.7


def add_esd_export(parser: Parser) -> None:
    help_text = "a run's folder, RUN:model or a stats file"
    add_run_name(parser, "run_words", metavar="RUN", help_text=help_text, required=True)
    method = parser.add_mutually_exclusive_group(required=True)
    method.add_argument("--tempbalance", action="store_true", help="learning-rate factors of TempBalance")
    method.add_argument("--alphapruning", action="store_true", help="sparsities of AlphaPruning")
    parser.add_argument("--model", metavar="MODEL", help="which model of the run; needed if it has several")
    parser.add_argument("--lr", type=float, metavar="X", help="with --tempbalance: the learning rate to multiply")
    parser.add_argument(
        "--mapping",
        choices=("linear", "sqrt", "log2", "step"),
        help="with --tempbalance: function from alpha to the factor (default: linear)",
    )
    parser.add_argument(
        "--sparsity",
        type=float,
        metavar="S",
        help=f"with --alphapruning: the share of weights to prune (default: {DEFAULT_SPARSITY})",
    )
    parser.add_argument(
        "--by",
        choices=("block", "layer"),
        help="with --alphapruning: use the alpha of each block or of each matrix (default: block)",
    )
    parser.add_argument(
        "--epsilon",
        type=float,
        metavar="X",
        help="with --alphapruning: how much the sparsities of layers differ (default: 0.3)",
    )
    form = parser.add_mutually_exclusive_group()
    add_json(form, "the table")
    form.add_argument("--csv", action="store_true", help="print the table as CSV")


def run_esd_export(args: argparse.Namespace) -> int:
    """Prints the table."""
    _refuse_options_of_other_method(args)
    from gpuherd.esd.folder import as_text

    model = _model(args)
    about, rows = _tempbalance(args, model) if args.tempbalance else _alphapruning(args, model)
    if args.json:
        record = {"model": model.model_id, "convention": as_text(model.convention)} | about | {"layers": rows}
        print_json(record)
    elif args.csv:
        from gpuherd.esd.views import table_text

        print(table_text(rows), end="")
    else:
        _print_table(model, about, rows)
    return ExitCode.OK


def _refuse_options_of_other_method(args: argparse.Namespace) -> None:
    method = "--tempbalance" if args.tempbalance else "--alphapruning"
    for name in ("sparsity", "by", "epsilon") if args.tempbalance else ("lr", "mapping"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} does not go with {method}")
    if args.lr is not None and not 0 < args.lr < float("inf"):
        raise UsageError(f"--lr {args.lr:g} must be a positive number")


def _model(args: argparse.Namespace) -> ModelTable:
    from gpuherd.esd.folder import ESDDirectory
    from gpuherd.esd.results import find, model_in, read_model

    if Path(args.run_words).is_dir():
        return read_model(model_in(ESDDirectory(args.run_words), args.model))
    if args.model is not None:
        raise UsageError(f"--model goes with the folder of a run, and {args.run_words!r} is none")
    return read_model(find(args.run_words)[0])


def _tempbalance(args: argparse.Namespace, model: ModelTable) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from gpuherd.esd.allocation import factors

    mapping: Curve = args.mapping or "linear"
    rows: list[dict[str, Any]] = []
    for each in factors(model.layers, mapping):
        row: dict[str, Any] = {"longname": each.longname, "alpha": each.alpha, "factor": each.factor}
        if args.lr is not None:
            row["lr"] = each.factor * args.lr
        rows.append(row | {"excluded": each.excluded})
    return {"method": "tempbalance", "mapping": mapping, "lr": args.lr}, rows


def _alphapruning(args: argparse.Namespace, model: ModelTable) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from gpuherd.esd.allocation import EPSILON, sparsities

    target = DEFAULT_SPARSITY if args.sparsity is None else args.sparsity
    epsilon = EPSILON if args.epsilon is None else args.epsilon
    by: By = args.by or "block"
    rows = [
        {"longname": each.longname, "params": each.params, "alpha": each.score, "sparsity": each.sparsity}
        for each in sparsities(model.layers, target, by=by, epsilon=epsilon)
    ]
    return {"method": "alphapruning", "sparsity": target, "by": by, "epsilon": epsilon}, rows


def _print_table(model: ModelTable, about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    names = [name for name in rows[0] if name != "longname"] if rows else []
    words = ", ".join(f"{name} {value}" for name, value in about.items() if value is not None and name != "method")
    print(printable(f"{model.model_id}: {about['method']}, {words}"))
    columns = [Column("matrix", 0, least=12, middle=True)]
    columns += [Column(name, index + 1, right=name != "excluded") for index, name in enumerate(names)]
    lines = [[printable(row["longname"]), *(_cell(row[name]) for name in names)] for row in rows]
    print_table(columns, lines)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else printable(str(value))
