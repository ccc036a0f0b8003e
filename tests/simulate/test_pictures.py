"""The timeline and the SVG: what stands where."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from random import Random

import pytest

from gpuherd.jobs.job import Job
from gpuherd.simulate.charts import WIDTH, Panel, gantt, rows, shares, timeline
from gpuherd.simulate.engine import Simulation
from gpuherd.simulate.options import Rules
from gpuherd.simulate.results import Ending, FinishedAttempt, History, Visit
from gpuherd.simulate.workload import Background, Mix, Recipe, Trial, Work, drawn, machine, machines, spread

SVG = "{http://www.w3.org/2000/svg}"


def history(*attempts: FinishedAttempt, visits: tuple[Visit, ...] = (), gpus: tuple[int, ...] = (2,)) -> History:
    return History(gpus, attempts, visits, done=len(attempts), failed=0, cancelled=0, refused={})


def ran(job: int, gpu: int, start: float, end: float, **more: object) -> FinishedAttempt:
    return FinishedAttempt(job, (gpu,), start, end, 0.0, Ending.DONE, **more)  # type: ignore[arg-type]


def work(name: str) -> Work:
    return Work(Job(name=name, argv=("x",)), (Trial(1.0),))


def test_a_line_for_each_gpu_filled_where_jobs_ran() -> None:
    drawn_lines = timeline(history(ran(0, 0, 0, 100), ran(1, 1, 50, 100), visits=(Visit(1, 0, 50),))).splitlines()
    first, second = (line.removeprefix(f"GPU {gpu} ") for gpu, line in enumerate(drawn_lines[:2]))
    assert set(first) == {"█"}
    assert set(second[:36]) == {"░"} and set(second[37:]) == {"█"}
    assert drawn_lines[2].split() == ["0", "50", "s", "1.67", "min"]


def test_every_line_fits_into_80_columns() -> None:
    works = drawn(500, Recipe(seconds=spread("lognormal:300,1")), Random(0))
    for where in (machine("8x80GB"), machines("40x8x80GB"), machine("100x80GB"), machines("1000x80GB,2x4x24GB")):
        told = Simulation(where, works, Rules(), Background(0.3)).run()
        for unicode in (True, False):
            lines = timeline(told, unicode=unicode).splitlines()
            assert max(map(len, lines)) <= 80
            assert len(lines) <= 18
            assert unicode or "".join(lines).isascii()


def test_rows_hold_every_gpu_once() -> None:
    for gpus in ((8,), (16,), (17,), (8,) * 125, (1,) * 1000, (4, 8, 2) * 11):
        found = rows(history(ran(0, 0, 0, 1), gpus=gpus))
        assert [row.first for row in found] == [0, *(row.last + 1 for row in found[:-1])]
        assert found[-1].last == sum(gpus) - 1
        assert len(found) <= 16


def test_shares_come_to_the_time_that_was_used() -> None:
    told = history(ran(0, 0, 0, 60), ran(1, 1, 30, 90), visits=(Visit(0, 70, 90),))
    ours, others = shares(told, rows(told), 7)
    assert sum(map(sum, ours)) * 90 / 7 == pytest.approx(120)
    assert sum(map(sum, others)) * 90 / 7 == pytest.approx(20)


def test_nothing_ran_is_said() -> None:
    assert timeline(history()) == "nothing ran"


def bars(svg: str) -> list[tuple[float, float, float, float, str]]:
    """x, y, width, height and tip of every bar."""
    found = []
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        tip = rect.find(f"{SVG}title")
        if tip is not None:
            x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
            found.append((x, y, width, height, tip.text or ""))
    return found


def test_a_bar_for_each_attempt_in_its_row_and_at_its_time() -> None:
    told = history(ran(0, 0, 0, 50), ran(1, 0, 50, 100), ran(2, 1, 25, 75))
    found = bars(gantt([Panel("", "", told)], [work("a"), work("b"), work("c")], title="three"))
    (ax, ay, awidth, _, _), (bx, by, bwidth, _, _), (cx, cy, cwidth, _, tip) = found
    assert (ay, by) == (ay, ay) and cy == pytest.approx(ay + 16)
    assert awidth == pytest.approx(bwidth) == pytest.approx(cwidth)
    assert bx == pytest.approx(ax + awidth) and cx == pytest.approx(ax + awidth / 2)
    assert tip == "c: 25 s to 1.25 min, done"
    assert bx + bwidth <= WIDTH


def test_bars_of_jobs_that_share_a_gpu_do_not_cover_each_other() -> None:
    told = history(*(ran(job, 0, job, 10 + job, shared=True) for job in range(3)), gpus=(1,))
    found = bars(gantt([Panel("", "", told)], [work("a"), work("b"), work("c")], title="shared"))
    spans = sorted((y, y + height) for _, y, _, height, _ in found)
    assert all(one[1] <= after[0] + 0.01 for one, after in pairwise(spans))


def test_panels_stand_below_each_other_on_one_scale_of_time() -> None:
    quick, slow = history(ran(0, 0, 0, 50)), history(ran(0, 0, 0, 100))
    (_, y1, width1, _, _), (_, y2, width2, _, _) = bars(
        gantt([Panel("quick", "", quick), Panel("slow", "", slow)], [work("a")], title="two")
    )
    assert width2 == pytest.approx(2 * width1)
    assert y2 > y1 + 2 * 16


def test_hostile_names_stay_text() -> None:
    names = ["</title><script>alert(1)</script>", "a\x00b\x1b[31m&amp;", "\u202edesrever", "x" * 5000]
    told = history(*(ran(job, 0, job, job + 1) for job in range(len(names))))
    svg = gantt([Panel("<b>&", "]]>", told)], [work(name.replace("\x00", "\x01")) for name in names], title="<&>")
    root = ElementTree.fromstring(svg)
    assert not list(root.iter(f"{SVG}script"))
    assert all(len(tip) < 400 for *_, tip in bars(svg))


def test_a_cluster_is_drawn_small() -> None:
    works = drawn(3000, Recipe(seconds=spread("exponential:300"), gpus=Mix((1, 8), (9.0, 1.0))), Random(0))
    told = Simulation(machines("125x8x80GB"), works, Rules(), Background(0.3)).run()
    svg = gantt([Panel("", "", told)], works, title="a cluster")
    height = float(ElementTree.fromstring(svg).attrib["height"])
    assert height < 1300
    assert len(svg) < 4_000_000
