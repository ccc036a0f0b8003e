"""The pages of usage, reservations and other machines, as a browser gets them: content, forms, refusals, escaping."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from tests.ledger.uses import use
from tests.patience import wait_until
from tests.web.other_machines import BUSY, FREE, fake_ssh, printing
from tests.web.visits import ORIGIN, visiting

from gpuherd.cli.main import run
from gpuherd.gpus.reservation_files import ReservationFolder
from gpuherd.gpus.reservations import read
from gpuherd.ledger import Recorder
from gpuherd.standin.machine import SimulatedMachine
from gpuherd.web.pages import usage
from gpuherd.web.usage_view import Span, UsageView, read_usage

HOSTILE = "<img src=x onerror=alert(1)>"
Standin = Callable[..., SimulatedMachine]


def times(*, hours: int = 24, lasting: int = 2) -> dict[str, str]:
    """The fields of a form for a time to come."""
    since = (datetime.now() + timedelta(hours=hours)).replace(minute=0)
    until = since + timedelta(hours=lasting)
    return {"from": f"{since:%Y-%m-%dT%H:%M}", "until": f"{until:%Y-%m-%dT%H:%M}"}


@pytest.fixture
def for_all_users(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedMachine]:
    """Two simulated GPUs, and a machine's folder that was set up for sharing, which every user can get at."""
    place = Path(tempfile.mkdtemp(prefix="gpuherd-users-"))
    place.chmod(0o1777)
    monkeypatch.setenv("GPUHERD_MACHINE_DIR", str(place))
    monkeypatch.setenv("GPUHERD_LEASE_DIR", str(place / "leases"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))
    machine = SimulatedMachine.create(place / "gpus", "2x40GB")
    (place / "gpus").chmod(0o666)
    machine.activate()
    yield machine
    machine.deactivate()
    shutil.rmtree(place)


# ---- usage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded() -> None:
    """Some hours of this user's, of a job and a project with hostile names."""
    now, recorder = time.time(), Recorder()
    mine = {"uid": os.geteuid(), "job": HOSTILE, "project": HOSTILE, "command": HOSTILE, "computing_s": 1800.0}
    recorder.end(
        [use("a", since=now - 7200.0, held_s=3600.0, **mine), use("b", since=now - 90_000, held_s=7200.0, **mine)]
    )
    recorder.close()


def test_usage_is_shown_by_each_key_with_own_rows_marked_and_all_escaped(recorded: None) -> None:
    with visiting() as visitor:
        for by in ("user", "project", "gpu", "command"):
            page = visitor.figures(f"/usage?by={by}")
            assert "<b>3.0</b> GPU-hours held" in page
            assert '<tr class="own">' in page
            assert HOSTILE not in page
        assert "&lt;img src=x onerror=alert(1)&gt;" in page


def test_the_file_is_that_of_the_command(recorded: None, capsys: pytest.CaptureFixture[str]) -> None:
    month = f"{datetime.now():%Y-%m}"
    with visiting() as visitor:
        response = visitor.client.get(f"/usage.csv?by=project&month={month}")
    assert response.headers["content-type"].startswith("text/csv")
    assert response.headers["content-disposition"] == f'attachment; filename="gpuherd-usage-{month}-by-project.csv"'
    assert HOSTILE in response.text
    assert run(["usage", "--csv", "--by", "project", "--month", month]) == 0
    assert capsys.readouterr().out == response.text


@pytest.mark.parametrize("query", ["by=uid", "by=", "month=2026-99", "month=%00", "by=user&month=1999-01"])
def test_usage_that_there_is_not_is_refused(query: str) -> None:
    with visiting() as visitor:
        assert "<b" not in visitor.get(f"/usage?{query}", 400).partition('role="alert">')[2].partition("</p>")[0]
        visitor.get(f"/usage.csv?{query}", 400)


def test_a_large_ledger_does_not_hold_up_the_page(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(span: Span) -> UsageView:
        time.sleep(1.0)
        return read_usage(span)

    monkeypatch.setattr(usage, "read_usage", slowly)
    with visiting() as visitor:
        began = time.monotonic()
        page = visitor.get("/usage?by=project")
        assert time.monotonic() - began < 0.9
        assert 'hx-get="/usage?by=project&amp;month="' in page
        assert "GPU-hours held" not in page
        assert "GPU-hours held" in visitor.client.get("/usage?by=project", headers={"hx-request": "true"}).text
        assert "GPU-hours held" in visitor.get("/usage?by=project")


def test_usage_without_a_ledger() -> None:
    with visiting() as visitor:
        assert "No use of a GPU is recorded" in visitor.figures("/usage")


# ---- reservations ----------------------------------------------------------------------------------------------------


def test_gpus_are_reserved_by_the_form_and_given_back(standin: Standin) -> None:
    standin("4x40GB")
    with visiting() as visitor:
        page = visitor.post("/reservations", {"gpus": "2", "name": HOSTILE, **times()})
        (made,) = read()
        assert (made.uid, made.gpus, made.name) == (os.geteuid(), 2, HOSTILE)
        assert "Reserved: GPU 0, 1" in page
        assert HOSTILE not in page
        assert f'value="{made.id}"' in page
        page = visitor.post("/reservations/cancel", {"id": made.id})
        assert "is cancelled" in page
        assert read() == ()


def test_what_was_just_reserved_is_shown_though_an_older_look_is_there(standin: Standin) -> None:
    machine = standin("4x40GB")
    with visiting() as visitor:
        assert "None." in visitor.get("/reservations")
        begin = time.time() + 7200
        made = ReservationFolder.made().add(machine.uuids[:1], begin, begin + 7200, "elsewhere")
        assert "Reserved: GPU 0" in visitor.get(f"/reservations?made={made.id}")


def test_a_refusal_stands_at_its_field_and_keeps_what_was_written(standin: Standin) -> None:
    standin("2x40GB")
    with visiting() as visitor:
        page = visitor.post("/reservations", {"gpus": "2", "name": 'a "name"', "from": "<b>", "until": ""}, 422)
        assert 'id="from-problem" class="bad" role="alert">&#39;&lt;b&gt;&#39; is no time' in page
        assert 'value="a &#34;name&#34;"' in page
        assert 'aria-invalid="true" aria-describedby="from-problem"' in page
        visitor.post("/reservations", {"gpus": "2", "name": "", **times()})
        page = visitor.post("/reservations", {"gpus": "1", "name": "", **times()}, 409)
        assert 'id="gpus-problem"' in page
        assert "not free" in page
        page = visitor.post("/reservations", {"gpus": "1", "name": "", **times(hours=-48)}, 409)
        assert 'id="form-problem"' in page
        assert "in the past" in page
        assert len(read()) == 1


def test_what_is_no_reservation_is_not_given_back(standin: Standin) -> None:
    standin("2x40GB")
    with visiting() as visitor:
        for wanted in ("0-ffff", "../../etc/passwd", "", "x" * 10_000):
            page = visitor.post("/reservations/cancel", {"id": wanted}, 409)
            assert "there is no reservation" in page
            assert len(page) < 200_000


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")
def test_another_users_reservation_is_seen_and_stays(for_all_users: SimulatedMachine) -> None:
    begin = time.time() + 7200
    theirs = ReservationFolder.made().add(for_all_users.uuids[:1], begin, begin + 7200, "theirs")
    with visiting() as visitor:
        assert f'value="{theirs.id}"' in visitor.get("/reservations")
        # Loads all modules too, which another user need not be able to read.
        visitor.post("/reservations", {"gpus": "9", "name": "", **times()}, 409)
    os.seteuid(54_321)
    try:
        with visiting() as visitor:
            page = visitor.get("/reservations")
            assert f"entry-{theirs.id}" in page
            assert f'value="{theirs.id}"' not in page  # no button
            page = visitor.post("/reservations/cancel", {"id": theirs.id}, 409)
            assert "only they and root can cancel" in page
            page = visitor.post("/reservations", {"gpus": "1", "name": "mine", **times()})
            assert "Reserved: GPU" in page
    finally:
        os.seteuid(0)
    assert {(each.uid, each.name) for each in read()} == {(0, "theirs"), (54_321, "mine")}


def test_a_reservation_needs_the_token_of_the_form(standin: Standin) -> None:
    standin("2x40GB")
    with visiting() as visitor:
        fields = {"gpus": "1", "name": "", **times()}
        for path in ("/reservations", "/reservations/cancel"):
            response = visitor.client.post(path, data=fields, headers={"origin": ORIGIN})
            assert response.status_code == 403
            other = {"origin": "http://evil.example"}
            assert visitor.client.post(path, data=fields, headers=other).status_code == 403
    assert ReservationFolder.existing() is None


def test_reservations_without_gpus_say_why() -> None:
    with visiting() as visitor:
        page = visitor.get("/reservations")
        assert "There are no GPUs to reserve" in page
        assert 'id="reserve"' not in page


def test_where_the_policy_turns_reservations_off_there_is_no_form(
    standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin("2x40GB")
    policy = tmp_path / "policy.toml"
    policy.write_text("[reservations]\nenabled = false\n")
    monkeypatch.setenv("GPUHERD_POLICY", str(policy))
    with visiting() as visitor:
        page = visitor.get("/reservations")
        assert "turned off on this machine" in page
        assert 'id="reserve"' not in page
        assert "turned off" in visitor.post("/reservations", {"gpus": "1", "name": "", **times()}, 409)


@pytest.mark.parametrize("day", ["x", "0001-01-01", "2026-11-23%00", "../x"])
def test_a_day_that_there_is_not_is_refused(day: str) -> None:
    with visiting() as visitor:
        visitor.get(f"/reservations?from={day}", 400)


# ---- other machines --------------------------------------------------------------------------------------------------


def test_other_machines_are_shown_without_waiting_for_them(
    standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin("2x40GB")
    fake_ssh(
        tmp_path,
        monkeypatch,
        "if 'away' in sys.argv: sys.stderr.write('No route to <b>host\\x1b[31m\\n'); sys.exit(255)\n"
        f"if 'slow' in sys.argv: time.sleep(60)\n{printing(FREE, BUSY)}",
    )
    with visiting(["node-2", "away", "slow"]) as visitor:
        assert 'href="/machines"' in visitor.get("/")
        began = time.monotonic()
        visitor.get("/machines")
        assert time.monotonic() - began < 5
        wait_until(lambda: "no answer" in visitor.get("/machines") and "1 of 2 free" in visitor.get("/machines"))
        page = visitor.get("/machines")
        assert "2 of 2 free" in page  # this machine
        assert "No route to &lt;b&gt;host" in page
        assert "asking" in page
        assert "unused for 25 min" in page
        assert "<b onmouseover" not in page
        assert "\x1b" not in page
        assert "\u202e" not in page


def test_without_other_machines_there_is_no_page_of_them_in_the_navigation(standin: Standin) -> None:
    standin("1x40GB")
    with visiting() as visitor:
        assert 'href="/machines"' not in visitor.get("/")
        assert "--host NAME" in visitor.get("/machines")


def test_a_visitor_who_is_not_logged_in_sees_none_of_it(standin: Standin) -> None:
    standin("1x40GB")
    with visiting() as visitor:
        visitor.client.cookies.clear()
        for path in ("/usage", "/usage.csv", "/reservations", "/machines", "/machines/events", "/reservations/events"):
            assert visitor.client.get(path).status_code == 401
