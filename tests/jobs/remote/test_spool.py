"""What a follower reads of the nodes' files, and what it clears away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuherd.engines.base import Phase, Sighting
from gpuherd.jobs import clock
from gpuherd.jobs.job import Job
from gpuherd.jobs.records import AttemptRecord, Handed, QueuedJob
from gpuherd.jobs.remote import spool as module
from gpuherd.jobs.remote.outcome import RemoteAttempt
from gpuherd.jobs.remote.protocol import Claim, EndReport, read_ended, take, write_ended
from gpuherd.jobs.remote.spool import Spool
from gpuherd.jobs.run_dir import RunDirectory

TAG, OTHER = "0123456789ab.17", "0123456789ab.18"


def followed(run: RunDirectory, number: int) -> RemoteAttempt:
    queued = QueuedJob(
        id=number,
        job=Job(name=f"j{number}", argv=("true",)),
        tries=0,
        attempts=0,
        not_before=0.0,
        avoid=frozenset(),
        ready_at=0.0,
    )
    handed = Handed("slurm", f"gpuherd-{TAG}-1", number - 1)
    record = AttemptRecord(
        id=number,
        queued=queued,
        number=1,
        gpus=(),
        labels=(),
        process=None,
        handed=handed,
        log="",
        started_at=0.0,
        started_mono=0.0,
    )
    return RemoteAttempt(record, handed)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path)
    made.handover.mkdir()
    return made


def test_no_file_is_asked_for_that_is_not_there(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a network each such question is waited for, and of a thousand jobs that run none has an end."""
    asked: list[str] = []

    def reading(path: Path) -> EndReport | None:
        asked.append(path.name)
        return read_ended(path)

    monkeypatch.setattr(module, "read_ended", reading)
    out = {number: followed(run, number) for number in range(1, 6)}
    for number in out:
        assert take(run.attempt_claim(number), Claim(at=1.0, node="n1"))
    watch = Spool(run)
    assert len(watch.look(out, 0.0)) == 5 and asked == []
    write_ended(run.attempt_ended(3), EndReport(at=2.0, ran_s=1.0, code=0))
    assert watch.look(out, 0.0) == [out[3]] and asked == ["00000003.ended"]
    assert watch.look(out, 0.0) == [] and len(asked) == 1


def test_what_is_cleared_away(run: RunDirectory) -> None:
    ours, gone, strange = f"gpuherd-{TAG}-7", f"gpuherd-{TAG}-70", f"gpuherd-{OTHER}-7"
    old = [
        *("engine.json", "gone.json", f"{ours}.json", f"{ours}.0.out", f"{ours}+1000.sh"),
        *("00000007.claim", "00000008.claim"),
        *(f"{gone}.json", f"{gone}.sh", "00000070.claim", ".00000070.claim.1.ab.tmp", f"{gone}.0.out"),
    ]
    fresh = [f"gpuherd-{TAG}-80.json", "00000080.claim", f"{strange}.json", "00000090.claim"]
    for name in [*old, *fresh]:
        (run.handover / name).write_text("x")
    for name in old:
        os.utime(run.handover / name, (1000.0, 1000.0))
    watch = Spool(run)
    assert watch.highest() == 90
    watch.opened(ours, (7, 8))
    watch.sweep((run.handover / "00000090.claim").stat().st_mtime, lambda batch: batch.startswith(f"gpuherd-{TAG}-"))
    # All of what is out stays; of the rest what is new, but nothing by which a leader of another queue could begin.
    kept = {*old[:7], f"{gone}.0.out", *fresh} - {f"{strange}.json"}
    assert {path.name for path in run.handover.iterdir()} == kept


def test_no_claim_goes_before_what_a_leader_begins_by(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that can't be removed, as over a network: without the claims all of its attempts could begin again."""
    batch = f"gpuherd-{TAG}-1"
    (run.handover / f"{batch}.json").write_text("x")
    for number in (1, 2):
        assert take(run.attempt_claim(number), Claim(at=1.0))
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".json":
            raise OSError(5, "Input/output error")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    watch = Spool(run)
    watch.opened(batch, (1, 2))
    watch.tidy({2})
    watch.tidy(set())
    later = (run.handover / "00000002.claim").stat().st_mtime + 1e6
    watch.sweep(later, lambda _: True)
    assert {path.name for path in run.handover.iterdir()} == {f"{batch}.json", "00000001.claim", "00000002.claim"}
    monkeypatch.setattr(Path, "unlink", unlink)
    watch.sweep(later, lambda _: True)
    assert list(run.handover.iterdir()) == []


def test_the_number_of_a_batch_is_taken_too(run: RunDirectory) -> None:
    """Also where none of its attempts has begun."""
    (run.handover / f"gpuherd-{OTHER}-71.sh").touch()
    (run.handover / "00000070.claim").touch()
    assert Spool(run).highest() == 71


def test_the_highest_number_of_no_folder(tmp_path: Path) -> None:
    assert Spool(RunDirectory(tmp_path)).highest() == 0


def test_the_report_of_a_success_stays_for_as_long_as_one_that_follows_is_out(run: RunDirectory) -> None:
    """It is what that one's leader begins by, also after another follower has taken over."""
    for watch in (Spool(run), Spool(run)):
        write_ended(run.attempt_ended(1), EndReport(at=2.0, ran_s=1.0, code=0))
        watch.opened("first", [1])
        watch.opened("second", [2], after=[1])
        watch.opened("third", [3], after=[2])
        watch.tidy({2, 3})
        assert run.attempt_ended(1).exists()
    again = Spool(run)
    again.opened("first", [1])
    again.opened("second", [2], after=[1])
    again.opened("third", [3], after=[2])
    os.utime(run.attempt_ended(1), (0.0, 0.0))
    again.sweep(1e9, lambda _: True)
    assert run.attempt_ended(1).exists()
    write_ended(run.attempt_ended(2), EndReport(at=2.0, ran_s=1.0, code=0))
    again.tidy({3})
    assert (run.attempt_ended(1).exists(), run.attempt_ended(2).exists()) == (False, True)
    again.tidy(set())
    assert not run.attempt_ended(2).exists()


class Clocks:
    """Both clocks, as a test sets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.wall, self.mono, self.boot = 10_000.0, 500.0, "first"
        monkeypatch.setattr(clock, "wall", lambda: self.wall)
        monkeypatch.setattr(clock, "mono", lambda: self.mono)
        monkeypatch.setattr(module, "boot_id", lambda: self.boot)

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.mono += seconds


def a_look(run: RunDirectory, clocks: Clocks, sighting: Sighting | None = None) -> bool:
    """A follower that looks once and is killed; whether its patience of 15 s is at an end then."""
    each = followed(run, 1)
    folder = Spool(run)
    folder.recall_gone({1: each})
    assert not each.is_late(clocks.mono, 15.0)  # the engine has not been heard yet
    each.seen(sighting, clocks.mono, clocks.mono)
    folder.keep_gone([each])
    return each.is_late(clocks.mono, 15.0)


def test_patience_goes_on_with_the_next_follower(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    late = []
    for _ in range(4):
        late.append(a_look(run, clocks))
        clocks.pass_by(5.0)
    assert late == [False, False, False, True]


def test_patience_begins_anew_when_the_engine_has_it_again(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    for sighting in (None, None, Sighting(handle="1", phase=Phase.RUNNING), None, None, None):
        assert not a_look(run, clocks, sighting)
        clocks.pass_by(7.0)
    assert a_look(run, clocks)


def test_a_clock_that_is_set_costs_no_attempt_its_patience(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    for step in (3600.0, -7200.0, 3600.0, 0.0):
        assert not a_look(run, clocks)
        clocks.wall += step
    clocks.pass_by(15.0)
    assert a_look(run, clocks)


@pytest.mark.parametrize("back_s", [0.0, 3600.0])
def test_patience_outlives_a_reboot(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, back_s: float) -> None:
    """Also where the clock was set back meanwhile: it is then waited once more, and not for ever."""
    clocks = Clocks(monkeypatch)
    assert not any(a_look(run, clocks) for _ in range(3))
    clocks.pass_by(8.0)
    clocks.boot, clocks.mono, clocks.wall = "second", 20.0, clocks.wall - back_s
    assert not a_look(run, clocks)
    clocks.pass_by(8.0)
    assert a_look(run, clocks) is (back_s == 0)
    clocks.pass_by(8.0)
    assert a_look(run, clocks)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"boot": "first", "attempts": [1]}', '{"boot": "first", "attempts": {"1": [1e999, 0, 3]}}',
     '{"boot": "first", "attempts": {"1": [0, 0, 99]}}', '{"boot": 1, "attempts": {"1": ["a", null, 3]}}'],
)  # fmt: skip
def test_a_file_that_can_not_be_right_is_none(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    clocks = Clocks(monkeypatch)
    run.gone.write_text(text)
    assert not a_look(run, clocks)
