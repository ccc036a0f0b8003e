"""The engine and a real Grid Engine: what is submitted runs, and what becomes of it is seen."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gridengine.cluster import Cluster
from tests.gridengine.configuration import Plan
from tests.gridengine.conftest import HandTo
from tests.patience import Gate, wait_until

from gpuherd.engines.base import End, EngineAway, Phase, Placement, Refused, Ticket
from gpuherd.engines.gridengine.commands import read_qstat
from gpuherd.errors import UsageError


@pytest.mark.slow
def test_an_array_runs_no_more_at_once_than_it_may_and_shares_no_gpu(gridengine: Cluster, hand: HandTo) -> None:
    to = hand(sge_memory="h_vmem")
    gate = Gate(to.folder / "gate")
    attempts = to.over(
        "bash",
        "-c",
        f'echo "$1 $CUDA_VISIBLE_DEVICES" > "$0/gpus.$1"; {gate.wait}',
        str(to.folder),
        count=4,
        at_once=3,
        placement=Placement(gpus=2, cpus=2, memory_mb=4000, time_s=90),
    )
    seen = to.until_running(*attempts[:3])
    assert [seen[each].phase for each in attempts[3:]] == [Phase.WAITING]
    assert {seen[each].node for each in attempts[:3]} == set(gridengine.names)
    wait_until(lambda: len(list(to.folder.glob("gpus.*"))) == 3)
    given = [Path(path).read_text().split()[1].split(",") for path in sorted(to.folder.glob("gpus.*"))]
    assert sorted(gpu for each in given for gpu in each) == ["0", "1", "2", "3", "4", "5"]
    told = gridengine.command("qstat", "-j", to.handle(attempts[0]))
    assert "gpu=1" in told  # by slot
    assert "h_vmem=4000M" in told
    assert "h_rt=90" in told
    assert "s_rt=45" in told
    gate.open()
    assert {each.end for each in to.until_ended().values()} == {End.OK}
    assert sorted(path.name for path in to.folder.glob("gpus.*")) == [f"gpus.{index}" for index in range(4)]


@pytest.mark.slow
def test_what_was_submitted_is_found_by_name_when_the_answer_was_lost(gridengine: Cluster, hand: HandTo) -> None:
    to = hand()
    gate = Gate(to.folder / "gate")
    several = to.over("bash", "-c", gate.wait, count=9, at_once=1)
    one = to.over("bash", "-c", gate.wait)
    to.until_running(several[0], *one)
    handles = {each: to.handle(each) for each in (*several, *one)}
    lost = [Ticket(each.attempt, each.batch, each.index) for each in to.tickets.values()]
    never = Ticket(99, "never-submitted", 0)
    found = hand().engine.look([*lost, never])
    assert {attempt: seen.handle for attempt, seen in found.items()} == handles
    to.engine.cancel(handles.values())


def test_exit_codes_and_the_engines_word_for_them(gridengine: Cluster, hand: HandTo) -> None:
    to = hand()
    (good,) = to.over("bash", "-c", "exit 0")
    bad, room = to.over("bash", "-c", 'exit "$((3 + 72 * $0))"', count=2)
    (killed,) = to.over("bash", "-c", "kill -9 $$")
    seen = to.until_ended()
    assert {each: seen[each].end for each in seen} == {
        good: End.OK,
        bad: End.FAILED,
        room: End.PREEMPTED,
        killed: End.FAILED,
    }
    assert seen[bad].reason == "exit status 3"
    assert seen[killed].reason == "exit status 137"


@pytest.mark.slow
def test_jobs_behind_others(gridengine: Cluster, hand: HandTo) -> None:
    to = hand()
    gate = Gate(to.folder / "gate")
    first, second = to.over("bash", "-c", f'[ "$0" = 0 ] || {{ {gate.wait}; }}', count=2)
    (after_first,) = to.over("touch", f"{to.folder}/after-first", after=(to.handle(first),))
    (after_both,) = to.over("touch", f"{to.folder}/both", after=(to.handle(first), to.handle(second)))
    # It waits for a task of an array that is done, while another one goes on.
    seen = to.until(lambda seen: seen[after_first].phase is Phase.ENDED)
    assert seen[after_both].phase is Phase.WAITING
    gate.open()
    assert {each.end for each in to.until_ended().values()} == {End.OK}


@pytest.mark.slow
def test_ended_by_its_limit_and_by_deletion(gridengine: Cluster, hand: HandTo) -> None:
    to = hand(notice=2.0)
    gate = Gate(to.folder / "gate")
    listens = f"trap 'exit 75' USR1 USR2; touch $0/$1; {gate.wait}"
    (timely,) = to.over("bash", "-c", listens, str(to.folder), placement=Placement(gpus=0, time_s=5))
    (rude,) = to.over("bash", "-c", gate.wait, placement=Placement(gpus=0, time_s=1))
    (ours,) = to.over("bash", "-c", listens, f"{to.folder}/ours")
    (waiting,) = to.over("bash", "-c", gate.wait, placement=Placement(gpus=8))
    to.until_running(ours)
    to.engine.cancel([to.handle(ours)])
    seen = to.until_ended(timely, rude, ours)
    assert {each: seen[each].end for each in (timely, rude, ours)} == {
        timely: End.TIME_UP,
        rude: End.TIME_UP,
        ours: End.CANCELLED,
    }
    to.engine.cancel([to.handle(each) for each in seen])  # most have ended: no error
    assert waiting in seen


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sge_queue": "mian"}, r"--sge-queue mian: there is no queue mian in Grid Engine; did you mean main\?"),
        ({"sge_queue": "main,closd"}, r"no queue closd .* did you mean closed\?"),
        ({"sge_queue": "closed"}, r"queue closed takes no jobs now"),
        ({"sge_project": "theroy"}, r"no project theroy in Grid Engine; did you mean theory\?"),
        ({"sge_pe": "smpp"}, r"no parallel environment smpp in Grid Engine; did you mean smp\?"),
    ],
)
def test_what_is_not_there_is_told_before_anything_is_submitted(
    gridengine: Cluster, hand: HandTo, options: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        hand(**options).engine.check([Placement(gpus=1, cpus=2)])


@pytest.mark.slow
def test_what_no_queue_has_can_never_be(gridengine: Cluster, hand: HandTo) -> None:
    to = hand(sge_queue="brief", sge_project="theory")
    node = gridengine.names[0]
    fits = Placement(gpus=8, cpus=8, memory_mb=1000, time_s=600)
    wishes = {
        Placement(gpus=9): f'"{node}" because it offers only hc:gpu=8.000000',
        Placement(gpus=1, time_s=601): 'cannot run in queue "brief" because of cluster queue',
        Placement(gpus=1, memory_mb=10**7): "mem_total",
        Placement(gpus=0, cpus=65): 'PE "smp" because it only offers 0 slots',
        Placement(gpus=3, cpus=2): "counts gpu by slot",
        Placement(gpus=0, nodes=2, cpus=3): "no parallel environment that gives 3 slots on each node",
        Placement(gpus=0, nodes=2): 'PE "spread1" because it only offers',
        Placement(gpus=0, tasks=2): "starts one process on each node",
    }
    found = to.engine.check([fits, *wishes])
    assert found.keys() == wishes.keys()
    assert [each for each, words in wishes.items() if words not in found[each]] == [], found
    (attempt,) = to.over("true", placement=fits)
    assert to.until_ended(attempt)[attempt].end is End.OK
    assert "no resource ngpus for GPUs" in hand(sge_gpu="ngpus").engine.check([Placement(gpus=1)])[Placement(gpus=1)]


def test_grid_engines_own_refusal_is_told(gridengine: Cluster, hand: HandTo) -> None:
    with pytest.raises(Refused, match='unknown resource "nvlink"'):
        hand(sge_args=("-l nvlink=1",)).over("true")


@pytest.mark.slow
def test_a_job_that_can_not_be_started_has_failed_with_the_reason_and_is_removed(
    gridengine: Cluster, hand: HandTo
) -> None:
    to = hand(sge_args=("-wd /nowhere",))
    (attempt,) = to.over("true")
    seen = to.until_ended(attempt)[attempt]
    assert seen.end is End.FAILED
    assert seen.reason == "Grid Engine could not start it: can't chdir to /nowhere: No such file or directory"
    assert to.sighting(attempt).end is End.FAILED
    to.engine.close()
    assert gridengine.command("qstat") == ""


@pytest.mark.slow
def test_deleted_while_it_waited(gridengine: Cluster, hand: HandTo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid Engine keeps no record of a job that never ran."""
    monkeypatch.setattr("gpuherd.engines.gridengine.engine._ACCOUNTED_S", 0.5)
    to = hand(sge_args=("-h",))
    attempt, other = to.over("true", count=2)
    to.until(lambda seen: len(seen) == 2)
    gridengine.command("qdel", to.handle(attempt))
    seen = to.until(lambda seen: attempt in seen and seen[attempt].phase is Phase.ENDED)
    assert (seen[attempt].end, seen[attempt].reason) == (End.CANCELLED, "deleted")
    assert seen[other].phase is Phase.WAITING


@pytest.mark.slow
def test_nothing_is_lost_while_sge_qmaster_is_away(own_gridengine: Callable[[Plan], Cluster], hand: HandTo) -> None:
    cluster = own_gridengine(Plan())
    to = hand()
    gate = Gate(to.folder / "gate")
    attempts = to.over("bash", "-c", gate.wait, count=2, at_once=1)
    to.until_running(attempts[0])
    cluster.stop_master(signal.SIGKILL)
    for ask in (lambda: to.look(), lambda: to.engine.cancel(["1"]), lambda: to.over("true")):
        with pytest.raises(EngineAway, match=r"unable to (contact|send message to) qmaster"):
            ask()
    cluster.start_master()
    assert {each.phase for each in to.until(lambda seen: len(seen) == 2).values()} == {Phase.RUNNING, Phase.WAITING}
    gate.open()
    assert {each.end for each in to.until_ended(*attempts).values()} == {End.OK}


@pytest.mark.slow
def test_a_node_that_is_lost(
    own_gridengine: Callable[[Plan], Cluster], hand: HandTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = own_gridengine(Plan(max_unheard="00:00:04"))
    monkeypatch.setattr("gpuherd.engines.gridengine.engine._UNKNOWN_EVERY_S", 0.5)
    monkeypatch.setattr("gpuherd.engines.gridengine.engine._LOST_S", 3.0)
    to = hand()
    (attempt,) = to.over("bash", "-c", "sleep 600")
    to.until_running(attempt)
    cluster.kill_node(cluster.names[0])
    to.until(lambda seen: seen[attempt].reason == "its node does not answer")
    assert to.until_ended(attempt)[attempt].end is End.NODE_LOST
    assert [row.is_being_deleted for row in read_qstat(cluster.command("qstat", "-xml"))] == [True]
