"""``gpuherd esd plot``: spectra of a model's layers, or its alphas, as a picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.cli.parsing import add_command
from gpuherd.cli.run_folder import add_run
from gpuherd.errors import CannotWrite, ExitCode, UsageError, naming_extras
from gpuherd.esd.look.plot import KINDS
from gpuherd.options import Parser

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DESCRIPTION = """\
Draws the spectrum of each matching layer in log-log with its fitted power law and xmin, or all alphas of a model by
layer and module.

examples:
  gpuherd esd plot results --model gpt2 --layer h.0.mlp.c_fc
  gpuherd esd plot results --model gpt2 --layer '*.mlp.c_fc' --kind both --output c_fc.svg
  gpuherd esd plot results --model gpt2 --kind alpha --output alpha.png
"""

_EXTRAS = {"matplotlib": "page", "numpy": "esd"}


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "esd plot", DESCRIPTION)
    add_run(parser, "run_folder", metavar="RUN", help_text="the run's folder (its --output-dir)", required=True)
    parser.add_argument("--model", metavar="M", help="its id, or a part of it (not needed for a run of one model)")
    parser.add_argument("--layer", metavar="PATTERN", help="layers to draw, like h.0.mlp.c_fc or '*.q_proj'")
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default="ccdf",
        help="the share of eigenvalues from each on, their histogram, both, or a heat map of alpha (default: ccdf)",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, default=Path("esd.png"), help="*.png, *.svg or *.pdf")
    parser.add_argument("--json", action="store_true", help="print what was drawn as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draws and writes the picture."""
    with naming_extras(_EXTRAS):
        drawn, figure = _draw(args)
        from gpuherd.report.pictures import check_format, picture_bytes

        data = picture_bytes(figure, check_format(args.output.name))
    path = args.output.absolute()
    from gpuherd.atomic import atomic_write

    try:
        atomic_write(path, data)
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}; name another file with --output") from None
    if args.json:
        print(json.dumps({"plot": str(path), "kind": args.kind, **drawn}, indent=2))
    else:
        print(path)
    return ExitCode.OK


def _draw(args: argparse.Namespace) -> tuple[dict[str, object], Figure]:
    """What is drawn, and the figure. Raises UsageError, MissingModel."""
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
            f"{directory.root} holds no spectra of {model.model_id!r}: results that were imported have none; "
            "analyse it again with gpuherd esd --overwrite"
        )
    stored = read_spectra(path).layers
    drawable = {layer.longname for layer in stored}
    pairs = zip(model.names, model.status, strict=True)
    layers = matching(stored, args.layer, {name: status for name, status in pairs if name not in drawable})
    drawn: dict[str, object] = {"model": model.model_id, "layers": [layer.longname for layer in layers]}
    return drawn, spectra_figure(layers, args.kind, title)
