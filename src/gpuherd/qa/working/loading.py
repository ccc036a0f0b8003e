"""Loads a worker's model as its job was planned: on the GPUs that the job was given, or in this rank's part."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from gpuherd.engines import progress
from gpuherd.models.load.options import LoadOptions, ModelOptions, load_request
from gpuherd.models.plan.workload import Reserve, Workload
from gpuherd.qa.working.options import ShardOptions

if TYPE_CHECKING:
    from gpuherd.models.load.loading import Loaded


def load(options: ShardOptions, words: Sequence[str], *, beside: int = 0) -> Loaded:
    """The model of a worker. ``beside``: bytes that are kept free on each GPU for what is loaded next to it.

    With ``--parallel tensor`` this process becomes torchrun, which starts ``words`` (a module and its arguments) once
    for each GPU; each of those returns with its part of the model. All of them do the same then, and the one that
    ``is_writer`` writes.

    Raises what ``load_model`` raises.
    """
    from gpuherd.models.load.loading import load_prepared
    from gpuherd.models.load.prepare import prepare

    workload = Workload(options.batch_size, options.prompt_tokens, options.new_tokens)
    shared = {each.name: getattr(options, each.name) for each in fields(ModelOptions)}
    progress.report(0, None, "load")
    if options.parallel == "tensor":
        from gpuherd.models.load.tensor_parallel import load_tensor_parallel, relaunch, this_rank

        asked = load_request(options.model, LoadOptions(**shared), workload, simulate=options.simulate)
        rank = this_rank(os.environ)
        if rank is not None:
            return load_tensor_parallel(asked, rank)[0]
        relaunch(asked, words)
        shared["parallel"] = None  # one GPU is all that there is
    asked = load_request(options.model, LoadOptions(**shared), workload, simulate=options.simulate)
    return load_prepared(prepare(replace(asked, reserve=Reserve().with_beside(beside))))


def leave() -> None:
    """Ends the connection between the ranks of a model, where there are several; to be called when all is computed."""
    if "RANK" in os.environ:
        from gpuherd.models.load.tensor_parallel import leave as leave_ranks

        leave_ranks()


def is_writer() -> bool:
    """Whether this process is the one that writes: the only one, or the first of several ranks."""
    return os.environ.get("RANK", "0") == "0"
