"""Turns as a waiting gpuherd takes them: on simulated GPUs, beside tickets of another user."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gpuherd.batch.options import RunOptions
from gpuherd.batch.run import NoGpuFree, Waiter
from gpuherd.gpus.lease_files import user_name
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.gpus.tickets import Need, TicketReader
from gpuherd.gpus.turns import Load, Ticket, TurnRules, assign
from gpuherd.jobs import clock
from gpuherd.jobs.gpu.turns import GpuTurns, Lapses, SeenUse, line_now
from gpuherd.jobs.gpu.watch import GpuWatch
from gpuherd.jobs.options import GpuOptions
from gpuherd.jobs.settings import Policy, Settings, TurnPolicy
from gpuherd.ledger import Kind, Recorder, Use
from gpuherd.standin.machine import SimulatedMachine

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of other users")
BOB = 65_533
SETTINGS = Settings(policy=Policy(turns=TurnPolicy(own_rules=TurnRules(grace_s=30.0))))
NEED = Need(gpus=2, jobs=5)


class Shares:
    """A ledger that says what it is told."""

    def __init__(self, used: Mapping[int, float]) -> None:
        self.used = used

    def used_by_user(self, now: float, half_life_s: float) -> Mapping[int, float]:
        return self.used


@pytest.fixture
def machine(standin: Callable[..., SimulatedMachine]) -> SimulatedMachine:
    return standin("2x40GB")


@pytest.fixture
def bob(machine: SimulatedMachine) -> Iterator[Callable[..., Path]]:
    """Bob waits: makes a ticket of his, held by a process that lives."""
    held = []

    def wait(number: int = 0, **said: object) -> Path:
        path = LeaseFolder.default().path / f"{BOB}.1.{number}.ticket"
        path.write_text(json.dumps({"gpus": 1, "smallest": 1, "since": clock.mono()} | said))
        os.chown(path, BOB, BOB)
        fd = os.open(path, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        held.append(fd)
        return path

    yield wait
    for fd in held:
        os.close(fd)


def turns(used: Mapping[int, float], settings: Settings = SETTINGS) -> GpuTurns:
    found = GpuTurns(settings, LeaseFolder.default, Shares(used))
    found.wait(NEED, clock.mono())
    return found


def free_watch(machine: SimulatedMachine, settings: Settings = SETTINGS) -> tuple[GpuWatch, float]:
    """An eye on the GPUs that has found both of them free, and the time."""
    watch = GpuWatch(GpuOptions(max_checks=1, check_interval=1.0), "queue", settings)
    now = clock.mono()
    watch.leases.turns.wait(NEED, now)
    watch.look(now, ())
    return watch, now


def verdicts(watch: GpuWatch, now: float, ours: tuple[str, ...] = ()) -> list[str | None]:
    return [view.busy for view in watch.views(now, ours)]


def test_alone_everything_is_ours_and_a_ticket_is_left_only_after_a_moment(machine: SimulatedMachine) -> None:
    watch, now = free_watch(machine)
    folder = LeaseFolder.default().path
    assert verdicts(watch, now) == [None, None]
    assert not list(folder.glob("*.ticket"))
    watch.look(now + 1, ())
    (ticket,) = TicketReader().read(folder, now + 1)
    assert (ticket.gpus, ticket.jobs, ticket.uid) == (2, 5, os.geteuid())
    assert verdicts(watch, now + 1) == [None, None]
    watch.rest()
    assert not list(folder.glob("*.ticket"))


def test_a_gpu_is_left_to_another_and_no_more_than_he_asks_for(
    machine: SimulatedMachine, bob: Callable[..., Path]
) -> None:
    bob()
    watch, now = free_watch(machine)
    found = verdicts(watch, now)
    # Of equals who has waited longer goes first, and the second GPU is ours.
    assert sorted(map(str, found)) == ["None", "it is uid 65533's turn (0.0 GPU-hours of late, you 0.0)"]
    assert sorted(view.kept for view in watch.views(now, ())) == [False, True]
    assert list(LeaseFolder.default().path.glob(f"{os.geteuid()}.*.ticket")), "others see at once that we wait"
    # When he has not come within the grace it is ours, and the look says that a decision may come out otherwise.
    assert watch.look(now + 29, ()) is False
    assert watch.look(now + 31, ()) is True
    assert verdicts(watch, now + 31) == [None, None]
    watch.rest()


def test_who_has_used_more_lets_the_other_go_first(machine: SimulatedMachine, bob: Callable[..., Path]) -> None:
    bob(gpus=2)
    uuids, now = [machine.uuid(0), machine.uuid(1)], clock.mono()
    assert len(turns({os.geteuid(): 36_000.0}).kept(uuids, (), now)) == 2
    assert turns({BOB: 36_000.0}).kept(uuids, (), now) == {}
    # What ours hold counts too: with one of two held the other is his.
    assert list(turns({}).kept(uuids[1:], uuids[:1], now)) == uuids[1:]
    weighted = replace(SETTINGS.policy, turns=TurnPolicy(weights={"uid 65533": 0.01}))
    assert turns({BOB: 60.0}, Settings(policy=weighted)).kept(uuids, (), now) == {}
    off = replace(SETTINGS.policy, turns=TurnPolicy(enabled=False))
    assert turns({os.geteuid(): 36_000.0}, Settings(policy=off)).kept(uuids, (), now) == {}


def test_short_jobs_go_on_with_a_gpu_for_a_while(machine: SimulatedMachine, bob: Callable[..., Path]) -> None:
    bob(gpus=2)
    uuids, now = [machine.uuid(0), machine.uuid(1)], clock.mono()
    for ahead_s in (50.0, 70.0):
        found = turns({os.geteuid(): ahead_s})
        found.left(uuids, now)
        assert len(found.kept(uuids[:1], (), now)) == (ahead_s > 60)
        assert len(found.kept(uuids, (), now)) == 1, "with both ours would hold two, and he none"
        assert len(found.kept(uuids[:1], (), now + 6)) == 1, "it is not ours any more"


def test_a_lease_of_another_counts_as_held(machine: SimulatedMachine, bob: Callable[..., Path]) -> None:
    bob(gpus=2)
    lease = LeaseFolder.default().acquire(machine.uuid(0))
    assert lease is not None
    found = turns({})
    # Held by a gpuherd of ours elsewhere on the machine, so that it is his turn for the other one.
    assert list(found.kept([machine.uuid(1)], (), clock.mono())) == [machine.uuid(1)]
    lease.close()


def test_for_a_job_on_two_the_one_is_kept_if_the_other_comes(
    machine: SimulatedMachine, bob: Callable[..., Path]
) -> None:
    bob(gpus=2, smallest=2)
    one, two = machine.uuid(0), machine.uuid(1)
    now, found = clock.mono(), turns({os.geteuid(): 36_000.0})
    assert found.kept([one], (), now) == {}
    sentence = "kept for uid 65533, who waits for 2 GPUs at once"
    assert found.kept([one], (), now, coming=[two]) == {one: sentence}
    assert found.kept([one], [two], now) == {one: sentence}


def test_a_ticket_that_says_nothing_useful_keeps_nothing(machine: SimulatedMachine, bob: Callable[..., Path]) -> None:
    bob(gpus=0)
    bob(1, gpus=1, smallest=4)
    bob(2, usable=["GPU-of-another-machine"])
    bob(3, gpus="many")
    uuids = [machine.uuid(0), machine.uuid(1)]
    assert turns({os.geteuid(): 36_000.0}).kept(uuids, (), clock.mono()) == {}


def test_a_failure_to_read_holds_nothing_up(machine: SimulatedMachine, bob: Callable[..., Path]) -> None:
    class Broken:
        def used_by_user(self, now: float, half_life_s: float) -> Mapping[int, float]:
            raise OSError(5, "Input/output error")

    bob(gpus=2)
    found = GpuTurns(SETTINGS, LeaseFolder.default, Broken())
    found.wait(NEED, clock.mono())
    assert len(found.kept([machine.uuid(0)], (), clock.mono())) == 1

    def no_folder() -> LeaseFolder:
        raise OSError(13, "Permission denied")

    closed = GpuTurns(SETTINGS, no_folder)
    closed.wait(NEED, 0.0)
    closed.look(10.0, ())
    assert closed.kept([machine.uuid(0)], (), 11.0) == {}


def test_what_could_be_had_and_was_not_taken_is_not_kept_again() -> None:
    bob, me = Ticket("bob", uid=2, since=0.0), Ticket("me", uid=1, since=0.0)
    lapses, rules = Lapses(), TurnRules(grace_s=10.0)
    loads = {1: Load(used_s=1e6)}

    def kept(now: float, free_since: float, ticket: Ticket = bob) -> bool:
        free = {"GPU-0": free_since}
        tickets = lapses.without([ticket, me], free, now)
        given = assign(free, tickets, loads, now=now, me="me", rules=rules)
        lapses.note(given, free, "me", now)
        return bool(given.kept_for_others("me"))

    assert kept(5.0, 0.0)
    assert not kept(11.0, 0.0)
    # It has been ours meanwhile, and he has made a new ticket: not again, for a while.
    assert not kept(50.0, 50.0)
    assert not kept(60.0, 60.0, replace(bob, key="new", since=59.0))
    assert kept(700.0, 700.0)
    assert not kept(711.0, 700.0)
    lapses.took(2)  # he takes GPUs after all
    assert kept(720.0, 720.0)


def test_what_was_taken_has_not_lapsed(machine: SimulatedMachine, bob: Callable[..., Path]) -> None:
    bob()
    found, gpu, now = turns({os.geteuid(): 36_000.0}), machine.uuid(0), clock.mono()
    assert found.kept([gpu], (), now)
    assert found.kept([], (), now + 5) == {}  # he has it
    assert found.kept([gpu], (), now + 100), "he has given it back, and waits for the next"
    assert found.kept([gpu], (), now + 200) == {}
    assert found.kept([], (), now + 201) == {}
    assert found.kept([gpu], (), now + 210) == {}, "he could have had it, and let it lapse"


def test_what_is_kept_for_a_larger_job_has_not_lapsed() -> None:
    bob, me = Ticket("bob", uid=2, since=0.0, gpus=2, smallest=2), Ticket("me", uid=1, since=0.0)
    lapses, rules = Lapses(), TurnRules(grace_s=10.0)
    for now in (5.0, 11.0):
        given = assign({"GPU-0": 0.0}, [bob, me], {1: Load(1e6)}, now=now, me="me", held={"GPU-1"}, rules=rules)
        lapses.note(given, ["GPU-0"], "me", now)
    assert lapses.without([bob], ["GPU-0"], 12.0) == [bob]


def test_what_was_seen_is_summed_and_fades() -> None:
    seen = SeenUse()
    seen.look({1: 2}, 0.0, 100.0)
    seen.look({1: 2, 2: 1}, 10.0, 100.0)
    seen.look({}, 20.0, 100.0)
    assert seen.used() == pytest.approx({1: 20 * 2**-0.1 + 20, 2: 10})
    seen.look({1: 5}, 120.0, 100.0)
    assert seen.used()[2] == pytest.approx(5)
    seen.look({}, 1000.0, 100.0)  # nobody looked for too long: not counted
    assert seen.used()[1] < 1


def test_who_waits_is_shown_in_the_order_of_turns(machine: SimulatedMachine, bob: Callable[..., Path]) -> None:
    assert line_now(SETTINGS) is None
    bob(gpus=2)
    ours = turns({})
    ours.look(clock.mono() + 1, ())
    line = line_now(SETTINGS, shares=Shares({BOB: 7200.0}))
    assert line is not None
    assert [ticket.uid for ticket in line.tickets] == [os.geteuid(), BOB]
    assert line.loads[BOB].used_s == 7200.0
    ours.rest()


def test_gpuherd_run_waits_for_its_turn_and_not_at_all_if_it_is_not_to_wait(
    machine: SimulatedMachine, bob: Callable[..., Path]
) -> None:
    bob(gpus=2)
    lease = LeaseFolder.default().acquire(machine.uuid(1))  # we hold one already, so that it is his turn
    assert lease is not None
    told: list[str] = []
    once = RunOptions(num_gpus=1, max_checks=1, no_wait=True)
    with pytest.raises(NoGpuFree, match="it is uid 65533's turn"):
        Waiter(once, told.append, SETTINGS).take()
    short = Settings(policy=Policy(turns=TurnPolicy(own_rules=TurnRules(grace_s=1.5))))
    began = clock.mono()
    taken = Waiter(RunOptions(num_gpus=1, max_checks=1), told.append, short).take()
    assert 1.0 < clock.mono() - began < 20
    assert [gpu.uuid for gpu in taken.gpus] == [machine.uuid(0)]
    assert "it is uid 65533's turn" in told[0]
    assert not list(LeaseFolder.default().path.glob(f"{os.geteuid()}.*.ticket"))
    for each in (lease, *taken.leases):
        each.close()


# --- with the ledger ------------------------------------------------------------------------------------------------


def record(hours: float, uid: int) -> None:
    """The ledger has it that this user has just used so many GPU-hours."""
    recorder, now = Recorder(), clock.wall()
    recorder.begin()
    use = Use(
        id=f"test-{uid}",
        uid=uid,
        gpu="GPU-0",
        label="0",
        kind=Kind.JOB,
        since=now - 3600,
        until=now - 1,
        held_s=hours * 3600,
    )
    recorder.end([use])
    recorder.close()


def test_what_the_ledger_has_recorded_decides_whose_turn_it_is(
    machine: SimulatedMachine, bob: Callable[..., Path]
) -> None:
    bob(gpus=2)
    record(0.9, os.geteuid())
    uuids = [machine.uuid(0), machine.uuid(1)]
    found = GpuTurns(SETTINGS, LeaseFolder.default)
    found.wait(NEED, clock.mono())
    kept = found.kept(uuids, (), clock.mono())
    assert set(kept.values()) == {"it is uid 65533's turn (0.0 GPU-hours of late, you 0.9)"}
    assert len(kept) == 2


def test_who_has_used_up_a_week_takes_nothing_and_is_told_until_when(machine: SimulatedMachine) -> None:
    record(0.9, os.geteuid())
    user = user_name(os.geteuid())
    settings = Settings(policy=Policy(week_hours_of={user: 0.5}))
    watch, now = free_watch(machine, settings)
    allowed = watch.leases.allowance(())
    assert allowed.max_gpus == 0
    assert str(allowed.sentence).startswith(f"{user} may use 0.5 GPU-hours a week by this machine's policy, and has")
    assert allowed.changes_at is not None
    assert watch.leases.take(watch.gpus, "job", now) is None
    with pytest.raises(NoGpuFree, match="GPU-hours a week"):
        Waiter(RunOptions(num_gpus=1, max_checks=1, no_wait=True), lambda _: None, settings).take()
    enough = Settings(policy=Policy(week_hours_of={user: 2.0}))
    watch.leases.change(enough)
    assert watch.leases.allowance(()).max_gpus is None
