"""Which Ray cluster is meant."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuherd.engines.ray.cluster import Address, ClusterKind, resolve
from gpuherd.errors import UsageError


@pytest.fixture
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def note(folder: Path, text: str) -> dict[str, str]:
    """A machine on which ``ray start`` has left a note of this cluster."""
    (folder / "ray").mkdir()
    (folder / "ray" / "ray_current_cluster").write_text(text)
    return {"RAY_TMPDIR": str(folder)}


def test_two_forms_are_taken() -> None:
    assert resolve("head:6379", {}) == Address(ClusterKind.JOINED, "head:6379")
    assert resolve("[::1]:6379", {}) == Address(ClusterKind.JOINED, "[::1]:6379")
    assert resolve("http://head:8265/", {}) == Address(ClusterKind.SERVER, "http://head:8265")
    assert resolve("https://head", {}) == Address(ClusterKind.SERVER, "https://head")


@pytest.mark.parametrize(
    "word",
    [
        *("ray://head:10001", "anyscale://x", "head", "head:", ":6379", "head:x", "head:0", "h:70000"),
        *(
            "http://",
            "https:///jobs",
            "http://:8265",
            "http://head:x",
            "http://head:0",
            "http://head:70000",
            "http://[::1",
        ),
    ],
)
def test_others_are_refused_with_the_two_that_work(word: str) -> None:
    with pytest.raises(UsageError, match=r"HOST:PORT .* or http://HOST:8265"):
        resolve(word, {})


def test_the_flag_goes_over_the_variable() -> None:
    assert resolve("a:1", {"RAY_ADDRESS": "b:2"}).text == "a:1"
    assert resolve(None, {"RAY_ADDRESS": "b:2"}).text == "b:2"
    with pytest.raises(UsageError, match="RAY_ADDRESS"):
        resolve(None, {"RAY_ADDRESS": "ray://b:2"})


def test_a_cluster_that_runs_on_this_machine_is_joined(tmp_path: Path, listener: str) -> None:
    noted = note(tmp_path, f"{listener}\n")
    assert resolve(None, noted) == Address(ClusterKind.JOINED, listener)
    assert resolve(None, {**noted, "RAY_ADDRESS": "auto"}) == Address(ClusterKind.JOINED, listener)
    assert resolve(None, {**noted, "RAY_ADDRESS": "local"}) == Address(ClusterKind.OWN)
    assert resolve("local", {**noted, "RAY_ADDRESS": "b:2"}) == Address(ClusterKind.OWN)
    assert resolve("auto", {**noted, "RAY_ADDRESS": "b:2"}) == Address(ClusterKind.JOINED, listener)


def test_another_users_cluster_is_joined_by_its_name_only(
    tmp_path: Path, listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = note(tmp_path, listener)
    if os.geteuid() == 0:
        os.chown(tmp_path / "ray" / "ray_current_cluster", 54321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(UsageError, match=f"of another user .* --ray-address {listener} means that one"):
        resolve(None, noted)
    assert resolve(listener, noted) == Address(ClusterKind.JOINED, listener)
    assert resolve("local", noted) == Address(ClusterKind.OWN)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "", "nonsense", "\0"])
def test_a_note_of_a_cluster_that_is_gone_means_one_of_our_own(tmp_path: Path, text: str) -> None:
    assert resolve(None, note(tmp_path, text)) == Address(ClusterKind.OWN)


def test_nothing_named_and_nothing_there_means_one_of_our_own(tmp_path: Path) -> None:
    assert resolve(None, {"RAY_TMPDIR": str(tmp_path)}) == Address(ClusterKind.OWN)
