"""What squeue and sacct 22.05 really printed, and what nobody should believe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.engines.base import End, Phase
from gpuherd.engines.batch_system import job_number
from gpuherd.engines.slurm.commands import SLURM, SlurmJobRow, first_node
from gpuherd.engines.slurm.commands import read_sacct as sacct
from gpuherd.engines.slurm.commands import read_squeue as squeue

RECORDED = Path(__file__).parent / "recorded"


def test_squeue_as_recorded() -> None:
    rows = {row.name: row for row in squeue((RECORDED / "squeue.txt").read_text()) if row.name != "arr"}
    seen = {name: (row.sighting(0).phase, row.sighting(0).end, row.sighting(0).reason) for name, row in rows.items()}
    assert seen == {
        "partition-limit": (Phase.WAITING, None, "PartitionTimeLimit"),
        "dep": (Phase.ENDED, End.NEVER, "DependencyNeverSatisfied"),
        "dep2": (Phase.ENDED, End.NEVER, "DependencyNeverSatisfied"),
        "canc": (Phase.ENDED, End.CANCELLED, None),
        "env": (Phase.ENDED, End.OK, None),
        "bad": (Phase.ENDED, End.FAILED, "NonZeroExitCode"),
        "big": (Phase.ENDED, End.FAILED, "BadConstraints"),
        "held": (Phase.WAITING, None, "JobHeldUser"),
        "pre": (Phase.ENDED, End.PREEMPTED, None),
        "ending": (Phase.RUNNING, None, "completing"),
        "stopped": (Phase.RUNNING, None, "suspended: JobHeldAdmin"),
    }
    assert rows["bad"].node == "n1"
    assert rows["held"].node is None


def test_an_array_is_told_in_one_line_while_it_waits_and_in_one_each_then() -> None:
    rows = [row for row in squeue((RECORDED / "squeue.txt").read_text()) if row.name == "arr"]
    states = {place: [row.state for row in rows if row.speaks_of(place)] for place in range(11)}
    assert states == {
        **{place: ["COMPLETED"] for place in range(4)},
        4: ["RUNNING"],
        5: ["RUNNING"],
        **{place: ["PENDING"] for place in range(6, 10)},
        10: [],
    }
    waiting = next(row for row in rows if row.state == "PENDING")
    assert waiting.sighting(7).handle == "2_7"
    assert waiting.sighting(7).reason == "JobArrayTaskLimit"


def test_sacct_as_recorded() -> None:
    rows = {
        row.handle(row.places[0][0] if row.places else 0): row for row in sacct((RECORDED / "sacct.txt").read_text())
    }
    ends = {handle: row.end for handle, row in rows.items()}
    assert ends == {
        "1": End.OK,
        "3": End.FAILED,
        "4": End.NEVER,
        "6": None,
        "7": End.CANCELLED,
        "25": End.PREEMPTED,
        "28_3": End.OK,
        "28_4": None,
        "31": End.CANCELLED,
    }
    assert (rows["7"].by, rows["31"].by) == (0, 65534)
    assert rows["28_4"].speaks_of(9)
    assert not rows["28_4"].speaks_of(3)


def test_who_waits_for_another_and_is_cancelled_by_somebody_was_cancelled() -> None:
    (row,) = sacct("9|CANCELLED by 1001|None assigned|Dependency|x")
    assert row.sighting(0, by="eve").end is End.CANCELLED
    assert row.sighting(0, by="eve").by == "eve"


@pytest.mark.parametrize(
    ("state", "phase", "end"),
    [
        ("PENDING", Phase.WAITING, None),
        ("CONFIGURING", Phase.WAITING, None),
        ("REQUEUED", Phase.WAITING, None),
        ("REQUEUE_HOLD", Phase.WAITING, None),
        ("SPECIAL_EXIT", Phase.WAITING, None),
        ("REVOKED", Phase.WAITING, None),
        ("RUNNING", Phase.RUNNING, None),
        ("COMPLETING", Phase.RUNNING, None),
        ("SUSPENDED", Phase.RUNNING, None),
        ("STAGE_OUT", Phase.RUNNING, None),
        ("A_STATE_OF_SLURM_30", Phase.RUNNING, None),
        ("COMPLETED", Phase.ENDED, End.OK),
        ("FAILED", Phase.ENDED, End.FAILED),
        ("DEADLINE", Phase.ENDED, End.FAILED),
        ("TIMEOUT", Phase.ENDED, End.TIME_UP),
        ("PREEMPTED", Phase.ENDED, End.PREEMPTED),
        ("NODE_FAIL", Phase.ENDED, End.NODE_LOST),
        ("BOOT_FAIL", Phase.ENDED, End.NODE_LOST),
        ("OUT_OF_MEMORY", Phase.ENDED, End.OUT_OF_MEMORY),
        ("CANCELLED", Phase.ENDED, End.CANCELLED),
    ],
)
def test_each_state_means_something(state: str, phase: Phase, end: End | None) -> None:
    (queued,) = squeue(f"5|N/A|{state}|n1|x|None")
    (recorded,) = sacct(f"5|{state}|n1|None|x")
    for row in (queued, recorded):
        assert (row.sighting(0).phase, row.sighting(0).end) == (phase, end)


def test_a_reason_with_bars_and_terminal_codes_is_one_printable_line() -> None:
    (row,) = squeue("5|N/A|PENDING|n\x1b[2J|x|ReqNodeNotAvail, UnavailableNodes:n[1|2]\x1b[31m")
    assert row.reason == "ReqNodeNotAvail, UnavailableNodes:n[1|2]\\x1b[31m"
    assert row.node == "n\\x1b[2J"


@given(st.text(), st.text())
def test_nothing_that_is_printed_breaks_it(text: str, more: str) -> None:
    for line in (
        text,
        f"5|{text}|RUNNING|{more}|x|y",
        f"5_[{text}]|FAILED by {more}|n1|x|y",
        f"{text}|1|PENDING|n|{more}|r",
    ):
        for row in (*squeue(line), *sacct(line)):
            assert row.job.isdigit()
            assert (row.node or "").isprintable()
            assert (row.reason or "").isprintable()
            row.speaks_of(10**12)


def test_a_range_of_a_million_costs_nothing() -> None:
    (row,) = squeue("5|0-4000000:2%1|PENDING|n/a|x|Priority")
    assert row.speaks_of(3_999_998)
    assert not row.speaks_of(3)


@given(st.sets(st.tuples(st.integers(1, 3), st.integers(0, 40)), max_size=60), st.integers(1, 10))
def test_handles_in_short_lists_are_the_same_handles(handles: set[tuple[int, int]], most: int) -> None:
    words = [f"{job}_{place}" for job, place in handles]
    found = []
    for part in SLURM.short_lists([*words, "9"], most):
        named = [match for word in part for match in _spelled_out(word)]
        assert 1 <= len(named) <= most
        found += named
    assert sorted(found) == sorted([*words, "9"])


def _spelled_out(word: str) -> list[str]:
    job, mark, places = word.partition("_")
    if not mark:
        return [job]
    found = []
    for part in re.findall(r"[\d-]+", places):
        low, _, high = part.partition("-")
        found += [f"{job}_{place}" for place in range(int(low), int(high or low) + 1)]
    return found


@pytest.mark.parametrize(
    ("printed", "number"),
    [
        ("12\n", "12"),
        ("12;other\n", "12"),
        ("sbatch: a greeting\n12\n", "12"),
        ("", None),
        ("Submitted batch job 12", None),
    ],
)
def test_the_number_that_sbatch_prints(printed: str, number: str | None) -> None:
    assert job_number(printed) == number


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n[08-11,20],gpu3", "n08"), ("a,b", "a"), ("r[1-2]-n7,x", "r1-n7"), ("", "")]
)
def test_the_first_of_several_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_a_handle_taken_apart() -> None:
    assert SLURM.parts("12_7") == ("12", 7)
    assert SLURM.parts("12") == ("12", 0)


def test_one_row_speaks_only_of_its_own() -> None:
    whole = SlurmJobRow(job="1", places=None, state="RUNNING", name="x")
    assert whole.is_job and not whole.speaks_of(0) and (whole.handle(0), whole.handle(3)) == ("1", "1_3")
    assert not SlurmJobRow(job="1", places=None, state="RUNNING", name="x").speaks_of(1)
