"""What SLURM's programs say when they fail, and what that means for us. Pure."""

from __future__ import annotations

import re

from gpuherd.engines.cluster import EngineAway, EngineMissing, Refused
from gpuherd.errors import GpuherdError

GET_SLURM = (
    "SLURM's commands are on the login node of a cluster, there often after `module load slurm`; "
    "on this machine --engine local needs none"
)
# The controller, the database or munge did not answer, or not in time. What was asked may have been done.
_AWAY = (
    "unable to contact slurm controller",
    "connect failure",
    "connection refused",
    "connection timed out",
    "connection reset",
    "socket timed out",
    "zero bytes were transmitted",
    "transport endpoint is not connected",
    "no route to host",
    "network is unreachable",
    "backup controller",
    "in standby mode",
    "munge",
    "protocol authentication error",
    "authentication error",
    "invalid authentication credential",
    "temporarily unable to",
    "unexpected message received",
    "communication connection failure",
    "communication shutdown failure",
    "communications connection failure",
    "problem talking to the database",
    "failed to open persistent connection",
)
# Its programs are there, and no cluster is.
_UNCONFIGURED = (
    "could not establish a configuration source",
    "dns srv lookup failed",
    "unable to process configuration",
)
# Limits of the moment: the same batch may be taken later.
_MAY_PASS = (
    "job violates accounting/qos policy",
    "qosmaxsubmitjob",
    "qosgrpsubmit",
    "assocmaxsubmitjob",
    "assocgrpsubmit",
    "maxsubmitjob",
    "submit limit",
    "queue is full",
    "no space left on device",
    "disk quota exceeded",
    "resource temporarily unavailable",
    "out of memory",
    "not available now",
    "required partition not available",
    "partition is not available",
    "i/o error",
    "error writing",
    "submission disabled",
    # What it is to come after has ended, and is forgotten, since we last looked.
    "job dependency problem",
)
DISABLED = "slurm accounting storage is disabled"
_PREFIX = re.compile(r"^(?:\w+: )?(?:(?:fatal|error|warning|\w+ error): )*(?:Batch job submission failed: )?")


def said(errors: str) -> str:
    """What SLURM said, in one line, without the names of its programs.

    >>> said("sbatch: error: invalid partition specified: x\\nsbatch: error: Batch job submission failed: Invalid y\\n")
    'invalid partition specified: x; Invalid y'
    """
    lines = [_PREFIX.sub("", line).strip() for line in errors.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def unavailable(errors: str) -> GpuherdError | None:
    """EngineAway or EngineMissing where these words mean that nobody has answered, else None."""
    low = errors.lower()
    if any(words in low for words in _UNCONFIGURED):
        return EngineMissing(f"SLURM's commands are here, but know no cluster ({said(errors)}); {GET_SLURM}")
    if any(words in low for words in _AWAY):
        return EngineAway(said(errors))
    return None


def refusal(errors: str) -> Refused:
    """A submission that SLURM has refused."""
    low = errors.lower()
    words = said(errors) or "sbatch has failed and said nothing"
    return Refused(words, may_pass=any(limit in low for limit in _MAY_PASS))


def only_ended(errors: str) -> bool:
    """Whether scancel has only complained of jobs that had ended already or are forgotten."""
    known = ("already completing or completed", "invalid job id", "job/step already completing")
    lines = [line.lower() for line in errors.splitlines() if line.strip()]
    return all(any(words in line for words in known) for line in lines)
