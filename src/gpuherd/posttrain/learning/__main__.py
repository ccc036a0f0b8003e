"""One process of a training: ``torchrun --nproc-per-node=4 -m gpuherd.posttrain.learning --config c.yaml``.

``gpuherd train`` starts it so; it runs by hand, alone or under torchrun, in the same way.
"""

from __future__ import annotations

from gpuherd.posttrain.learning.worker import main
from gpuherd.posttrain.runs.launch import run_process

if __name__ == "__main__":
    run_process(main)
