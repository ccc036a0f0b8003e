"""The process that describes one model: a request on standard input, the answer on standard output, both JSON.

Messages of libraries go to standard error, so that nothing but the answer is on standard output.
"""

from __future__ import annotations

import json
import os
import resource
import sys

_MOST_MEMORY = 16 << 30  # address space: a configuration that asks for more fails here, not on the machine


def main() -> None:
    """Answers one request."""
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        bound = _MOST_MEMORY if most == resource.RLIM_INFINITY else min(most, _MOST_MEMORY)
        resource.setrlimit(resource.RLIMIT_AS, (bound, most))
        from gpuherd.errors import BadModel
        from gpuherd.models.describe.cache import to_dict
        from gpuherd.models.describe.meta import describe_config

        request = json.load(sys.stdin)
        try:
            found = describe_config(request["config"], request["model"])
            json.dump({"description": to_dict(found)}, answer, separators=(",", ":"))
        except BadModel as problem:
            json.dump({"problem": str(problem)}, answer)


if __name__ == "__main__":
    main()
