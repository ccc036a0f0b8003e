"""What people see: counts, progress, reasons; and nothing of a job's text that a terminal would obey."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.jobs.attempts import running_job

from gpuherd.engines.progress import Progress
from gpuherd.jobs.monitor.display import LineDisplay, cells, display, render, summary
from gpuherd.jobs.records import Counts, Event, EventKind, RunSnapshot

HOSTILE = "org/[bold]m\x1b[2J\x1b]0;x\x07\nodel"
PROGRESS = Progress(3, 12, "h.3\x1b[31m[red]")
LINE = running_job(HOSTILE, ("0", "3:1"), run_s=61.0, progress=PROGRESS, eta_s=183.0)
WAITS = "next waits: GPU 1: alice runs python (pid 4711, 900 MB)"
SNAPSHOT = RunSnapshot(Counts(3, 2, 4, 1, 0), (LINE,), WAITS, 125.0, paused=1)


def drawn(width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(render(SNAPSHOT))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_summary() -> None:
    assert summary(SNAPSHOT) == (
        "4 of 10 done, 1 failed, 2 running, 3 waiting, 1 paused, about 2 min 5 s left; "
        "next waits: GPU 1: alice runs python (pid 4711, 900 MB)"
    )
    assert summary(RunSnapshot(Counts(done=2), (), None, 0.0)) == "2 of 2 done, 0 running, 0 waiting"


def test_a_running_job() -> None:
    where, title, done, rest = cells(LINE)
    assert (where, title) == ("GPU 0,3:1", "org/[bold]m odel")
    assert done.endswith(" 3/12") and done.count("━") == 5
    assert rest == "h.3[red], 3 min 3 s left"
    assert cells(running_job("t", run_s=5.0)) == ("CPU", "t", "", "for 5 s")
    assert cells(running_job("t", run_s=5.0, paused=True)) == ("CPU", "t", "", "paused")
    assert cells(running_job("t", run_s=5.0, progress=Progress(7)))[2] == "7 done"


def test_what_is_next_has_a_line_of_its_own_also_on_a_narrow_terminal() -> None:
    lines = drawn(60).splitlines()
    assert lines[-2].startswith("4 of 10 done, 1 failed, 2 running, 3 waiting, 1 paused")
    assert lines[-1].startswith("next waits: GPU 1: alice runs python (pid 4711")
    assert all(len(line) <= 60 for line in lines)


@pytest.mark.parametrize("running", [1, 21, 22, 100])
def test_the_counts_are_there_however_many_jobs_run(running: int) -> None:
    """On a screen of 24 lines."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(render(replace(SNAPSHOT, running=(LINE,) * running), height=24))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) < 24
    assert lines[-2].startswith("4 of 10 done") and lines[-1].startswith("next waits")
    more = [int(line.split()[1]) for line in lines if line.startswith("and ")]
    assert sum("GPU 0,3:1" in line for line in lines) + sum(more) == running
    assert bool(more) == (running > 21)


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_picture_fits_and_escapes(width: int) -> None:
    text = drawn(width)
    assert "\x1b[2J" not in text and "\x07" not in text
    assert "[bold]" in drawn(200)
    assert all(len(line) <= width for line in text.splitlines())


def test_plain_lines_when_it_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=40)
    event = Event(kind=EventKind.FAILED, at=0.0, text=f"{HOSTILE}: failed [red]" + "x" * 100)
    with display(console, plain_every_s=0.0) as shown:
        assert isinstance(shown, LineDisplay)
        shown.event(event)
        shown.snapshot(SNAPSHOT)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines == ["org/[bold]m odel: failed [red]" + "x" * 100, summary(SNAPSHOT)]


def test_counts_come_only_now_and_then() -> None:
    console = Console(file=io.StringIO(), width=40)
    shown = LineDisplay(console, 3600.0)
    shown.snapshot(SNAPSHOT)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_on_a_terminal_failures_scroll_and_starts_do_not() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with display(console) as shown:
        shown.event(Event(kind=EventKind.STARTED, at=0.0, text="a: started"))
        shown.event(Event(kind=EventKind.FAILED, at=0.0, text="b: failed"))
        shown.snapshot(SNAPSHOT)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "b: failed" in text and "4 of 10 done" in text
    assert "a: started" not in text


def test_an_encoding_without_an_arrow_ends_no_run_that_shows_one() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, "latin-1"), width=200)
    with display(console, plain_every_s=0.0) as shown:
        shown.event(Event(kind=EventKind.FAILED, at=0.0, text="a: failed: \u2192 \u00e4"))
        shown.event(Event(kind=EventKind.DONE, at=0.0, text="b: done"))
    console.file.flush()
    assert raw.getvalue().decode("latin-1") == "a: failed: \\u2192 \u00e4\nb: done\n"
