"""What is known of an attempt, and what that means: one end each, and never one without a reason."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.jobs.attempts import attempt_of

from gpuherd.engines.base import End, Phase, Sighting
from gpuherd.jobs.attempts.complete import settle
from gpuherd.jobs.completion import Known, NoFault
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.records import Handed, QueuedJob
from gpuherd.jobs.remote.outcome import NextStep, RemoteAttempt, outcome
from gpuherd.jobs.remote.protocol import Claim, EndReport

QUEUED = QueuedJob(
    id=1,
    job=Job(name="a", argv=("true",), retries=0),
    tries=0,
    attempts=1,
    not_before=0.0,
    avoid=frozenset(),
    ready_at=0.0,
)
HANDED = Handed("slurm", "batch", 0)
RECORD = attempt_of(QUEUED, 1, process=None, handed=HANDED)
WAITS, RUNS = Sighting(handle="1", phase=Phase.WAITING), Sighting(handle="1", phase=Phase.RUNNING)


def meaning(*, late: bool = False, **facts: Any) -> Known | NextStep:
    """The outcome of an open attempt of which this is known, in second 100."""
    return outcome(RemoteAttempt(RECORD, HANDED, **facts), 100.0, late=late)


def ended(end: End, by: str | None = None) -> Sighting:
    return Sighting(handle="1", phase=Phase.ENDED, end=end, by=by)


reports = st.builds(
    EndReport,
    at=st.just(1.0),
    ran_s=st.just(1.0),
    started=st.booleans(),
    problem=st.sampled_from([None, "no such program"]),
    code=st.sampled_from([None, 0, 1, 75]),
    signal=st.sampled_from([None, 9, 15]),
    has_result=st.booleans(),
    limit=st.sampled_from([None, "timeout", "no such limit"]),
    limit_s=st.sampled_from([None, 5.0]),
    interrupted=st.booleans(),
)
claims = st.builds(
    Claim, at=st.just(1.0), void=st.booleans(), why=st.sampled_from(["", "STOPPED", "TOO_EARLY", "nonsense"])
)
sightings = st.sampled_from([WAITS, RUNS, *(ended(end) for end in End)])
everything = st.fixed_dictionaries(
    {
        "claim": st.none() | claims,
        "report": st.none() | reports,
        "sighting": st.none() | sightings,
        "unknown": st.booleans(),
        "late": st.booleans(),
        "taken": st.booleans(),
        "cancelled_by": st.sampled_from([None, "me"]),
        "recalled": st.sampled_from([None, NoFault.STOPPED, NoFault.DEPENDENCY_FAILED]),
    }
)


@pytest.mark.parametrize("end", [End.FAILED, End.OK])
def test_what_is_ended_time_and_again_by_nobody_knows_whom_rests_in_between(end: End) -> None:
    report = EndReport(at=1.0, ran_s=1.0, signal=9, interrupted=True)
    found = meaning(claim=Claim(at=1.0), report=report, sighting=ended(end))
    assert isinstance(found, Known) and found.no_fault is NoFault.MADE_ROOM and found.rest_s > 0


def test_another_of_its_nodes_that_was_lost_is_the_reason_though_the_engine_only_says_that_it_failed() -> None:
    report = EndReport(at=1.0, ran_s=1.0, code=1, problem="node 1 (b): lost", interrupted=True, lost=True)
    found = meaning(claim=Claim(at=1.0), report=report, sighting=ended(End.FAILED))
    assert isinstance(found, Known) and found.no_fault is NoFault.NODE_LOST and found.rest_s > 0


@given(everything)
def test_no_end_is_without_a_reason(facts: dict[str, Any]) -> None:
    found = meaning(**facts)
    if isinstance(found, NextStep):
        return
    settled = settle(replace(found, log_tail=found.note))
    assert settled.job is JobState.DONE or settled.reason


@given(everything)
def test_it_is_voided_only_while_nobody_has_it(facts: dict[str, Any]) -> None:
    """A second claim can't be won; and what may still begin is never called over before it is ours."""
    found = meaning(**facts)
    if found is NextStep.VOID:
        assert facts["claim"] is None and not facts["taken"] and facts["report"] is None
    if isinstance(found, Known):
        assert facts["report"] is not None or facts["claim"] is not None or facts["taken"]


@given(everything)
def test_waiting_longer_only_ends_what_was_waited_for(facts: dict[str, Any]) -> None:
    """What is over stays over, in the same way, when nothing new comes."""
    before, after = meaning(**{**facts, "late": False}), meaning(**{**facts, "late": True})
    assert after is not NextStep.ASK
    if isinstance(before, Known):
        assert before == after


@pytest.mark.parametrize("sighting", [None, WAITS, RUNS, *(ended(end) for end in End)])
def test_a_reported_success_is_one_whatever_else_is_said(sighting: Sighting | None) -> None:
    report = EndReport(at=1.0, ran_s=2.0, code=0, interrupted=True)
    for unknown, cancelled_by in product([False, True], [None, "me"]):
        found = meaning(report=report, sighting=sighting, unknown=unknown, cancelled_by=cancelled_by)
        assert isinstance(found, Known) and found.exit.code == 0 and found.no_fault is None


def test_a_reported_failure_needs_no_word_of_the_engine() -> None:
    report = EndReport(at=1.0, ran_s=2.0, code=3)
    found = meaning(report=report, sighting=RUNS)
    assert isinstance(found, Known) and (found.exit.code, found.no_fault) == (3, None)


@pytest.mark.parametrize(
    ("end", "blameless", "by"),
    [
        (None, NoFault.MADE_ROOM, None),
        (End.FAILED, NoFault.MADE_ROOM, None),
        (End.PREEMPTED, NoFault.PREEMPTED, None),
        (End.TIME_UP, NoFault.TIME_UP, None),
        (End.NODE_LOST, NoFault.NODE_LOST, None),
        (End.CANCELLED, None, "root in SLURM"),
    ],
)
def test_why_it_was_interrupted_is_known_to_the_engine(
    end: End | None, blameless: NoFault | None, by: str | None
) -> None:
    report = EndReport(at=1.0, ran_s=2.0, signal=15, interrupted=True)
    assert meaning(report=report, sighting=RUNS) is NextStep.ASK
    sighting = RUNS if end is None else ended(end, "root")
    found = meaning(report=report, sighting=sighting, late=end is None)
    assert isinstance(found, Known) and (found.no_fault, found.cancelled_by) == (blameless, by)


@pytest.mark.parametrize(("code", "number"), [(None, signal.SIGKILL), (None, signal.SIGTERM), (143, None)])
def test_killed_from_outside_the_engine_is_asked_too(code: int | None, number: int | None) -> None:
    report = EndReport(at=1.0, ran_s=2.0, code=code, signal=number)
    assert meaning(report=report, sighting=RUNS) is NextStep.ASK
    found = meaning(report=report, sighting=ended(End.OUT_OF_MEMORY))
    assert isinstance(found, Known) and "oom-kill event" in found.note
    found = meaning(report=report, sighting=RUNS, late=True)
    assert isinstance(found, Known) and (found.no_fault, found.note) == (None, "")
    found = meaning(report=report, sighting=ended(End.CANCELLED, "root"))
    assert isinstance(found, Known) and found.cancelled_by == "root in SLURM"


def test_without_a_report_it_goes_on_while_the_engine_says_so() -> None:
    for sighting in (None, WAITS, RUNS):
        assert meaning(sighting=sighting, late=True) is NextStep.GO_ON
        assert meaning(sighting=sighting, claim=Claim(at=1.0), late=True) is NextStep.GO_ON


def test_a_report_that_is_late_is_waited_for_and_then_it_is_claimed() -> None:
    gone = ended(End.NODE_LOST)
    assert meaning(sighting=gone) is NextStep.ASK
    assert meaning(sighting=gone, late=True) is NextStep.VOID


def test_what_was_cancelled_is_claimed_at_once_and_waited_for_only_if_it_had_begun() -> None:
    gone = ended(End.CANCELLED, "root")
    assert meaning(sighting=gone) is NextStep.VOID
    assert meaning(sighting=gone, taken=True) is NextStep.ASK
    won = meaning(sighting=gone, claim=Claim(at=1.0, void=True))
    lost = meaning(sighting=gone, late=True, taken=True)
    assert isinstance(won, Known) and won.cancelled_by == "root in SLURM" and not won.exit.started
    assert isinstance(lost, Known) and lost.cancelled_by == "root in SLURM" and lost.exit.started


def test_one_that_can_never_begin_is_not_waited_for() -> None:
    assert meaning(sighting=ended(End.NEVER)) is NextStep.VOID


def test_one_that_could_not_write_its_report_has_succeeded_if_its_leader_says_so() -> None:
    found = meaning(sighting=ended(End.OK), late=True, claim=Claim(at=1.0))
    assert isinstance(found, Known) and found.exit.code == 0


def test_what_is_unknown_there_never_began_or_is_lost() -> None:
    assert meaning(unknown=True) is NextStep.ASK
    assert meaning(unknown=True, late=True) is NextStep.VOID
    never = meaning(unknown=True, late=True, claim=Claim(at=1.0, void=True))
    lost = meaning(unknown=True, late=True, claim=Claim(at=1.0))
    assert isinstance(never, Known) and never.no_fault is NoFault.NOT_TAKEN
    assert isinstance(lost, Known) and lost.no_fault is NoFault.NODE_LOST


def test_a_guardian_that_saw_neither_leader_nor_shell_end_leaves_the_word_to_the_engine() -> None:
    """Both were killed together, as by a node's end or for want of memory: all that is left can only say so."""
    told = EndReport(at=1.0, ran_s=1.0, problem="the process that led it was killed")
    claim = Claim(at=0.0)

    def known(sighting: Sighting | None, *, late: bool, unknown: bool = False) -> Known | NextStep:
        return meaning(claim=claim, report=told, sighting=sighting, late=late, unknown=unknown)

    assert known(RUNS, late=False) is NextStep.ASK
    lost, starved = known(ended(End.NODE_LOST), late=False), known(ended(End.OUT_OF_MEMORY), late=False)
    assert isinstance(lost, Known) and lost.no_fault is NoFault.NODE_LOST
    assert isinstance(starved, Known) and starved.no_fault is None and "oom-kill" in starved.note
    forgotten, failed = known(None, late=True, unknown=True), known(ended(End.FAILED), late=True)
    assert isinstance(forgotten, Known) and forgotten.no_fault is NoFault.NODE_LOST
    assert isinstance(failed, Known) and failed.no_fault is None


def test_one_that_was_killed_and_that_the_engine_knows_no_more_was_lost_with_its_node() -> None:
    killed = EndReport(at=1.0, ran_s=1.0, signal=9, problem="the process that led it was killed")
    facts: dict[str, Any] = {"claim": Claim(at=0.0), "report": killed, "late": True}
    forgotten, there = meaning(**facts, unknown=True), meaning(**facts)
    assert isinstance(forgotten, Known) and forgotten.no_fault is NoFault.NODE_LOST
    assert isinstance(there, Known) and there.no_fault is None


def test_what_its_leader_did_not_begin_waits_again_at_no_cost() -> None:
    """Whatever SLURM calls the end of that leader. It rests: what began it too early may do so again at once."""
    claim = Claim(at=1.0, void=True, node="n1", why="TOO_EARLY")
    for sighting in (None, RUNS, ended(End.FAILED), ended(End.CANCELLED, by="root")):
        found = meaning(claim=claim, sighting=sighting)
        assert isinstance(found, Known) and found.rest_s > 0 and found.no_fault is NoFault.TOO_EARLY
        settled = settle(found)
        assert (settled.job, settled.diagnosis) == (JobState.WAITING, None)
    mine = meaning(claim=claim, cancelled_by="me")
    assert isinstance(mine, Known) and mine.cancelled_by == "me"


def test_a_claim_of_an_earlier_version_is_understood() -> None:
    found = meaning(claim=Claim(at=1.0, void=True, why="STRANDED"))
    assert isinstance(found, Known) and found.no_fault is NoFault.DEPENDENCY_FAILED
