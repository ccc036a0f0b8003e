"""Sums and their forms on the command line."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ledger.uses import use

from gpuherd.cli.main import run
from gpuherd.errors import UsageError
from gpuherd.gpus.machine_dir import machine_dir
from gpuherd.ledger.recorder import Recorder
from gpuherd.ledger.records import Kind, Recorded, Use
from gpuherd.ledger.usage import BY, days, usage

ME = os.geteuid()


@st.composite
def records(draw: st.DrawFn) -> list[Recorded]:
    found = []
    for number in range(draw(st.integers(0, 8))):
        held_s = draw(st.floats(1, 200_000))
        one = use(
            str(number),
            since=draw(st.floats(1e9, 1e9 + 400_000)),
            held_s=held_s,
            uid=draw(st.integers(0, 3)),
            gpu=draw(st.sampled_from(["GPU-0", "GPU-1"])),
            project=draw(st.sampled_from([None, "a", "b"])),
            computing_s=draw(st.none() | st.just(held_s / 2)),
            energy_j=draw(st.none() | st.just(held_s * 100)),
        )
        found.append(Recorded(one, one.uid))
    return found


@given(records())
def test_every_grouping_has_the_same_sum(found: list[Recorded]) -> None:
    since, until = 1e9 + 50_000, 1e9 + 300_000
    whole = sum(part.held_s for each in found if (part := each.use.within(since, until)) is not None)
    for by in BY:
        result = usage(found, by, since, until, reader_uid=0)
        assert result.total.held_s == pytest.approx(whole)
        assert sum(row.total.held_s for row in result.rows) == pytest.approx(whole)
        assert sum(row.share for row in result.rows) == pytest.approx(1.0 if whole else 0.0)
        assert result.total.computing in (None, pytest.approx(0.5))


def test_days_are_the_calendars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        # In the night to the 25th of October 2026 the clock is set back by an hour.
        first, last = datetime(2026, 10, 24, 12).timestamp(), datetime(2026, 10, 26, 12).timestamp()
        lengths = [(end - begin) / 3600 for begin, end in days(first, last)]
        assert lengths == [24.0, 25.0, 24.0]
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


def fill(*uses: Use) -> Path:
    folder = machine_dir().make("ledger")
    Recorder(folder).end(uses)
    return folder


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["usage", *words]) == 0
    return capsys.readouterr().out


def some() -> list[Use]:
    now = time.time()
    one = use("a", since=now - 7200, held_s=3600.0, uid=ME, project="theory", computing_s=1800.0, energy_j=3.6e6)
    return [
        one,
        replace(one, id="b", project="practice", command="python train.py", held_s=900.0, computing_s=None),
        replace(one, id="c", gpu="GPU-1", label="1", kind=Kind.OTHER, uid=ME, project=None, held_s=3600.0),
    ]


def test_a_table_with_bars(capsys: pytest.CaptureFixture[str]) -> None:
    fill(*some())
    out = told(capsys, "--by", "project")
    lines = out.splitlines()
    assert "█" in out
    assert lines[1].split()[:2] == ["project", "GPU-hours"]
    assert any(line.startswith("theory") and "1.00" in line and "44.4 %" in line for line in lines)
    assert any(line.startswith("all") and "2.25" in line for line in lines)


def test_json_and_csv_have_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    fill(*some())
    found = json.loads(told(capsys, "--json", "--by", "project", "--days", "1"))
    assert found["total"]["gpu_hours"] == 2.25
    assert found["total"]["energy_kwh"] == 3.0
    assert found["total"]["computing_share"] == 0.5
    assert {row["project"]: row["gpu_hours"] for row in found["rows"]} == {
        "theory": 1.0,
        "(none)": 1.0,
        "practice": 0.25,
    }
    rows = list(csv.DictReader(io.StringIO(told(capsys, "--csv", "--by", "project"))))
    assert {row["project"]: float(row["gpu_hours"]) for row in rows} == {"theory": 1.0, "(none)": 1.0, "practice": 0.25}


def test_what_runs_now_is_in(capsys: pytest.CaptureFixture[str]) -> None:
    folder = machine_dir().make("ledger")
    recorder = Recorder(folder)
    recorder.begin()
    recorder.sample([replace(some()[0], until=time.time(), since=time.time() - 3600)])
    found = json.loads(told(capsys, "--json"))
    assert found["total"]["gpu_hours"] == pytest.approx(1.0, abs=0.01)
    assert found["total"]["going_on"] == 1
    recorder.close()


def test_hostile_names_reach_neither_terminal_nor_spreadsheet(capsys: pytest.CaptureFixture[str]) -> None:
    folder = fill()
    one = some()[0]
    Recorder(folder).end([replace(one, project="=HYPERLINK(1)"), replace(one, id="z", project="a\x1b[2Jb\u202ec")])
    assert "\x1b" not in told(capsys, "--by", "project")
    rows = list(csv.reader(io.StringIO(told(capsys, "--csv", "--by", "project"))))
    assert not [row for row in rows[1:] if row[0].startswith("=")]


def test_months_and_days(capsys: pytest.CaptureFixture[str]) -> None:
    at = datetime(2026, 3, 31, 23).timestamp()
    fill(use("a", since=at, held_s=7200.0, uid=ME))
    assert json.loads(told(capsys, "--json", "--month", "2026-03"))["total"]["gpu_hours"] == 1.0
    assert json.loads(told(capsys, "--json", "--month", "2026-04"))["total"]["gpu_hours"] == 1.0
    by_day = json.loads(told(capsys, "--json", "--since", "2026-03-01", "--until", "2026-05-01", "--by", "day"))
    assert [(row["day"], row["gpu_hours"]) for row in by_day["rows"]] == [("2026-03-31", 1.0), ("2026-04-01", 1.0)]


@pytest.mark.parametrize(
    "words",
    [
        ["--month", "2026-13"],
        ["--month", "now"],
        ["--days", "0"],
        ["--days", "x"],
        ["--since", "yesterday"],
        ["--until", "2026-11-01"],
        ["--since", "2026-11-02", "--until", "2026-11-01"],
        ["--json", "--csv"],
        ["--by", "moon"],
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((UsageError, SystemExit)) as refused:
        run(["usage", *words])
    assert getattr(refused.value, "code", 2) == 2
    assert "gpu_hours" not in capsys.readouterr().out


def test_no_ledger_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["usage"]) == 0
    found = capsys.readouterr()
    assert "no ledger yet" in found.err
    assert "nothing was recorded" in found.out
