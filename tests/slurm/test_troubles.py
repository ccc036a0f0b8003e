"""What befalls jobs and SLURM itself: preemption, time limits, restarts, lost nodes, no accounting, small arrays."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.patience import Gate, wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import Plan
from tests.slurm.conftest import HandTo

from gpuherd.engines.base import End, EngineAway, EngineMissing, Phase, Placement, Ticket

OwnCluster = Callable[[Plan], Cluster]
slow = [pytest.mark.slow, pytest.mark.timeout(400)]
pytestmark = slow

# Saves what it has when it is told to, and ends well.
OBEDIENT = "trap 'touch $0/saved; exit 75' TERM USR1; touch $0/ready; while :; do sleep 0.05; done"
# Can't be told anything.
DEAF = "trap '' TERM USR1; touch $0/ready; while :; do sleep 0.05; done"


def most_at_once(folder: Path) -> int:
    """The most marks that were there at the same time, as each job counted them when it began."""
    return max(int(path.read_text()) for path in folder.glob("seen.*"))


COUNTING = 'touch "$0/on.$1"; ls "$0" | grep -c "^on[.]" > "$0/seen.$1"; sleep 0.2; rm "$0/on.$1"'


def test_an_array_of_200_with_a_throttle(slurm: Cluster, hand: HandTo) -> None:
    to = hand()
    attempts = to.over("bash", "-c", COUNTING, str(to.folder), count=200, at_once=5, placement=Placement(gpus=0))
    seen = to.until_ended()
    assert {seen[each].end for each in attempts} == {End.OK}
    assert len(list(to.folder.glob("seen.*"))) == 200
    assert most_at_once(to.folder) <= 5


@pytest.mark.parametrize(("command", "saved"), [(OBEDIENT, True), (DEAF, False)])
def test_a_job_that_makes_room_for_another_partition(slurm: Cluster, hand: HandTo, command: str, saved: bool) -> None:
    to = hand(partition="scavenge")
    urgent = hand(partition="urgent")
    (attempt,) = to.over("bash", "-c", command, str(to.folder), placement=Placement(gpus=8))
    wait_until((to.folder / "ready").exists)
    urgent.over("true", placement=Placement(gpus=8))
    assert to.until_ended()[attempt].end is End.PREEMPTED
    assert (to.folder / "saved").exists() is saved
    assert {each.end for each in urgent.until_ended().values()} == {End.OK}
    # It is not SLURM that gives it another turn.
    assert to.sighting(attempt).phase is Phase.ENDED
    assert slurm.command("squeue", "-h", "-t", "pending,running", "-o", "%i") == ""


def test_the_notice_comes_before_the_end_of_the_time(slurm: Cluster, hand: HandTo) -> None:
    to = hand(notice=25.0)
    script = "trap 'touch $0/told' USR1; while :; do sleep 0.05; done"
    (attempt,) = to.over("bash", "-c", script, str(to.folder), placement=Placement(gpus=1, time_s=60))
    told: list[Phase] = []

    def look() -> bool:
        if (to.folder / "told").exists() and not told:
            told.append(to.sighting(attempt).phase)
        return to.sighting(attempt).phase is Phase.ENDED

    wait_until(look, within_s=240, every_s=0.5)
    assert told == [Phase.RUNNING]
    assert to.sighting(attempt).end is End.TIME_UP


def test_a_controller_that_is_away_for_a_while(slurm: Cluster, hand: HandTo) -> None:
    to = hand()
    gate = Gate(to.folder / "gate")
    running = to.over("bash", "-c", gate.wait, count=3)
    (waiting,) = to.over("true", after=(to.handle(running[0]),))
    to.until_running(*running)
    slurm.wait_until_saved(*(each.batch for each in to.tickets.values()))
    slurm.stop_controller(signal.SIGKILL)
    try:
        with pytest.raises(EngineAway, match="Unable to contact slurm controller"):
            to.look()
        with pytest.raises(EngineAway, match="Unable to contact"):
            to.over("true")
        with pytest.raises(EngineAway, match="Unable to contact"):
            to.engine.cancel([to.handle(running[0])])
        gate.open()
    finally:
        slurm.start_controller()
    seen = to.until_ended()
    assert {seen[each].end for each in (*running, waiting)} == {End.OK}


def test_what_a_controller_has_lost_in_a_crash_is_unknown_and_its_number_is_nobody_elses(
    own_cluster: OwnCluster, hand: HandTo
) -> None:
    made = own_cluster(Plan(accounting=False))
    to = hand()
    (attempt,) = to.over("sleep", "1000")
    to.until_running(attempt)
    made.stop_controller(signal.SIGKILL)
    made.start_controller()
    assert to.look() == {}
    (other,) = to.over("true")
    assert to.handle(other) == to.handle(attempt)
    assert list(to.look()) == [other]


def test_a_plain_restart_of_the_controller(slurm: Cluster, hand: HandTo) -> None:
    to = hand()
    attempts = to.over("bash", "-c", COUNTING, str(to.folder), count=30, at_once=3)
    to.until_running(attempts[0])
    slurm.stop_controller()
    slurm.start_controller()
    assert {each.end for each in to.until_ended().values()} == {End.OK}
    assert len(list(to.folder.glob("seen.*"))) == 30
    assert most_at_once(to.folder) <= 3


def test_an_administrator_can_not_make_it_run_twice(slurm: Cluster, hand: HandTo) -> None:
    to = hand()
    gate = Gate(to.folder / "gate")
    (attempt,) = to.over("bash", "-c", f"{gate.wait}; echo x >> $0/runs", str(to.folder))
    to.until_running(attempt)
    slurm.command("scontrol", "requeue", to.handle(attempt), check=False)
    slurm.command("scontrol", "suspend", to.handle(attempt))
    assert (to.sighting(attempt).reason or "").startswith("suspended")
    slurm.command("scontrol", "resume", to.handle(attempt))
    gate.open()
    assert to.until_ended()[attempt].end is End.OK
    assert (to.folder / "runs").read_text() == "x\n"


def test_accounting_that_is_away_is_missed_by_nobody(own_cluster: OwnCluster, hand: HandTo) -> None:
    made = own_cluster(Plan())
    to = hand()
    gate = Gate(to.folder / "gate")
    (cancelled,) = to.over("bash", "-c", gate.wait)
    to.until_running(cancelled)
    made.stop("slurmdbd")
    to.over("true")
    to.engine.cancel([to.handle(cancelled)])
    seen = to.until_ended()
    assert (seen[cancelled].end, seen[cancelled].by) == (End.CANCELLED, None)
    assert to.engine.look([Ticket(99, "never-handed-over", 0, "9999")]) == {}


def test_without_accounting(own_cluster: OwnCluster, hand: HandTo) -> None:
    made = own_cluster(Plan(accounting=False, min_job_age_s=2))
    to = hand(account="any", qos="any")
    assert to.engine.check([Placement(gpus=8)]) == {}
    to = hand()
    (bad,) = to.over("false")
    (never,) = to.over("true", after=(to.handle(bad),))
    gate = Gate(to.folder / "gate")
    (cancelled,) = to.over("bash", "-c", gate.wait)
    to.until_running(cancelled)
    made.command("setpriv", "--reuid=0", "scancel", to.handle(cancelled))
    ends: dict[int, End | None] = {}

    def look() -> bool:
        """Each is seen for a while, and then forgotten."""
        seen = to.look()
        ends.update({attempt: each.end for attempt, each in seen.items() if each.phase is Phase.ENDED})
        return not seen

    wait_until(look, within_s=120, every_s=0.2, told=lambda: str(to.look()))
    assert ends == {bad: End.FAILED, never: End.NEVER, cancelled: End.CANCELLED}


def test_what_the_controller_has_forgotten_accounting_knows(own_cluster: OwnCluster, hand: HandTo) -> None:
    made = own_cluster(Plan(min_job_age_s=2))
    to = hand()
    attempts = to.over("bash", "-c", 'exit "$0"', count=3)
    gate = Gate(to.folder / "gate")
    (cancelled,) = to.over("bash", "-c", gate.wait)
    to.until_running(cancelled)
    made.command("setpriv", "--reuid=65534", "--clear-groups", "scancel", to.handle(cancelled))
    to.until_ended()
    wait_until(lambda: made.command("squeue", "-h", "--states=all") == "", within_s=120, every_s=0.2)
    wanted = [End.OK, End.FAILED, End.FAILED]
    lost = [Ticket(each.attempt, each.batch, each.index) for each in to.tickets.values()]
    for seen in (to.look(), to.engine.look(lost)):
        assert [seen[each].end for each in attempts] == wanted
        assert (seen[cancelled].end, seen[cancelled].by) == (End.CANCELLED, "nobody")
        assert {each.node for each in seen.values()} == {"n1"}


def test_a_site_with_small_arrays(own_cluster: OwnCluster, hand: HandTo) -> None:
    own_cluster(Plan(accounting=False, array_size=4))
    to = hand()
    attempts = to.over("bash", "-c", f"echo I am $1; {COUNTING}", str(to.folder), count=13, at_once=3)
    lost = [Ticket(each.attempt, each.batch, each.index) for each in to.tickets.values()]
    found = to.engine.look(lost)
    assert {attempt: seen.handle for attempt, seen in found.items()} == {each: to.handle(each) for each in attempts}
    assert len({to.handle(each).partition("_")[0] for each in attempts}) == 4
    assert {each.end for each in to.until_ended().values()} == {End.OK}
    assert most_at_once(to.folder) <= 3
    said = {index: (to.folder / f"{lost[0].batch}.{index}.out").read_text() for index in range(13)}
    assert said == {index: f"I am {index}\n" for index in range(13)}


def test_a_site_without_arrays(own_cluster: OwnCluster, hand: HandTo) -> None:
    own_cluster(Plan(accounting=False, array_size=0))
    to = hand()
    to.over("bash", "-c", COUNTING, str(to.folder), count=3, at_once=1)
    assert {each.end for each in to.until_ended().values()} == {End.OK}
    assert most_at_once(to.folder) == 1


def test_a_batch_that_is_taken_in_part_is_found_by_name(own_cluster: OwnCluster, hand: HandTo) -> None:
    made = own_cluster(Plan(accounting=False, array_size=2, more=("MaxJobCount=4",)))
    to = hand()
    gate = Gate(to.folder / "gate")
    made.command("sbatch", "--hold", "--output=/dev/null", "--wrap=true")
    with pytest.raises(EngineAway, match=r"of 8 jobs|took more than"):
        to.over("bash", "-c", gate.wait, count=8)
    name = f"{to.folder.name}-1"
    found = to.engine.look([Ticket(index, name, index) for index in range(8)])
    assert 0 < len(found) < 8
    assert list(found) == list(range(len(found)))
    to.engine.cancel([each.handle for each in found.values()])


def test_munge_that_is_not_there(own_cluster: OwnCluster, hand: HandTo) -> None:
    made = own_cluster(Plan(accounting=False))
    to = hand()
    to.over("true")
    made.stop("munged")
    with pytest.raises(EngineAway, match=r"took more than|unge"):
        to.look()
    to.tickets.clear()  # Nothing of it can be cancelled.


def test_a_cluster_that_is_not_configured(hand: HandTo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none.conf"))
    with pytest.raises(EngineMissing, match="login node"):
        hand().engine.check([])


def test_nodes_apart_and_one_that_dies(own_cluster: OwnCluster, hand: HandTo) -> None:
    made = own_cluster(Plan(nodes=3, apart=True, gpus=2, slurmd_timeout_s=6, accounting=False))
    to = hand()
    script = 'srun --ntasks-per-node=1 bash -c "hostname; hostname -I" > $0/hosts'
    (both,) = to.over("bash", "-c", script, str(to.folder), placement=Placement(gpus=2, nodes=2))
    assert to.until_ended()[both].end is End.OK
    lines = (to.folder / "hosts").read_text().split()
    assert {"n1", "n2"} < set(lines)
    assert {made.layout.address("n1"), made.layout.address("n2")} < set(lines)
    gate = Gate(to.folder / "gate")
    attempts = to.over("bash", "-c", f"{gate.wait}; echo done >> $0/done.$1", str(to.folder), count=6)
    seen = to.until_running(*attempts)
    dying = [each for each in attempts if seen[each].node == "n2"]
    assert len(dying) == 2
    made.kill_node("n2")
    seen = to.until_ended(*dying)
    assert {seen[each].end for each in dying} == {End.NODE_LOST}
    gate.open()
    seen = to.until_ended()
    assert {seen[each].end for each in attempts if each not in dying} == {End.OK}
    assert len(list(to.folder.glob("done.*"))) == 4
    made.start_node("n2")
    made.wait_for_nodes()
