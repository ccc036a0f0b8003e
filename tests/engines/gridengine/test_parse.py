"""What Grid Engine's programs printed once, and what is read out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuherd.engines.base import End, EngineAway, EngineMissing, Phase
from gpuherd.engines.batch_system import job_number
from gpuherd.engines.gridengine import commands
from gpuherd.engines.gridengine.commands import GRID_ENGINE, Complex, Record

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_jobs_and_the_tasks_of_arrays() -> None:
    rows = commands.read_qstat(recorded("qstat.xml"))
    assert [(row.job, row.name, row.state, row.node, row.phase) for row in rows] == [
        ("8", "rec-5", "t", "vm", Phase.RUNNING),
        ("8", "rec-5", "t", "vm", Phase.RUNNING),
        ("11", "rec-8", "dr", "vm", Phase.RUNNING),
        ("9", "rec-6", "Eqw", None, Phase.ENDED),
        ("8", "rec-5", "qw", None, Phase.WAITING),
        ("10", "rec-7", "hqw", None, Phase.WAITING),
    ]
    assert [place for place in range(10) if rows[4].speaks_of(place)] == [8]
    assert rows[4].handle(8) == "8.9"
    assert (rows[5].handle(0), rows[5].is_job, rows[5].speaks_of(1)) == ("10", True, False)
    assert rows[2].is_being_deleted
    assert rows[3].sighting(0, "why").end is End.FAILED


def test_why_a_job_could_not_be_started() -> None:
    assert commands.errors_of(recorded("error.xml")) == {"9": "can't chdir to /nowhere: No such file or directory"}


def test_why_a_job_waits() -> None:
    assert commands.why_it_waits(recorded("error.xml")) == "Job is in error state"
    assert commands.why_it_waits("<detailed_job_info><messages/></detailed_job_info>") is None


@pytest.mark.parametrize("text", ["", "garbage", "<job_info>"])
def test_what_is_no_answer_is_believed_to_be_none(text: str) -> None:
    with pytest.raises(EngineAway):
        commands.read_qstat(text)
    assert commands.read_qacct(text) == []
    assert job_number(text) is None


def test_ends_by_accounting() -> None:
    found = {
        (each.name, each.places[0].stop if each.places else None): each.sighting()
        for each in commands.read_qacct(recorded("qacct.txt"))
    }
    assert {name: (each.end, each.reason) for name, each in found.items()} == {
        ("rec-1", None): (End.FAILED, "exit status 3"),
        ("rec-2", 1): (End.CANCELLED, "deleted"),
        ("rec-2", 2): (End.CANCELLED, "deleted"),
        ("rec-3", None): (End.TIME_UP, "its time was up"),
        ("rec-4", None): (End.TIME_UP, "its time was up"),
        ("rec-5", 1): (End.OK, None),
        ("rec-5", 3): (End.OK, None),
        ("rec-5", 5): (End.OK, None),
        ("rec-5", 7): (End.OK, None),
        ("rec-5", 9): (End.OK, None),
        ("rec-6", None): (End.FAILED, "failed 28: changing into working directory"),
        ("rec-7", None): (End.OK, None),
        ("rec-8", None): (End.FAILED, "exit status 137 (assumedly after job)"),
    }
    assert found["rec-2", 2].handle == "5.2"
    assert found["rec-8", None].node == "vm"


def record(**more: object) -> Record:
    values: dict[str, object] = {
        "job": "1",
        "name": "a",
        "node": "n1",
        "failed": 0,
        "why": "",
        "exit_status": 0,
        "ran_s": 10.0,
        "most_memory": 0.0,
        "limits": {},
        **more,
    }
    return Record(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({"exit_status": 75}, End.PREEMPTED),
        ({"exit_status": 75, "limits": {"s_rt": "9", "h_rt": "20"}}, End.TIME_UP),
        ({"exit_status": 1, "limits": {"s_rt": "9", "h_rt": "20"}}, End.FAILED),
        ({"failed": 37, "exit_status": 137, "limits": {"h_vmem": "1G"}, "most_memory": 2.0**30}, End.OUT_OF_MEMORY),
        ({"failed": 37, "exit_status": 137, "limits": {"h_vmem": "1G"}, "most_memory": 2.0**29}, End.TIME_UP),
        ({"failed": 100, "exit_status": 137}, End.FAILED),
        ({"failed": 0, "exit_status": 0, "limits": {"h_rt": "5"}}, End.OK),
    ],
)
def test_what_an_end_means(more: dict[str, object], end: End) -> None:
    assert record(**more).sighting().end is end


def test_a_job_that_was_seen_to_be_deleted_was_cancelled() -> None:
    assert record(failed=100, exit_status=137).sighting(deleted=True).end is End.CANCELLED
    assert record().sighting(deleted=True).end is End.OK


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ("error: commlib error: got select error (Connection refused)\nerror: unable to send message", EngineAway),
        ('error: unable to contact qmaster using port 6444 on host "h"', EngineAway),
        ('error: SGE_ROOT directory "/nope" doesn\'t exist', EngineMissing),
        ('error: cell directory "/tmp/default" doesn\'t exist', EngineMissing),
        ('error: unable to read qmaster name: qmaster hostname in "x/act_qmaster" has zero length', EngineMissing),
        ('Unable to run job: unknown resource "foo"\nExiting.', type(None)),
    ],
)
def test_whether_anybody_has_answered(errors: str, kind: type) -> None:
    assert isinstance(GRID_ENGINE.unavailable(errors), kind)


def test_refusals_and_whether_they_may_pass() -> None:
    lasting = GRID_ENGINE.refusal(
        'Unable to run job: job rejected: the requested project "nope" does not exist\nExiting.\n'
    )
    assert (str(lasting), lasting.may_pass) == ('the requested project "nope" does not exist', False)
    told = "Unable to run job: job rejected: only 2 jobs are allowed per user (current job count: 2)\nExiting.\n"
    passing = GRID_ENGINE.refusal(told)
    assert (str(passing), passing.may_pass) == ("only 2 jobs are allowed per user (current job count: 2)", True)
    assert GRID_ENGINE.refusal("job rejected: you tried to submit a job with more than 3 tasks\n").may_pass


def test_why_nothing_is_suitable_leaves_other_queues_out() -> None:
    told = (
        'Unable to run job: Job 30 cannot run in queue "b" because it is not contained in its hard queue list (-q)\n'
        'Job 30 (-l gpu=9) cannot run at host "n1" because it offers only hc:gpu=8.000000\n'
        "verification: no suitable queues\nExiting.\n"
    )
    assert commands.why_unsuitable(told) == '(-l gpu=9) cannot run at host "n1" because it offers only hc:gpu=8.000000'


def test_resources_by_name() -> None:
    known = commands.complexes(recorded("complexes.txt"))
    assert known["gpu"] == Complex("INT", "YES")
    assert known["mf"] == known["mem_free"] == Complex("MEMORY", "NO")


def test_fields_of_a_parallel_environment() -> None:
    assert commands.fields_of(recorded("smp.txt"))["allocation_rule"] == "$pe_slots"
    assert commands.fields_of("hostname  n1\ncomplex_values  gpu=8, \\\n               h_vmem=64G\n") == {
        "hostname": "n1",
        "complex_values": "gpu=8, h_vmem=64G",
    }


def test_qdel_complains_only_of_what_has_ended() -> None:
    assert GRID_ENGINE.only_ended('denied: job "1" does not exist\nroot has registered the job 4 for deletion\n')
    assert not GRID_ENGINE.only_ended("denied: you have no permission to delete job 3\n")


def test_handles_in_short_lists() -> None:
    found = list(GRID_ENGINE.short_lists(["14", "13.4", "13.2", "13.3", "13.9"], 4))
    assert found == [["13.2-4", "13.9"], ["14"]]
    assert GRID_ENGINE.parts("13.4") == ("13", 3) and GRID_ENGINE.parts("14") == ("14", 0)
    assert (GRID_ENGINE.handles("7", 2), GRID_ENGINE.handles("7", 1)) == (["7.1", "7.2"], ["7"])
