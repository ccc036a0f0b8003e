"""The engine and a real SLURM: what is handed over runs, and what becomes of it is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.patience import Gate, wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import HandTo

from gpuherd.engines.base import End, Phase, Placement, Refused, Ticket
from gpuherd.errors import UsageError


def test_an_array_runs_no_more_at_once_than_it_may_and_shares_no_gpu(slurm: Cluster, hand: HandTo) -> None:
    to = hand()
    gate = Gate(to.folder / "gate")
    attempts = to.over(
        "bash",
        "-c",
        f'echo "$1 $CUDA_VISIBLE_DEVICES" > "$0/gpus.$1"; {gate.wait}',
        str(to.folder),
        count=5,
        at_once=3,
        placement=Placement(gpus=2, cpus=2, memory_mb=100, time_s=90),
    )
    seen = to.until_running(*attempts[:3])
    assert [seen[each].phase for each in attempts[3:]] == [Phase.WAITING] * 2
    assert seen[attempts[4]].reason == "JobArrayTaskLimit"
    assert {seen[each].node for each in attempts[:3]} == {"n1"}
    wait_until(lambda: len(list(to.folder.glob("gpus.*"))) == 3)
    given = [Path(path).read_text().split()[1].split(",") for path in sorted(to.folder.glob("gpus.*"))]
    assert sorted(gpu for each in given for gpu in each) == ["0", "1", "2", "3", "4", "5"]
    told = slurm.command("scontrol", "show", "job", to.handle(attempts[0]))
    assert "TimeLimit=00:02:00" in told
    assert "MinMemoryNode=100M" in told
    assert "Requeue=0" in told
    gate.open()
    assert {each.end for each in to.until_ended().values()} == {End.OK}
    assert sorted(path.name for path in to.folder.glob("gpus.*")) == [f"gpus.{index}" for index in range(5)]


def test_what_was_handed_over_is_found_by_name_when_the_answer_was_lost(slurm: Cluster, hand: HandTo) -> None:
    to = hand()
    gate = Gate(to.folder / "gate")
    several = to.over("bash", "-c", gate.wait, count=9, at_once=1)
    one = to.over("bash", "-c", gate.wait)
    to.until_running(several[0], *one)
    handles = {each: to.handle(each) for each in (*several, *one)}
    lost = [Ticket(each.attempt, each.batch, each.index) for each in to.tickets.values()]
    never = Ticket(99, "never-handed-over", 0)
    found = to.engine.look([*lost, never])
    assert {attempt: seen.handle for attempt, seen in found.items()} == handles
    to.engine.cancel(handles.values())


def test_a_chain_and_one_that_can_never_go_on(slurm: Cluster, hand: HandTo) -> None:
    to = hand()
    (first,) = to.over("bash", "-c", "sleep 0.2; touch $0/first", str(to.folder))
    (second,) = to.over("test", "-e", f"{to.folder}/first", "-a", after=(to.handle(first),))
    (bad,) = to.over("bash", "-c", "exit 3")
    (never,) = to.over("touch", f"{to.folder}/never", after=(to.handle(bad), to.handle(first)))
    (after_never,) = to.over("touch", f"{to.folder}/never", after=(to.handle(never),))
    seen = to.until_ended()
    assert {each: seen[each].end for each in seen} == {
        first: End.OK,
        second: End.OK,
        bad: End.FAILED,
        never: End.NEVER,
        after_never: End.NEVER,
    }
    assert seen[bad].reason == "NonZeroExitCode"
    assert not (to.folder / "never").exists()


def test_cancelled_by_us_and_by_an_administrator(slurm: Cluster, hand: HandTo) -> None:
    to = hand()
    gate = Gate(to.folder / "gate")
    ours, theirs = (to.over("bash", "-c", gate.wait)[0] for _ in range(2))
    to.until_running(ours, theirs)
    (waiting,) = to.over("bash", "-c", gate.wait, placement=Placement(gpus=8))  # as many as there are: it can't start
    slurm.command("scontrol", "hold", to.handle(waiting))
    assert (to.sighting(waiting).phase, to.sighting(waiting).reason) == (Phase.WAITING, "JobHeldAdmin")
    to.engine.cancel([to.handle(ours), to.handle(waiting)])
    slurm.command("setpriv", "--reuid=65534", "--clear-groups", "scancel", to.handle(theirs))
    seen = to.until_ended()
    assert {each.end for each in seen.values()} == {End.CANCELLED}
    assert (seen[ours].by, seen[waiting].by, seen[theirs].by) == ("root", "root", "nobody")
    to.engine.cancel([to.handle(each) for each in seen])  # have ended: no error


@pytest.mark.slow
def test_those_of_an_array_that_are_cancelled_while_they_wait(slurm: Cluster, hand: HandTo) -> None:
    """SLURM takes single ones out of the array and keeps no record of them; who cancels all that waits leaves one that
    names no place. What runs there runs on.
    """
    to = hand()
    gate = Gate(to.folder / "gate")
    first, second, third, *waiting = to.over("bash", "-c", gate.wait, count=8, placement=Placement(gpus=2), at_once=3)
    one, *others = waiting
    to.until_running(first, second, third)
    slurm.command("scancel", to.handle(one))
    # Accounting tells of the array a moment after the controller.
    seen = to.until(lambda seen: one in seen and seen[one].phase is Phase.ENDED)
    assert (seen[one].end, seen[one].by) == (End.CANCELLED, None)
    assert {to.sighting(each).phase for each in others} == {Phase.WAITING}
    slurm.command("scancel", "--state=PENDING", to.handle(first).partition("_")[0])
    seen = to.until_ended(*waiting)
    assert {seen[each].end for each in waiting} == {End.CANCELLED}
    assert {seen[each].by for each in others} == {"root"}
    assert {seen[each].phase for each in (first, second, third)} == {Phase.RUNNING}
    gate.open()
    seen = to.until_ended()
    assert {seen[each].end for each in (first, second, third)} == {End.OK}


@pytest.mark.slow
def test_an_array_that_is_cancelled_before_any_of_it_began(slurm: Cluster, hand: HandTo) -> None:
    to = hand(slurm_args=("--hold",))
    to.over("true", count=3)
    to.until(lambda seen: len(seen) == 3)
    slurm.command("scancel", to.handle(1).partition("_")[0])
    assert {(each.end, each.by) for each in to.until_ended().values()} == {(End.CANCELLED, "root")}


def test_a_signal_reaches_the_command_itself(slurm: Cluster, hand: HandTo) -> None:
    to = hand(setup=("export SAID='of the setup'",))
    (attempt,) = to.over(
        "bash", "-c", "trap 'echo $SAID; exit 0' USR1; touch $0/ready; while :; do sleep 0.05; done", f"{to.folder}"
    )
    wait_until((to.folder / "ready").exists)
    slurm.command("scancel", "--signal=USR1", "--batch", to.handle(attempt))
    assert to.until_ended()[attempt].end is End.OK
    outputs = list(to.folder.glob("*.out"))
    assert [path.read_text() for path in outputs] == ["of the setup\n"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partition": "mian"}, r"--partition mian: there is no partition mian in SLURM; did you mean main\?"),
        ({"partition": "main,closd"}, r"no partition closd .* did you mean closed\?"),
        ({"partition": "closed"}, r"closed \(drain\) takes no jobs now; others that do: brief, main"),
        ({"account": "thoery"}, r"you have no account thoery in SLURM; did you mean theory\? There are: lab"),
        ({"qos": "long"}, r"no qos long in SLURM.* There are: normal, short"),
        ({"gpu_type": "h100"}, r"no GPU of the type h100 in SLURM. There are: fake"),
    ],
)
def test_what_is_not_there_is_told_before_anything_is_handed_over(
    slurm: Cluster, hand: HandTo, options: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        hand(**options).engine.check([Placement(gpus=1)])


def test_what_no_node_has_can_never_be(slurm: Cluster, hand: HandTo) -> None:
    fits = Placement(gpus=8, cpus=64, memory_mb=64000, time_s=600)
    wishes = {
        Placement(gpus=9): "no node of SLURM's partition brief has 9 GPUs of type fake: the most is 8 (n1)",
        Placement(gpus=1, cpus=65): "no node of SLURM's partition brief has 65 CPUs: the most is 64 (n1)",
        Placement(gpus=1, memory_mb=64001): (
            "no node of SLURM's partition brief has 64001 MB of memory: the most is 64000 (n1)"
        ),
        Placement(gpus=1, nodes=2): "2 nodes are asked for, and SLURM's partition brief has 1 that fit (n1)",
        Placement(gpus=1, time_s=601): (
            "11 minutes are asked for, and SLURM's partition brief grants at most 10 (--time-limit 10m)"
        ),
    }
    to = hand(partition="brief", gpu_type="fake", account="theory", qos="normal")
    assert to.engine.check([fits, *wishes]) == wishes
    # SLURM itself says the same of each.
    (attempt,) = to.over("true", placement=fits)
    to.until_ended(attempt)


def test_slurms_own_refusal_is_told(slurm: Cluster, hand: HandTo) -> None:
    with pytest.raises(Refused, match="Invalid feature specification") as found:
        hand(constraint="nvlink").over("true")
    assert not found.value.may_pass


def test_a_limit_of_the_moment_may_pass(slurm: Cluster, hand: HandTo) -> None:
    slurm.command("sacctmgr", "-i", "modify", "qos", "short", "set", "MaxSubmitJobsPerUser=1")
    slurm.command("sacctmgr", "-i", "modify", "user", "root", "set", "qos+=short")
    to = hand(qos="short")
    gate = Gate(to.folder / "gate")
    (attempt,) = to.over("bash", "-c", gate.wait)
    with pytest.raises(Refused, match="QOSMaxSubmitJobPerUserLimit") as found:
        to.over("true")
    assert found.value.may_pass
    gate.open()
    to.until_ended(attempt)
