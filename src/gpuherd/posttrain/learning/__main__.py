"""One process of a training: ``torchrun --nproc-per-node=4 -m gpuherd.posttrain.learning --config c.yaml``.

``gpuherd train`` starts it so; it runs by hand, alone or under torchrun, in the same way.
"""

from __future__ import annotations

import os
import sys

from gpuherd.posttrain.engine.world import leave
from gpuherd.posttrain.learning.worker import main

if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        leave(code)
    sys.exit(code)
