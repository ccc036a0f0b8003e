"""Runs seeds and methods, two at a time, and writes what came out.

    python -m reproductions.star_graph                      G(2,3) and G(3,3), seeds 0 1 2, all methods
    python -m reproductions.star_graph --graphs 2,3 --seeds 0 --methods Q# DPO
    python -m reproductions.star_graph --only-tables        docs from the results that are there

A seed of a graph is a process with one thread. What is done lies in the work folder: the same command goes on from
there. Results: ``reproductions/star_graph/results/<graph>-seed<seed>.json``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from reproductions.results import RATE_FACTOR, own, quiet_libraries, write_result
from reproductions.star_graph.protocol import METHODS, PROTOCOLS, Protocol

RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 where every seed has been run."""
    parser = argparse.ArgumentParser(
        prog="python -m reproductions.star_graph",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--graphs", nargs="+", type=_graph, default=[(2, 3), (3, 3)], metavar="d,l")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--methods", nargs="+", default=None, metavar="METHOD", help="all by default")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="processes side by side (default: 2)")
    parser.add_argument("--rate-factor", type=float, default=1.0, metavar="F", help=RATE_FACTOR)
    parser.add_argument("--work", type=Path, default=Path("outputs/star-graph"), help="folder of models and rows")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    documents = parser.add_mutually_exclusive_group()
    documents.add_argument("--only-tables", action="store_true", help="write the documents from the results there are")
    documents.add_argument("--no-tables", action="store_true", help="leave the documents as they are")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    if not args.only_tables:
        units = [(graph, seed) for graph in args.graphs for seed in args.seeds]
        if len(units) == 1:
            run_seed(PROTOCOLS[args.graphs[0]], args.seeds[0], args, console)
        elif failed := _side_by_side(units, args, console):
            console.print(f"failed: {', '.join(failed)}; the same command goes on")
            return 1
    if not args.no_tables:
        from reproductions.star_graph.tables import write_documents

        write_documents(args.results)
    return 0


def _graph(word: str) -> tuple[int, int]:
    degree, _, length = word.partition(",")
    graph = int(degree), int(length)
    if graph not in PROTOCOLS:
        raise argparse.ArgumentTypeError(f"{word}: there is {' '.join(f'{d},{length}' for d, length in PROTOCOLS)}")
    return graph


def _side_by_side(
    units: Sequence[tuple[tuple[int, int], int]], args: argparse.Namespace, console: Console
) -> list[str]:
    """Each seed in a process of its own; those that failed."""
    waiting, running, failed = list(units), dict[str, subprocess.Popen[bytes]](), list[str]()
    while waiting or running:
        while waiting and len(running) < args.at_once:
            (degree, length), seed = waiting.pop(0)
            words = ["--graphs", f"{degree},{length}", "--seeds", str(seed)]
            words += ["--work", str(args.work), "--results", str(args.results), "--no-tables"]
            words += ["--methods", *args.methods] if args.methods else []
            words += ["--rate-factor", repr(args.rate_factor)]
            running[f"G({degree},{length}) seed {seed}"] = subprocess.Popen(
                [sys.executable, "-m", "reproductions.star_graph", *words],
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                console.print(f"{name}: {'done' if process.returncode == 0 else 'failed'}")
                failed += [] if process.returncode == 0 else [name]
        time.sleep(1)
    return failed


def run_seed(protocol: Protocol, seed: int, args: argparse.Namespace, console: Console) -> None:
    """The base of a seed, and each method from it; what is there is not done again."""
    import torch

    from reproductions.comparison import is_done, run_methods, share, tested
    from reproductions.star_graph.base import chosen_base, graphs, make_base

    torch.set_num_threads(1)
    quiet_libraries()
    folder = args.work / f"{protocol.degree}-{protocol.length}" / f"seed-{seed}"
    place, looked = make_base(protocol, seed, folder / "base", console)
    chosen = chosen_base(protocol, looked)
    found: dict[str, Any] = {
        "protocol": asdict(protocol),
        "seed": seed,
        "checkpoints": [asdict(each) | {"passes": each.passes(protocol)} for each in looked],
        "base_step": None if chosen is None else chosen.step,
        "methods": {},
    }
    result = args.results / f"{protocol.degree}-{protocol.length}-seed{seed}.json"
    write_result(result, found)
    if place is None:
        console.print(f"{protocol.name} seed {seed}: not valid, no checkpoint of the base passes")
        return
    protocol = replace(protocol, budget=protocol.budget.at_rate(args.rate_factor))
    task = graphs(protocol, protocol.length, seed, protocol.budget.completions // 2)
    shared = share(protocol.budget, protocol.name, seed, place, task, folder)
    found["base"] = tested(shared, "base", shared.base, folder / "base-test")
    asked = [name for name in METHODS if name in (args.methods or METHODS) or is_done(folder, name)]

    def after_each(name: str, figures: Mapping[str, Any]) -> None:
        write_result(result, found | {"methods": figures})
        console.print(f"{protocol.name} seed {seed}: {name} {own(figures[name]['points'])['right']['value']:.3f}")

    run_methods(shared, asked, folder, after_each)


if __name__ == "__main__":
    sys.exit(main())
