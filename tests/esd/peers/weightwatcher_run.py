"""Run by the tests in a process of its own: WeightWatcher's table of the matrices in a file.

    python weightwatcher_run.py matrices.npz table.csv [--mp-fit] [--randomize] [--fix-fingers METHOD]

Each array of the file is the weight of a Linear layer. WeightWatcher comes from a folder of its own on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import logging
import warnings

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("matrices")
    parser.add_argument("table")
    parser.add_argument("--mp-fit", action="store_true")
    parser.add_argument("--randomize", action="store_true")
    parser.add_argument("--fix-fingers", default=None)
    args = parser.parse_args()

    warnings.simplefilter("ignore")
    import torch
    import weightwatcher

    logging.disable(logging.CRITICAL)
    arrays = np.load(args.matrices)
    model = torch.nn.ModuleDict()
    for number, name in enumerate(arrays.files):
        W = arrays[name]
        layer = torch.nn.Linear(W.shape[1], W.shape[0], bias=False)
        layer.weight.data = torch.from_numpy(W)
        model[f"m{number}"] = layer
    options = {"mp_fit": args.mp_fit, "randomize": args.randomize}
    if args.fix_fingers is not None:
        options |= {"fix_fingers": args.fix_fingers, "pl_package": "powerlaw"}
    details = weightwatcher.WeightWatcher(model=model).analyze(**options)
    # The layers come in the order of the file; the name tells which.
    details["matrix"] = [arrays.files[int(name.rpartition("m")[2])] for name in details["longname"]]
    details.to_csv(args.table, index=False, float_format="%.17g")


if __name__ == "__main__":
    main()
