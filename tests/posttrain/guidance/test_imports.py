"""What a command reads before it starts work needs no torch."""

from __future__ import annotations

import subprocess
import sys


def test_algorithms_and_their_options_come_without_torch_and_numpy() -> None:
    code = (
        "import sys\n"
        "from gpuherd.posttrain.algos.registry import algorithms\n"
        "needed = {'Distill': {'teacher': 'model'}}\n"
        "for name, kind in algorithms().items():\n"
        "    kind(kind.Options(**needed.get(name, {})))\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'trl'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
