"""What the usage page shows: spans, sums that agree with ``gpuherd usage``, one's own part, and the file."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ledger.uses import use

from gpuherd.ledger import Recorded
from gpuherd.ledger.figures import Figures, csv_of
from gpuherd.ledger.usage import usage
from gpuherd.web.usage_view import BY, DAYS, Span, file_name, months, span_of, view_of

NOW = datetime(2026, 11, 28, 21, 30).timestamp()
HOUR = 3600.0
MONTH = span_of("2026-11", NOW)


def recorded(name: str, *, uid: int = 1001, **fields: object) -> Recorded:
    return Recorded(use(name, since=fields.pop("since", NOW - 50 * HOUR), uid=uid, **fields), uid)  # type: ignore[arg-type]


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_the_span_without_a_month_is_thirty_days_as_for_the_command() -> None:
    span = span_of("", NOW)
    assert (span.since, span.until) == (NOW - DAYS * 86_400, NOW)
    assert len(view_of([], span, uid=1, reader_uid=1).days) == DAYS + 1


def test_a_month_ends_with_the_next_or_now() -> None:
    assert span_of("2026-11", NOW) == Span("2026-11", datetime(2026, 11, 1).timestamp(), NOW)
    december = span_of("2025-12", NOW)
    assert datetime.fromtimestamp(december.until) == datetime(2026, 1, 1)
    assert months(NOW)[0] == "2026-11"
    assert months(NOW)[-1] == "2024-12"


@pytest.mark.parametrize("month", ["2026-12", "2024-11", "2026-1", "11", "x" * 1000, "2026-11\n", "../..", "9999-99"])
def test_other_months_are_refused(month: str) -> None:
    with pytest.raises(ValueError, match="none of the last") as refused:
        span_of(month, NOW)
    assert len(str(refused.value)) < 100


def test_days_with_23_and_25_hours_are_one_each(new_york: None) -> None:
    now = datetime(2026, 11, 28, 12).timestamp()
    for month, count in (("2026-03", 31), ("2026-11", 28)):
        days = view_of([], span_of(month, now), uid=1, reader_uid=1).days
        assert len(days) == count
        assert len({datetime.fromtimestamp(day.since).date() for day in days}) == count


def test_rows_say_what_is_ones_own() -> None:
    records = [
        recorded("a", uid=7, held_s=3 * HOUR, project="ours", computing_s=1.5 * HOUR, energy_j=7.2e6),
        recorded("b", uid=8, held_s=HOUR, project="ours"),
        recorded("c", uid=8, held_s=6 * HOUR, project="theirs"),
    ]
    view = view_of(records, MONTH, uid=7, reader_uid=7)
    assert [(line.key, line.figures.gpu_hours, line.own_h) for line in view.tables["user"]] == [
        ("8", 7.0, 0.0),
        ("7", 3.0, 3.0),
    ]
    assert {line.key: line.own_h for line in view.tables["project"]} == {"ours": 3.0, "theirs": 0.0}
    mine = view.tables["user"][1].figures
    assert (mine.computing_gpu_hours, mine.idle_gpu_hours, mine.energy_kwh) == (1.5, 1.5, 2.0)
    assert view.tables["user"][0].figures.idle_gpu_hours is None
    assert view.all.own_h == 3.0
    assert view.all.figures.gpu_hours == 10.0
    assert sum(day.total_s for day in view.days) == pytest.approx(10 * HOUR)


_USES = st.lists(
    st.builds(
        lambda uid, ago_h, held_h, share, project: recorded(
            f"{uid}-{ago_h}-{held_h}",
            uid=uid,
            since=NOW - ago_h * HOUR,
            held_s=held_h * HOUR,
            computing_s=held_h * HOUR * share,
            project=project,
        ),
        st.integers(1000, 1004),
        st.integers(1, 900),
        st.integers(0, 100),
        st.floats(0, 1),
        st.sampled_from([None, "thesis", "=cmd|' /C calc'!A0", "<b>"]),
    ),
    max_size=12,
)


@given(_USES, st.sampled_from(["", "2026-11", "2026-10"]))
def test_sums_are_those_of_the_command_and_the_chart_has_them_too(records: list[Recorded], month: str) -> None:
    span = span_of(month, NOW)
    view = view_of(records, span, uid=1000, reader_uid=1000)
    for by in BY:
        of_command = usage(records, by, span.since, span.until, reader_uid=1000)
        assert [(line.key, line.figures, line.share) for line in view.tables[by]] == [
            (row.key, Figures.of(row.total), row.share) for row in of_command.rows
        ]
        assert sum(line.own_h for line in view.tables[by]) == pytest.approx(view.all.own_h)
    assert sum(day.total_s for day in view.days) == pytest.approx(view.sums["user"].total.held_s, abs=1e-3)


@given(_USES)
def test_the_file_has_the_figures_and_no_formulas(records: list[Recorded]) -> None:
    view = view_of(records, MONTH, uid=1000, reader_uid=1000)
    rows = list(csv.DictReader(io.StringIO(csv_of(view.sums["project"], "project"))))
    assert len(rows) == len(view.tables["project"])
    for row, line in zip(rows, view.tables["project"], strict=True):
        assert row["project"].removeprefix("'") == line.key
        assert row["project"][:1] not in ("=", "+", "-", "@")
        assert float(row["gpu_hours"]) == line.figures.gpu_hours


def test_the_name_of_the_file_is_plain() -> None:
    assert file_name(MONTH, "gpu") == "gpuherd-usage-2026-11-by-gpu.csv"
    assert file_name(span_of("", NOW), "user") == "gpuherd-usage-2026-11-28-by-user.csv"
    assert os.sep not in file_name(span_of("", NOW), "user")
