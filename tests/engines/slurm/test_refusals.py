"""What SLURM 22.05 really said when something was wrong, and what we make of it."""

from __future__ import annotations

import pytest

from gpuherd.engines.base import EngineAway, EngineMissing
from gpuherd.engines.slurm.commands import SLURM

FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    "errors",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
        FAILED + "Unable to contact slurm controller (connect failure)\n",
        "slurm_load_jobs error: Socket timed out on send/recv operation\n",
        "sacct: error: slurm_persist_conn_open: No response to persist_init\n"
        "sacct: error: Sending PersistInit msg: Resource temporarily unavailable\n"
        "sacct: error: Problem talking to the database: Resource temporarily unavailable\n",
        "sacct: error: If munged is up, restart with --num-threads=10\n"
        'sacct: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory\n',
        FAILED + "Protocol authentication error\n",
        FAILED + "Zero Bytes were transmitted or received\n",
        FAILED + "Slurm backup controller in standby mode\n",
    ],
)
def test_nobody_answers(errors: str) -> None:
    found = SLURM.unavailable(errors)
    assert isinstance(found, EngineAway)
    assert SLURM.said(errors) == str(found)


def test_programs_without_a_cluster() -> None:
    found = SLURM.unavailable(
        "sacct: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "sacct: error: fetch_config: DNS SRV lookup failed\n"
        "sacct: fatal: Could not establish a configuration source\n"
    )
    assert isinstance(found, EngineMissing)
    assert "login node" in str(found)


@pytest.mark.parametrize(
    ("words", "may_pass"),
    [
        ("Invalid partition name specified", False),
        ("Invalid account or account/partition combination specified", False),
        ("Invalid qos specification", False),
        ("Requested node configuration is not available", False),
        ("Invalid feature specification", False),
        ("Requested time limit is invalid (missing or exceeds some limit)", False),
        ("Requested reservation is invalid", False),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", True),
        ("Required partition not available (inactive or drain)", True),
        ("I/O error writing script/environment to file", True),
        ("Resource temporarily unavailable", True),
        ("Job dependency problem", True),
    ],
)
def test_refusals_that_may_pass_and_those_that_stay(words: str, may_pass: bool) -> None:
    found = SLURM.refusal(FAILED + words + "\n")
    assert found.may_pass is may_pass
    assert words in str(found)


def test_slurm_said_nothing() -> None:
    assert "said nothing" in str(SLURM.refusal(""))


def test_what_was_said_in_one_line() -> None:
    errors = "sbatch: error: invalid partition specified: nosuch\n" + FAILED + "Invalid partition name specified\n"
    assert SLURM.said(errors) == "invalid partition specified: nosuch; Invalid partition name specified"
    assert SLURM.said("slurm_load_jobs error: Unable to contact\n") == "Unable to contact"


def test_what_has_ended_need_not_be_cancelled() -> None:
    ended = "scancel: error: Kill job error on job id 3: Job/step already completing or completed\n"
    forgotten = "scancel: error: Kill job error on job id 999: Invalid job id specified\n"
    assert SLURM.only_ended(ended + forgotten)
    assert SLURM.only_ended("")
    assert not SLURM.only_ended(ended + "scancel: error: Kill job error on job id 4: Access/permission denied\n")
