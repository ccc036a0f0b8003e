"""What a follower reads of the nodes' files, and what it clears away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuherd.jobs.handover import folder as module
from gpuherd.jobs.handover.folder import Folder
from gpuherd.jobs.handover.followed import Followed
from gpuherd.jobs.handover.reports import Claim, Ended, read_ended, take, write_ended
from gpuherd.jobs.job import Job
from gpuherd.jobs.records import AttemptRecord, Handed, QueuedJob
from gpuherd.jobs.rundir import RunDirectory

TAG, OTHER = "0123456789ab.17", "0123456789ab.18"


def followed(run: RunDirectory, number: int) -> Followed:
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
    return Followed(record, handed, run.attempt_progress(number))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path)
    made.handover.mkdir()
    return made


def test_no_file_is_asked_for_that_is_not_there(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a network each such question is waited for, and of a thousand jobs that run none has an end."""
    asked: list[str] = []

    def reading(path: Path) -> Ended | None:
        asked.append(path.name)
        return read_ended(path)

    monkeypatch.setattr(module, "read_ended", reading)
    out = {number: followed(run, number) for number in range(1, 6)}
    for number in out:
        assert take(run.attempt_claim(number), Claim(at=1.0, node="n1"))
    watch = Folder(run)
    assert len(watch.look(out, 0.0)) == 5 and asked == []
    write_ended(run.attempt_ended(3), Ended(at=2.0, ran_s=1.0, code=0))
    assert watch.look(out, 0.0) == [out[3]] and asked == ["00000003.ended"]
    assert watch.look(out, 0.0) == [] and len(asked) == 1


def test_what_is_cleared_away(run: RunDirectory) -> None:
    ours, gone, strange = f"gpuherd-{TAG}-7", f"gpuherd-{TAG}-70", f"gpuherd-{OTHER}-7"
    old = [
        *("engine.json", f"{ours}.json", f"{ours}.0.out", f"{ours}+1000.sh", "00000007.claim", "00000008.claim"),
        *(f"{gone}.json", f"{gone}.sh", "00000070.claim", ".00000070.claim.1.ab.tmp", f"{gone}.0.out"),
    ]
    fresh = [f"gpuherd-{TAG}-80.json", "00000080.claim", f"{strange}.json", "00000090.claim"]
    for name in [*old, *fresh]:
        (run.handover / name).write_text("x")
    for name in old:
        os.utime(run.handover / name, (1000.0, 1000.0))
    watch = Folder(run)
    assert watch.highest() == 90
    watch.opened(ours, (7, 8), (8,))
    watch.sweep((run.handover / "00000090.claim").stat().st_mtime, lambda batch: batch.startswith(f"gpuherd-{TAG}-"))
    # All of what is out stays; of the rest what is new, but nothing by which a leader of another queue could begin.
    kept = {*old[:6], f"{gone}.0.out", *fresh} - {f"{strange}.json"}
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
    watch = Folder(run)
    watch.opened(batch, (1, 2), (1, 2))
    for number in (1, 2):
        watch.closed(batch, number)
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
    assert Folder(run).highest() == 71


def test_the_highest_number_of_no_folder(tmp_path: Path) -> None:
    assert Folder(RunDirectory(tmp_path)).highest() == 0
