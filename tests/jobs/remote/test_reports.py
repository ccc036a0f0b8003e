"""The files by which nodes tell: made once, whole, and read by somebody who may see them late."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.jobs.remote.protocol import (
    Claim,
    EndReport,
    create_exclusive,
    present,
    read_claim,
    read_ended,
    take,
    write_ended,
)

_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
_SECONDS = st.floats(0, 1e10)
CLAIMS = st.builds(
    Claim, at=_SECONDS, void=st.booleans(), node=_TEXT, handle=st.none() | _TEXT, gpus=st.lists(_TEXT).map(tuple)
)
ENDS = st.builds(
    EndReport,
    at=_SECONDS,
    ran_s=_SECONDS,
    started=st.booleans(),
    problem=st.none() | _TEXT,
    code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 64),
    has_result=st.booleans(),
    limit=st.none() | _TEXT,
    stage=st.none() | _TEXT,
    interrupted=st.booleans(),
    peak_mb=st.none() | st.integers(0, 10**6),
)


@given(CLAIMS, CLAIMS)
def test_claim_is_made_once(tmp_path_factory: pytest.TempPathFactory, first: Claim, second: Claim) -> None:
    """The first stays, and nothing else does."""
    folder = tmp_path_factory.mktemp("claims")
    path = folder / "00000001.claim"
    assert read_claim(path) is None
    assert take(path, first)
    assert not take(path, second)
    assert read_claim(path) == first
    assert present(folder) == {path.name}


@given(ENDS)
def test_end_as_it_was_told(tmp_path_factory: pytest.TempPathFactory, ended: EndReport) -> None:
    path = tmp_path_factory.mktemp("ends") / "00000001.ended"
    assert read_ended(path) is None
    write_ended(path, ended)
    assert read_ended(path) == ended


# Fifty processes that begin together, made by fork from one without threads.
_RACE = """
import json, os, sys
from pathlib import Path
from gpuherd.jobs.remote.protocol import Claim, take
folder = Path(sys.argv[1])
gate, opener = os.pipe()
for racer in range(50):
    if os.fork() == 0:
        os.close(opener)
        os.read(gate, 1)
        won = [i for i in range(20) if take(folder / "claims" / f"{i:08d}.claim", Claim(at=1.0, pid=racer))]
        (folder / f"{racer}.won").write_text(json.dumps(won))
        os._exit(0)
os.close(opener)
for _ in range(50):
    assert os.wait()[1] == 0
"""


def test_one_of_many_processes_wins(tmp_path: Path) -> None:
    """Each attempt has one leader, and its claim is that one's, whole."""
    (tmp_path / "claims").mkdir()
    subprocess.run([sys.executable, "-c", _RACE, str(tmp_path)], check=True)
    won = {racer: json.loads((tmp_path / f"{racer}.won").read_text()) for racer in range(50)}
    for attempt in range(20):
        winners = [racer for racer, attempts in won.items() if attempt in attempts]
        claim = read_claim(tmp_path / "claims" / f"{attempt:08d}.claim")
        assert claim is not None and winners == [claim.pid]
    assert len(present(tmp_path / "claims")) == 20


def test_one_of_many_threads_wins(tmp_path: Path) -> None:
    path, won, together = tmp_path / "a.claim", [], threading.Barrier(8)

    def race(number: int) -> None:
        together.wait()
        if take(path, Claim(at=1.0, pid=number)):
            won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    claim = read_claim(path)
    assert claim is not None and won == [claim.pid]


def test_answer_that_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS: the link was made, its answer lost, and the client's second try finds the name there."""
    real = os.link

    def link(source: str, target: str, **more: bool) -> None:
        real(source, target, **more)
        raise FileExistsError(errno.EEXIST, "File exists", target)

    monkeypatch.setattr(os, "link", link)
    assert take(tmp_path / "a.claim", Claim(at=1.0))
    monkeypatch.undo()
    assert not take(tmp_path / "a.claim", Claim(at=2.0))


def test_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: str, target: str, **_: bool) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", source)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(PermissionError, match=r"hard links, which its file system must have\): .*a\.claim"):
        take(tmp_path / "a.claim", Claim(at=1.0))
    assert present(tmp_path) == frozenset()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"[" * 10_000, b"\xff\xfe", b'{"at": 1, "gpus": 5}'])
def test_what_is_no_report(tmp_path: Path, data: bytes) -> None:
    """An end that can't be read has not been told; a claim that can't be read is somebody's all the same."""
    path = tmp_path / "file"
    path.write_bytes(data)
    assert read_ended(path) is None
    assert read_claim(path) == Claim(at=0.0)


_NONSENSE = st.none() | st.text(max_size=3) | st.floats() | st.integers() | st.lists(st.integers(), max_size=2)


@given(
    st.dictionaries(st.sampled_from([each.name for each in (*fields(Claim), *fields(EndReport))]), _NONSENSE),
    st.sampled_from([1, 10**400]),
)
def test_what_is_read_can_be_reckoned_with(
    tmp_path_factory: pytest.TempPathFactory, told: dict[str, object], at: int
) -> None:
    """Whatever somebody writes there: who follows thousands of attempts must not die of one."""
    path = tmp_path_factory.mktemp("told") / "file"
    path.write_text(json.dumps({"at": at, "ran_s": 1.0, **told}))
    claim, ended = read_claim(path), read_ended(path)
    assert claim is not None and isinstance(claim.void, bool)
    for number in (claim.at, 0.0 if ended is None else ended.ran_s, 0 if ended is None else ended.code or 0):
        assert -1e15 < number < 1e15
    assert claim.handle is None or isinstance(claim.handle, str)
    assert ended is None or (isinstance(ended.interrupted, bool) and isinstance(ended.problem or "", str))


def test_words_of_a_later_version(tmp_path: Path) -> None:
    ended = EndReport(at=1.0, ran_s=2.0, code=0)
    (tmp_path / "e").write_text(json.dumps({**asdict(ended), "colour": "red"}))
    assert read_ended(tmp_path / "e") == ended
    (tmp_path / "c").write_text(json.dumps({"at": 1.0, "colour": "red"}))
    assert read_claim(tmp_path / "c") == Claim(at=1.0)


def test_folder_is_asked_and_not_the_names(tmp_path: Path) -> None:
    """What makes a client of NFS ask its server is that the folder itself is opened."""
    opened: list[str] = []
    create_exclusive(tmp_path / "00000001.ended", b"{}")
    script = (
        "import sys\nfrom pathlib import Path\nfrom gpuherd.jobs.remote.protocol import present\n"
        "sys.addaudithook(lambda event, args: event == 'os.scandir' and print(args[0]))\n"
        "print(*present(Path(sys.argv[1])))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    opened = done.stdout.splitlines()
    assert opened == [str(tmp_path), "00000001.ended"]


def test_a_link_whose_answer_is_lost_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a network file system that is mounted soft: the link was made, and an error is all that is heard."""
    real = os.link

    def link(source: str, target: str, **more: bool) -> None:
        real(source, target, **more)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", link)
    assert take(tmp_path / "1.claim", Claim(at=1.0))
    assert present(tmp_path) == {"1.claim"}
