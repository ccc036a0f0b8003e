"""One job of a sweep, in a process of its own:

    python -P -m hydra_plugins.gpuherd_launcher._work PROGRAM TASK RETURN

Its GPUs are set in the environment before it starts. It ends with 0 when the program's function has returned, and with
1 when that raised; what it returned or raised is in RETURN.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def main(words: list[str]) -> int:
    """Runs the job. Returns the exit code."""
    program, task, returned = (Path(word) for word in words)
    speaks = _is_first(os.environ)
    if speaks:
        # From an earlier attempt: what that raised is not what this one does.
        returned.unlink(missing_ok=True)
    from hydra_plugins.gpuherd_launcher import _parcels

    with _parcels.open_ours(program) as file:
        # First the places where modules are, then what needs them.
        sys.path[:], sys.argv[:] = _parcels.read(file)
        hydra_context, task_function, singletons, resolvers = _parcels.read(file)
    from hydra.core.singleton import Singleton
    from hydra.core.utils import JobStatus, run_job, setup_globals

    from hydra_plugins.gpuherd_launcher._resolvers import restore

    setup_globals()
    Singleton.set_state(singletons)
    restore(resolvers)
    result = run_job(
        hydra_context=hydra_context,
        task_function=task_function,
        config=_parcels.read_one(task),
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    failed = result.status is not JobStatus.COMPLETED
    if failed:
        traceback.print_exception(result._return_value)
    if speaks:
        _write(returned, result)
    return int(failed)


def _is_first(variables: Mapping[str, str]) -> bool:
    """Whether this process speaks for its job: of one over several nodes, or of several processes, all run the
    function, and the first says what it returned."""
    return variables.get("RANK", variables.get("NODE_RANK", "0")) == "0"


def _write(path: Path, result: Any) -> None:
    """Writes what the job returned. What can't be pickled is told in the log, and its place taken: the work is done."""
    from hydra.core.utils import JobStatus

    from hydra_plugins.gpuherd_launcher import _parcels
    from hydra_plugins.gpuherd_launcher._telling import JobFailed

    try:
        _parcels.write(path, result, lasting=True)
    except OSError:
        raise
    except Exception as problem:
        value = result._return_value
        sys.stderr.write(f"gpuherd: a {type(value).__name__} can't be handed to the sweeper: {problem}\n")
        done = result.status is JobStatus.COMPLETED
        result.return_value = None if done else JobFailed(f"{type(value).__name__}: {value}")
        _parcels.write(path, result, lasting=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
