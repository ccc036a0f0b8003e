"""Runs the seeds one after the other and writes what came out.

    python -m reproductions.noisy_addition
    python -m reproductions.noisy_addition --only-tables       docs from the results that are there

One process, one thread. What is done lies in the work folder: the same command goes on from there. Results:
``reproductions/noisy_addition/results/seed<seed>.json``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from reproductions.noisy_addition.protocol import METHODS, Protocol
from reproductions.results import RATE_FACTOR, own, quiet_libraries, write_result

RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 where every seed has been run."""
    parser = argparse.ArgumentParser(
        prog="python -m reproductions.noisy_addition",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3], metavar="SEED")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD", help="all by default")
    parser.add_argument("--rate-factor", type=float, default=1.0, metavar="F", help=RATE_FACTOR)
    parser.add_argument("--work", type=Path, default=Path("outputs/noisy-addition"), help="folder of models and rows")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--only-tables", action="store_true", help="write the documents from the results there are")
    args = parser.parse_args(argv)
    if not args.only_tables:
        console = Console(stderr=True)
        for seed in args.seeds:
            run_seed(Protocol(), seed, args, console)
    from reproductions.noisy_addition.tables import write_documents

    write_documents(args.results)
    return 0


def run_seed(protocol: Protocol, seed: int, args: argparse.Namespace, console: Console) -> None:
    """The base of a seed, and each method from it; what is there is not done again."""
    import torch

    from reproductions.comparison import run_methods, share, tested
    from reproductions.noisy_addition.base import make_base, sums

    torch.set_num_threads(1)
    quiet_libraries()
    folder, result = args.work / f"seed-{seed}", args.results / f"seed{seed}.json"
    place, looked = make_base(protocol, seed, folder / "base", console)
    found: dict[str, Any] = {
        "protocol": asdict(protocol),
        "seed": seed,
        "checkpoints": [asdict(each) | {"passes": each.passes} for each in looked],
        "methods": {},
    }
    write_result(result, found)
    if place is None:
        console.print(f"seed {seed}: not valid, no checkpoint of the base passes")
        return
    protocol = replace(protocol, budget=protocol.budget.at_rate(args.rate_factor))
    shared = share(protocol.budget, "noisy addition", seed, place, sums(protocol, seed), folder)
    found["base"] = tested(shared, "base", shared.base, folder / "base-test")

    def after_each(name: str, figures: Mapping[str, Any]) -> None:
        write_result(result, found | {"methods": figures})
        console.print(f"seed {seed}: {name} {own(figures[name]['points'])['right']['value']:.3f}")

    run_methods(shared, args.methods, folder, after_each)


if __name__ == "__main__":
    sys.exit(main())
