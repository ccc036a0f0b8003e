"""Child of the doctor: which torch is installed, and does it see a GPU? Prints one line of JSON."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Prints version, CUDA and ROCm version of the build (or null), whether CUDA starts, and how many GPUs it shows."""
    import torch

    available = torch.cuda.is_available()
    answer = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "available": available,
        "devices": torch.cuda.device_count() if available else 0,
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
