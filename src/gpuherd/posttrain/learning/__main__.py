"""One process of a training: ``torchrun --nproc-per-node=4 -m gpuherd.posttrain.learning --config c.yaml``.

``gpuherd train`` starts it so; it runs by hand, alone or under torchrun, in the same way.
"""

from __future__ import annotations

import os
import sys

from gpuherd.posttrain.learning.worker import main

if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        # All is saved and closed by now. Of several processes torch's threads sometimes abort one at its very end
        # ("terminate called without an active exception"), and a training that has ended would count as failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
