"""Options in words for a run that goes on, on this machine or in a cluster."""

from __future__ import annotations

import pytest

from gpuherd.errors import UsageError
from gpuherd.jobs.control.client import check
from gpuherd.jobs.control.messages import ControlKind, Request
from gpuherd.jobs.options import DispatchOptions, changes, retuned


def test_what_may_be_changed_of_a_run_depends_on_its_engine() -> None:
    there = DispatchOptions(engine="slurm", partition="gpu")
    assert retuned(there, {"at-most": "5", "order": "longest"}) == DispatchOptions(
        engine="slurm", partition="gpu", at_most=5, order="longest"
    )
    with pytest.raises(UsageError, match=r"--at-most is for --engine slurm or --engine ray.*, and this is local"):
        retuned(DispatchOptions(), {"at-most": "5"})
    with pytest.raises(UsageError, match="--gpu-list is for this machine's GPUs, and the engine is slurm"):
        retuned(there, {"gpus": "0,1"})
    with pytest.raises(UsageError, match="partition can't be changed while a run goes on"):
        retuned(there, {"partition": "other"})


def test_words_are_read_before_it_is_known_whose_they_are() -> None:
    assert changes({"at_most": "5", "max-gpus": "2"}) == {"at_most": 5, "max_gpus": 2}
    check(Request(ControlKind.SET, settings={"at_most": "5"}))
    with pytest.raises(UsageError, match="above 0"):
        check(Request(ControlKind.SET, settings={"at_most": "0"}))
