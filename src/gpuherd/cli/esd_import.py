"""``gpuherd esd import``: published results as a folder of ours."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from gpuherd.cli.parsing import add_command
from gpuherd.errors import BadModel, ExitCode, printable
from gpuherd.options import Parser

if TYPE_CHECKING:
    from gpuherd.esd.tables.importing import Imported

DESCRIPTION = """\
Takes stats files that others have published (the Model-Zoo's form, one CSV a model) into a folder of results, so that
report, compare and export work on them. A row whose alpha is -1 becomes a row without a fit, with its reason. Their
xmin is not taken: it means something else there.

examples:
  gpuherd esd import Model-Zoo/output/results/stats --output-dir published
  gpuherd report published
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "esd import", DESCRIPTION)
    parser.add_argument("folder", metavar="FOLDER", help="folder with the published files, *.csv")
    parser.add_argument("--output-dir", "--output_dir", metavar="DIR", required=True, help="folder for the results")
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Imports the folder. Returns 0 when every file could be taken, else 1."""
    from pathlib import Path

    from gpuherd.esd.folder import ESDDirectory
    from gpuherd.esd.tables.importing import import_published

    source = Path(args.folder)
    if not source.is_dir():
        raise BadModel(f"there is no folder {args.folder}")
    directory = ESDDirectory(args.output_dir)
    done = []
    for each in import_published(source, directory):
        done.append(each)
        if not args.json:
            print(_line(each), flush=True)
    refused = sum(each.problem is not None for each in done)
    if args.json:
        print(json.dumps(_as_json(done, str(directory.root)), indent=2))
    else:
        print(f"{len(done) - refused} imported, {refused} refused; results: {directory.stats}")
    return ExitCode.FAILED if refused else ExitCode.OK


def _line(each: Imported) -> str:
    if each.problem is not None:
        return printable(f"refused  {each.problem}")
    return printable(f"{each.model_id}: {each.fits} of {each.layers} matrices with a fit")


def _as_json(done: list[Imported], root: str) -> dict[str, object]:
    return {
        "output_dir": root,
        "models": [
            {"model": each.model_id, "file": str(each.file), "layers": each.layers, "fits": each.fits}
            for each in done
            if each.problem is None
        ],
        "refused": [{"file": str(each.file), "reason": each.problem} for each in done if each.problem is not None],
    }
