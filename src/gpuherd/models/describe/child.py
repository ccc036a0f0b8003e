"""The process that describes one model: a request on standard input, the answer on standard output, both JSON.

Messages of libraries go to standard error, so that nothing but the answer is on standard output. A module of its own,
because it alone may import torch.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import suppress

_MOST_MEMORY = 16 << 30  # of address space
_MOST_SECONDS = 200  # of processor time; 10 are usual


def _bound(what: int, bound: int) -> None:
    """Takes no more than this of memory or of processor time, whatever the configuration asks for."""
    _, most = resource.getrlimit(what)
    with suppress(OSError, ValueError):  # systems that have no such bound
        resource.setrlimit(what, (bound if most == resource.RLIM_INFINITY else min(bound, most), most))


def main() -> None:
    """Answers one request."""
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        _bound(resource.RLIMIT_AS, _MOST_MEMORY)
        _bound(resource.RLIMIT_CPU, _MOST_SECONDS)
        from gpuherd.errors import BadModel
        from gpuherd.models.describe.cache import to_dict
        from gpuherd.models.describe.meta import describe_config

        request = json.load(sys.stdin)
        try:
            found = describe_config(request["config"], request["model"], training=request["training"])
            json.dump({"description": to_dict(found)}, answer, separators=(",", ":"))
        except BadModel as problem:
            json.dump({"problem": str(problem)}, answer)


if __name__ == "__main__":
    main()
