"""``gpuherd doctor``: checks this machine; one line per check, with a remedy if one is needed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from gpuherd.cli.common import add_json, print_json
from gpuherd.engines.registry import LOCAL, specs
from gpuherd.errors import ExitCode
from gpuherd.options import Parser, add_options, build

if TYPE_CHECKING:
    from rich.console import Console

    from gpuherd.checks import CheckResult

DOCTOR = """\
Checks driver, CUDA, torch, each visible GPU (a small model is loaded and run on it), interconnect, disk and versions.
Exits with 0 if everything works and with 1 if a check failed.

examples:
  gpuherd doctor
  gpuherd doctor --json
  gpuherd --simulate 8x40GB doctor
"""

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "cyan"}
_NAME_WIDTH = 20
_LONG_S = 2.0


def add_doctor(parser: Parser) -> None:
    add_json(parser, "the checks")
    clusters = [spec for spec in specs() if spec.name != LOCAL]
    names = [spec.name for spec in clusters]
    parser.add_argument("--engine", choices=names, help="also check this engine, and this folder for it")
    for spec in clusters:
        if spec.doctor_options:
            add_options(parser, spec.options, only=spec.doctor_options)


def run_doctor(args: argparse.Namespace) -> int:
    """Runs all checks and prints the result of each as soon as it is known."""
    from rich.console import Console

    from gpuherd.checks import all_well
    from gpuherd.doctor import checks
    from gpuherd.engines.options import EngineOptions, engine_values
    from gpuherd.standin import driver
    from gpuherd.standin.driver import STATE_VARIABLE

    simulated = STATE_VARIABLE in os.environ
    screen, waiting = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False)
    results: list[CheckResult] = []
    options = build(EngineOptions, argparse.Namespace(**engine_values(args) | {"engine": args.engine or LOCAL}))
    engine = None if args.engine is None else options
    for step in checks.steps(simulated=simulated, compiler=driver.compiler(), options=engine):
        with _progress(waiting, step.title):
            found = step.run()
        results += found
        if not args.json:
            for result in found:
                _print_result(screen, result)
    well = all_well(results)
    if args.json:
        print_json({"ok": well, "simulated": simulated, "checks": [asdict(result) for result in results]})
    else:
        screen.print("all well" if well else "something is wrong: see the lines marked fail")
    return ExitCode.OK if well else ExitCode.FAILED


@contextmanager
def _progress(console: Console, title: str) -> Iterator[None]:
    """Shows which check is running: on a terminal a spinner, elsewhere a line if the check takes long."""
    if console.is_terminal:
        with console.status(f"checking {title} ..."):
            yield
        return
    import threading

    timer = threading.Timer(_LONG_S, console.print, [f"checking {title} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print_result(console: Console, result: CheckResult) -> None:
    from rich.text import Text

    line = Text.assemble(
        (f"{result.status:<5}", _COLOURS[result.status]), f"{result.name:<{_NAME_WIDTH}} ", result.detail
    )
    console.print(line)
    if result.remedy is not None:
        console.print(Text(f"{'':<{_NAME_WIDTH + 6}}-> {result.remedy}", style="dim"))
    sys.stdout.flush()
