"""Some parts, printed."""

from __future__ import annotations

import argparse
import json
import os

from benchmarks.posttrain import PARTS, figures_of

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.posttrain", description="Parts of the benchmark.")
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that they work")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for part in args.parts or PARTS:
        print(json.dumps({part: figures_of(part, quick=args.quick)}, indent=1))
