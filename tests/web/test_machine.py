"""The machine page: what it shows of GPUs, holders, tickets and the ledger, and of names that strangers chose."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gpus.machines import gpu, process, split
from tests.ledger.uses import use
from tests.web.serving import ask, serving

from gpuherd.gpus.idle import Check
from gpuherd.gpus.idle_held import IdleGpu
from gpuherd.gpus.leases import Holder, LeaseFolder, LeaseNote
from gpuherd.gpus.reservations import Reservation, Standing
from gpuherd.jobs import clock
from gpuherd.jobs.monitor.turns import WaitingUser
from gpuherd.ledger import Recorder
from gpuherd.standin.machine import SimulatedMachine
from gpuherd.web.bars import bars_of
from gpuherd.web.live import Look
from gpuherd.web.machine_data import (
    DayUse,
    GpuState,
    GpuView,
    MachineReader,
    MachineView,
    by_day,
    read_days,
    view_of,
)
from gpuherd.web.pages.machine import fragments

MakeMachine = Callable[..., SimulatedMachine]
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}\x1b[31m\u202egpj\n\0"
FREE, BUSY = Check(True, ""), Check(False, "2000 MB used (threshold 500)")


def shown(view: MachineView) -> str:
    """The page's changing parts as HTML."""
    return "".join(part.html for part in fragments(Look(view, at=1000.0, number=1)))


@pytest.mark.parametrize(
    ("found", "holder", "excluded", "state"),
    [
        (FREE, None, False, GpuState.FREE),
        (BUSY, None, False, GpuState.BUSY),
        (BUSY, None, True, GpuState.BUSY),
        (FREE, None, True, GpuState.EXCLUDED),
        (FREE, Holder("GPU-0"), False, GpuState.HELD),
        (BUSY, Holder("GPU-0"), False, GpuState.HELD),
    ],
)
def test_the_state_of_a_gpu(found: Check, holder: Holder | None, excluded: bool, state: GpuState) -> None:
    assert view_of(gpu(0), found, holder, excluded=excluded).state is state


def test_gpus_that_are_split_or_broken_are_marked() -> None:
    parent, instance = split(0, [1])
    assert view_of(parent, FREE, None).state is GpuState.SPLIT
    assert view_of(instance, FREE, None).state is GpuState.FREE
    lost = gpu(1, problem="has fallen off the bus")
    view = view_of(lost, FREE, None)
    assert view.state is GpuState.UNUSABLE
    html = shown(MachineView((view,)))
    assert "has fallen off the bus" in html
    assert "<b>1</b> unusable" in html


def test_names_of_strangers_are_text_and_nothing_else() -> None:
    stranger = replace(process(), user=HOSTILE, command=HOSTILE)
    hostile = gpu(0, name=HOSTILE, processes=(stranger,), utilisation_percent=50)
    view = GpuView(hostile, GpuState.HELD, HOSTILE, Holder("GPU-0", 1, HOSTILE, 0.0, HOSTILE), reservations=(HOSTILE,))
    waiting = WaitingUser(user=HOSTILE, uid=7, gpus=1, smallest=2, waited_s=9.0, held=0, used_h=1.0, weight=2.0)
    html = shown(MachineView((view,), HOSTILE, HOSTILE, (waiting,), (HOSTILE,)))
    assert html.count("&lt;script&gt;") == 10
    assert "<script" not in html
    assert "<img" not in html
    assert "{{7*7}}" in html
    for sign in "\x1b\u202e\0":
        assert sign not in html


def test_a_machine_without_gpus_says_why() -> None:
    assert "No GPUs: no NVIDIA driver" in shown(MachineView((), "no NVIDIA driver"))


def test_an_unknown_figure_is_not_a_zero() -> None:
    html = shown(MachineView((GpuView(gpu(0), GpuState.FREE),)))
    assert html.count("N/A") == 3  # use, power and temperature


def test_what_is_held_waited_for_and_idle_is_read(standin: MakeMachine, tmp_path: Path) -> None:
    machine = standin("3x40GB")
    machine.occupy(1, 2000, pid=os.getpid())
    folder = LeaseFolder.default()
    with (
        folder.acquire(machine.uuids[0], LeaseNote(job="train <7>")) or pytest.fail("free"),
        (folder.path / f"{os.geteuid()}.1.0.ticket").open("w+") as ticket,
    ):
        fcntl.flock(ticket, fcntl.LOCK_EX)
        ticket.write(json.dumps({"gpus": 2, "smallest": 1, "since": clock.mono()}))
        ticket.flush()
        view = MachineReader().read()
        html = shown(view)
    assert [each.state for each in view.gpus] == [GpuState.HELD, GpuState.BUSY, GpuState.FREE]
    assert view.gpus[0].holder is not None
    assert "train &lt;7&gt;" in html
    assert f"pid {os.getpid()}" in html
    (waiting,) = view.waiting
    assert (waiting.uid, waiting.gpus, waiting.used_h) == (os.geteuid(), 2, 0.0)
    assert waiting.waited_s < 30
    assert "Waiting for GPUs" in html
    assert view.warnings == ()


@pytest.mark.parametrize("content", ["[1, 2", "x" * 100_000, json.dumps({"gpus": 10**30, "since": "never"})])
def test_planted_tickets_are_no_tickets(standin: MakeMachine, content: str) -> None:
    standin("1x40GB")
    folder = LeaseFolder.default().path
    (folder / "0.7.0.ticket").write_text(content)
    os.mkfifo(folder / "0.8.0.ticket")
    (folder / "0.9.0.ticket").symlink_to("/dev/zero")
    assert MachineReader().read().waiting == ()


def test_a_lease_folder_that_cannot_be_used_is_a_warning(standin: MakeMachine, tmp_path: Path) -> None:
    standin("1x40GB")
    (tmp_path / "leases").mkdir(mode=0o777)
    (tmp_path / "leases").chmod(0o777)  # everyone could replace the files of others
    view = MachineReader().read()
    assert len(view.gpus) == 1
    assert any("what gpuherd holds is not known" in warning for warning in view.warnings)


def reservation(uid: int, *, since: float = 900.0, until: float = 2000.0, name: str = "") -> Standing:
    return Standing(Reservation("r1", uid, 1, ("GPU-0",), since, until, name), frozenset({"GPU-0"}))


def test_reservations_of_others_keep_a_free_gpu_and_ones_own_does_not() -> None:
    me = os.geteuid()
    theirs = view_of(gpu(0), FREE, None, reserved=[reservation(me + 1, name=HOSTILE)], now=1000.0)
    assert theirs.state is GpuState.RESERVED
    html = shown(MachineView((theirs,)))
    assert html.count("&lt;script&gt;") == 1
    assert "reserved by others" in html
    own = view_of(gpu(0), FREE, None, reserved=[reservation(me)], now=1000.0)
    assert own.state is GpuState.FREE
    assert "reserved by you" in shown(MachineView((own,)))
    to_come = view_of(gpu(0), FREE, None, reserved=[reservation(me + 1, since=1500.0)], now=1000.0)
    assert to_come.state is GpuState.FREE
    assert len(to_come.reservations) == 1


def test_a_gpu_that_is_held_without_being_used_is_told() -> None:
    idle = IdleGpu("GPU-0", 7200.0, 30_000, (), cores=2.0)
    html = shown(MachineView((GpuView(gpu(0), GpuState.BUSY, "x", None, idle),)))
    assert "without being used for 2 h, and uses 2.0 CPU cores meanwhile" in html


# ---- the last days ---------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 40 * 86_400), st.floats(1.0, 1e6), st.sampled_from([1, 2, 3])), max_size=20))
def test_days_add_up_to_what_was_held(found: list[tuple[int, float, int]]) -> None:
    since, until = 1.7e9, 1.7e9 + 30 * 86_400
    uses = [use(since=1.7e9 - 5 * 86_400 + at, held_s=held_s, uid=uid) for at, held_s, uid in found]
    total = sum(part.held_s for each in uses if (part := each.within(since, until)) is not None)
    days = by_day(uses, since, until)
    assert sum(day.total_s for day in days) == pytest.approx(total, abs=1e-3)
    assert len(days) in (30, 31, 32)
    bars = bars_of(days)
    for bar in bars.days:
        assert all(block.y >= 0 and block.y + block.height <= bars.height for block in bar.blocks)


def test_many_users_share_a_colour_and_all_are_in_the_table() -> None:
    days = [DayUse(1.7e9, {f"user{number:02}": 3600.0 * (20 - number) for number in range(20)})]
    bars = bars_of(days)
    assert [user.rank for user in bars.users] == [0, 1, 2, 3, 4, 5]
    assert bars.users[-1].name == "15 others"
    assert sum(user.hours for user in bars.users) == pytest.approx(bars.total_h)
    assert "user19 1.0 h" in bars.days[0].words


def test_the_days_are_read_from_the_ledger(standin: MakeMachine) -> None:
    standin("1x40GB")
    assert read_days(30) == ()
    now = time.time()
    recorder = Recorder()
    yesterday = (datetime.now() - timedelta(days=1)).replace(hour=12).timestamp()
    recorder.end([use("old", since=yesterday, held_s=3600.0, uid=os.geteuid())])
    recorder.close()
    days = read_days(30)
    assert days[-1].since <= now < days[-1].since + 86_400 * 1.1
    assert sum(day.total_s for day in days) == pytest.approx(3600.0, abs=1.0)
    with serving() as page:
        cookie = ask(page.port, f"/?token={page.token}").cookie
        part = ask(page.port, "/machine/history", Cookie=cookie, HX_Request="true").text
        whole = ask(page.port, "/machine/history", Cookie=cookie).text
    assert "<b>1.0</b> GPU-hours" in part
    assert not re.search(r"<html|style=", part)
    assert "<html" in whole
    assert "<b>1.0</b> GPU-hours" in whole
