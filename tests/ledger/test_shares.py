"""Recent usage: the same as a reading of everything, by reading only what is new."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ledger.uses import use

from gpuherd.ledger.files import log_path, logs_in, month_of
from gpuherd.ledger.reader import Ledger
from gpuherd.ledger.recorder import Recorder
from gpuherd.ledger.records import line_of
from gpuherd.ledger.shares import Shares, mean_weight

ME = os.geteuid()
NOW = 1_790_000_000.0
DAY = 86_400.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "ledger"
    place.mkdir()
    return place


def shares(folder: Path, uid: int = ME) -> Shares:
    return Shares(Ledger(folder, shared=True, reader_uid=uid))


@given(since=st.floats(-1e6, 1e6), length=st.floats(1, 1e6), half=st.floats(1e4, 1e7))
def test_the_weight_is_the_mean_over_the_time(since: float, length: float, half: float) -> None:
    steps = 2000
    mean = sum(2.0 ** ((since + length * (i + 0.5) / steps) / half) for i in range(steps)) / steps
    if max(abs(since), abs(since + length)) / half < 500:
        assert mean_weight(since, since + length, half) == pytest.approx(mean, rel=1e-3)


def test_it_decays(folder: Path) -> None:
    Recorder(folder).end([use("a", uid=ME, since=NOW - 7 * DAY - 50, held_s=100.0)])
    found = shares(folder)
    assert found.used_by_user(NOW, 7 * DAY)[ME] == pytest.approx(50.0, rel=1e-3)
    assert found.used_by_user(NOW + 7 * DAY, 7 * DAY)[ME] == pytest.approx(25.0, rel=1e-3)
    # Another half-life, and a clock that was set back: the same as read anew.
    assert found.used_by_user(NOW, DAY)[ME] == pytest.approx(100 / 128, rel=1e-2)
    assert found.used_by_user(NOW - 7 * DAY, 7 * DAY)[ME] == pytest.approx(100.0, rel=1e-3)


def test_only_what_is_new_is_read_and_the_sum_is_the_same(folder: Path) -> None:
    recorder = Recorder(folder)
    recorder.begin()
    found = shares(folder)
    assert found.used_by_user(NOW) == {}
    for step in range(20):
        recorder.end([use(str(step), uid=ME, since=NOW - 1000.0, held_s=100.0)])
        recorder.sample([use("open", uid=ME, since=NOW - 500.0, held_s=10.0 * step)])
        assert found.used_by_user(NOW)[ME] == pytest.approx(shares(folder).used_by_user(NOW)[ME])
    assert found.used_by_user(NOW)[ME] == pytest.approx(2000 + 190, rel=0.01)
    recorder.end([use("open", uid=ME, since=NOW - 500.0, held_s=200.0)])
    recorder.sample([])
    assert found.used_by_user(NOW)[ME] == pytest.approx(2000 + 200, rel=0.01)


def test_a_use_that_is_written_again_counts_once(folder: Path) -> None:
    recorder = Recorder(folder)
    recorder.end([use("a", uid=ME, since=NOW - 300, held_s=100.0)])
    found = shares(folder)
    found.used_by_user(NOW)
    recorder.end([use("a", uid=ME, since=NOW - 300, held_s=100.0)])
    assert found.used_by_user(NOW)[ME] == pytest.approx(100.0, rel=0.01)
    recorder.end([use("a", uid=ME, since=NOW - 300, held_s=300.0)])
    assert found.used_by_user(NOW)[ME] == pytest.approx(300.0, rel=0.01)
    # Taken over from a dead recorder, and still going on.
    recorder.sample([use("a", uid=ME, since=NOW - 400, held_s=400.0)])
    assert found.used_by_user(NOW)[ME] == pytest.approx(400.0, rel=0.01)
    assert shares(folder).used_by_user(NOW)[ME] == pytest.approx(400.0, rel=0.01)


@pytest.mark.skipif(ME != 0, reason="only root can make files of others")
def test_no_one_makes_another_pay(folder: Path) -> None:
    month = month_of(NOW)
    for number, (owner, victim) in enumerate([(4242, 4343), (4242, 4242), (4343, 4343), (0, 4343)]):
        path = log_path(folder, owner, month, number)
        path.write_bytes(line_of(use(f"u{number}", uid=victim, since=NOW - 100, held_s=10.0 * 10**number / 100)))
        os.chown(path, owner, owner)
    found = shares(folder, uid=7).used_by_user(NOW)
    assert found.keys() == {4242, 4343}
    assert found[4242] == pytest.approx(1.0, rel=0.01)
    assert found[4343] == pytest.approx(10.0 + 100.0, rel=0.01)


def test_a_record_of_the_future_counts_as_of_now(folder: Path) -> None:
    Recorder(folder).end([use("a", uid=ME, since=NOW + 4000 * DAY, held_s=100.0)])
    assert shares(folder).used_by_user(NOW)[ME] == pytest.approx(100.0, rel=0.01)


def test_many_records_cost_little_the_second_time(folder: Path) -> None:
    recorder = Recorder(folder)
    one = use("a", uid=ME, since=NOW - 300, held_s=100.0)
    recorder.end(replace(one, id=str(i)) for i in range(9_000))
    found = shares(folder)
    found.used_by_user(NOW)
    began = time.process_time()
    for _ in range(20):
        found.used_by_user(NOW)
    assert (time.process_time() - began) / 20 < 0.01
    assert len(logs_in(folder)) == 1
