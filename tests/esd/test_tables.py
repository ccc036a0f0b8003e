"""The tables at the end of a run and of a dry run: readable in 80 columns, safe with any text."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gpuherd.esd.plan import PlanLine, format_size, print_plan
from gpuherd.esd.summary import FailureLine, ModelSummary, format_duration, format_figure, print_summary
from gpuherd.runs.console import track


def console(width: int = 80) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width), out


def line(
    model: str = "org/a", seconds: float | None = 41.2, gpus: tuple[str, ...] = ("0",), **changes: object
) -> ModelSummary:
    figures = {"layers": 72, "layers_without_fit": 0, "alpha_mean": 4.005, "alpha_min": 2.1, "alpha_max": 12.9}
    return ModelSummary(Path("a.csv"), {"model_id": model}, figures | changes, {}, seconds=seconds, gpus=gpus)


def test_a_summary() -> None:
    screen, out = console()
    done = [line(), line("org/b", None, (), layers_without_fit=3, alpha_mean=None)]
    failures = [FailureLine("org/c", "[bold]why[/bold]"), FailureLine("m.csv: row 4", "no base", refused=True)]
    print_summary(screen, done, failures, [("results", "/a/b"), ("logs", "/a/logs")], "2 done, 1 failed")
    text = out.getvalue()
    assert "org/a" in text
    assert "72 of 75" in text
    assert "4.005" in text
    assert "CPU" in text
    assert "failed   org/c: [bold]why[/bold]" in text
    assert "refused  m.csv: row 4: no base" in text
    assert "results  /a/b\nlogs     /a/logs\n" in text
    assert max(map(len, text.splitlines())) <= 80


def test_long_lists_are_cut_with_a_note() -> None:
    screen, out = console()
    print_summary(
        screen, [line(f"org/{n}") for n in range(100)], [FailureLine(f"f{n}", "x") for n in range(50)], [], ""
    )
    assert "and 40 more models" in out.getvalue()
    assert "and 30 more" in out.getvalue()


@given(st.text(max_size=200))
def test_any_name_fits_in_80_columns(name: str) -> None:
    screen, out = console()
    print_summary(screen, [line(name.replace("\r", ""))], [], [], "")
    assert "72" in out.getvalue()


def test_a_plan() -> None:
    screen, out = console()
    known = PlanLine("org/a", "lora", "org/b", 3 * 2**20, 42, 0.7, 1, "to do")
    lines = [known, PlanLine("org/c", "", None, None, None, None, 1, "done")]
    print_plan(screen, lines, ["m.csv: row 9: unknown relation 'cousin'"], "1 to do")
    text = out.getvalue()
    assert "3.0 MB" in text
    assert "42" in text and "70.0%" in text
    assert "refused  m.csv: row 9: unknown relation 'cousin'" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_plan_has_a_line_a_model_on_a_terminal_and_all_of_it_in_a_pipe() -> None:
    name = "an-organisation/a-model-of-a-very-long-name-indeed-8B-Instruct-v0.1"
    lines = [PlanLine(name, "adapter", "b" * 400, None, None, None, 1, "to do")] * 30
    out = io.StringIO()
    print_plan(Console(file=out, width=80, force_terminal=True, color_system=None), lines, [], "30 to do")
    told = out.getvalue().splitlines()
    assert told[1:31] == [f"{name}     -  to do"] * 30
    assert max(map(len, told)) <= 80
    assert "no room for relation, matrices, of weights, GPUs, base" in out.getvalue()
    screen, out = console()
    print_plan(screen, lines, [], "30 to do")
    assert out.getvalue().splitlines()[1].endswith("b" * 400)


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KB"), (150 * 2**30, "150 GB"), (2**42, "4.0 TB")],
)
def test_sizes(nbytes: int | None, told: str) -> None:
    assert format_size(nbytes) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(None, "-"), (0.84, "0.8 s"), (41.2, "41 s"), (59.7, "1:00 min"), (200, "3:20 min"), (7500, "2:05 h")],
)
def test_durations(seconds: float | None, told: str) -> None:
    assert format_duration(seconds) == told


def test_a_missing_figure_is_a_dash() -> None:
    assert format_figure(None) == "-"
    assert format_figure(-0.5) == "-0.500"


@pytest.mark.parametrize(("step", "shown"), [(0.1, False), (1.0, True)])
def test_a_bar_is_shown_for_slow_work_only(step: float, shown: bool) -> None:
    out = io.StringIO()
    screen = Console(file=out, width=80, force_terminal=True)
    times = itertools.count(0, step)
    assert list(track(screen, range(5), "looking", lambda: next(times))) == list(range(5))
    assert ("looking" in out.getvalue()) == shown
