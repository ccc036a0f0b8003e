"""Some parts: printed, put in place of those in ``results/posttrain.json``, and the documents' tables made of that.

With ``--quick`` they are printed alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os

from benchmarks.__main__ import FOLDER, machine, versions
from benchmarks.posttrain import PARTS, figures_of
from benchmarks.posttrain._table import write_tables

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.posttrain", description="Parts of the benchmark.")
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that they work; nothing is written")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = FOLDER / "results" / "posttrain.json"
    for part in args.parts or PARTS:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        started = {"date": date, "machine": machine(), "versions": versions()}
        figures = figures_of(part, quick=args.quick)
        print(json.dumps({part: figures}, indent=1), flush=True)
        if not args.quick:
            told = json.loads(results.read_text(encoding="utf-8"))
            told["figures"][part] = {**figures, "measured": started}
            results.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
            write_tables()
