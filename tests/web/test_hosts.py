"""Other machines over ssh: names, what a fake ``ssh`` prints, and answers that are late, endless or hostile."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.patience import wait_until
from tests.web.other_machines import BUSY, FREE, fake_ssh, printing

from gpuherd.errors import UsageError, harmless
from gpuherd.web import hosts
from gpuherd.web.hosts import MOST_HOSTS, GpuLine, HostLook, Hosts, ask, check_host, parse
from gpuherd.web.serve import ServeOptions, WebServer

FakeSsh = Callable[[str], Path]


@pytest.fixture(name="fake_ssh")
def _fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    return lambda body: fake_ssh(tmp_path, monkeypatch, body)


@pytest.mark.parametrize(
    "name",
    ["-oProxyCommand=touch /tmp/x", "--", "", "a b", "a;b", "$(id)", "a\n", "-@b", "a@-b", "a@", "@b", "x" * 400, "é"],
)
def test_no_name_is_taken_for_an_option(name: str) -> None:
    with pytest.raises(UsageError, match="no name of a machine"):
        check_host(name)


@given(st.text())
def test_a_name_that_is_taken_is_one_plain_word(name: str) -> None:
    try:
        check_host(name)
    except UsageError:
        return
    assert not name.startswith("-")
    assert not name.partition("@")[2].startswith("-")
    assert name.isascii()
    assert name.split() == [name]


def test_the_server_refuses_such_a_name_before_it_listens() -> None:
    with pytest.raises(UsageError, match="no name of a machine"):
        WebServer(ServeOptions(port=0, hosts=("node-2", "-oProxyCommand=x")))


def test_too_many_machines_are_refused_and_doubles_are_one() -> None:
    assert Hosts(["a", "b", "a"]).names == ("a", "b")
    with pytest.raises(UsageError, match="at most"):
        Hosts(f"n{number}" for number in range(MOST_HOSTS + 1))


def test_a_machine_is_asked_by_ssh_without_questions_and_with_its_name_after_the_options(fake_ssh: FakeSsh) -> None:
    arguments = fake_ssh(printing(FREE, BUSY))
    look = ask("alice@node-2")
    assert look.problem is None
    assert look.answers
    assert look.free == 1
    assert look.gpus == (
        GpuLine("0", "NVIDIA A100", 3, 40960, 0, True),
        GpuLine("1", "<b onmouseover=alert(1)>'\" </b>", 20480, 40960, None, False, "in use", ("alice", "bob"), 1500),
    )
    words = json.loads(arguments.read_text())
    assert words[words.index("--") :] == ["--", "alice@node-2", "gpuherd", "gpus", "--json"]
    assert "BatchMode=yes" in words


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("sys.stderr.write('Permission denied (publickey).\\n'); sys.exit(255)", "no connection: Permission denied"),
        ("sys.stderr.write('bash: gpuherd: command not found\\n'); sys.exit(127)", "gpuherd is not found there"),
        ("sys.stderr.write('a\\x1b[31m\\nevil\\x1b]0;t\\x07 end'); sys.exit(3)", "exit code 3 there: evil end"),
        ("sys.exit(255)", "it says nothing"),
        ("print('no JSON')", "not understood"),
        ("print('[' * 100000)", "not understood"),
        ("print('{' + '\"a\":{' * 100000)", "not understood"),
        ("print(json.dumps({'gpus': 'none'}))", "not understood"),
        ("os.write(1, bytes(range(256)) * 10)", "not understood"),
        ("print('{\"gpus\":[' + '9' * 10000 + ']}')", "not understood"),
    ],
)
def test_what_goes_wrong_is_a_reason_without_control_characters(fake_ssh: FakeSsh, body: str, reason: str) -> None:
    fake_ssh(body)
    look = ask("node")
    assert not look.answers
    assert look.problem is not None
    assert reason in look.problem
    assert look.problem.isprintable()


def test_a_machine_without_gpus_says_why(fake_ssh: FakeSsh) -> None:
    fake_ssh(printing(problem="no driver"))
    look = ask("node")
    assert (look.answers, look.problem, look.gpus) == (True, "no driver", ())


def test_a_login_script_that_prints_before_the_answer_does_no_harm() -> None:
    assert parse(b"Welcome!\n" + json.dumps({"gpus": [FREE]}).encode())[0][0].label == "0"


def test_no_ssh_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ssh can't be started" in (ask("node").problem or "")


def test_a_machine_that_does_not_answer_is_given_up_and_its_ssh_ended(fake_ssh: FakeSsh, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    fake_ssh(f"open({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)")
    began = time.monotonic()
    assert ask("node", limit_s=1.5).problem == "no answer in 1.5 s"
    assert time.monotonic() - began < 30
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_a_process_that_ssh_leaves_behind_with_its_pipes_holds_nothing_up(fake_ssh: FakeSsh, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    fake_ssh(
        f"{printing(FREE)}\nsys.stdout.flush()\nleft = os.fork()\n"
        "if left == 0:\n os.setsid()\n time.sleep(60)\n os._exit(0)\n"
        f"with open({str(pid)!r}, 'w') as file: file.write(str(left))\nos._exit(0)"
    )
    began = time.monotonic()
    assert ask("node").answers
    assert time.monotonic() - began < 10
    os.kill(int(pid.read_text()), signal.SIGKILL)


def test_endless_output_is_cut_off(fake_ssh: FakeSsh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_MOST_BYTES", 1 << 20)
    fake_ssh("while True: os.write(1, b'x' * 65536)")
    assert "more than 1 MB" in (ask("node").problem or "")


def test_endless_complaints_are_cut_off(fake_ssh: FakeSsh) -> None:
    fake_ssh("os.write(2, b'x' * 3_000_000 + b'\\nthe end'); sys.exit(255)")
    problem = ask("node").problem or ""
    assert problem.endswith("the end")
    assert len(problem) < 400


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_KEYS = [*FREE, *BUSY]


@given(st.lists(st.dictionaries(st.sampled_from(_KEYS), _JSON) | _JSON, max_size=4), _JSON)
def test_whatever_a_machine_prints_becomes_plain_lines(gpus: list[object], problem: object) -> None:
    lines, reason = parse(json.dumps({"gpus": gpus, "problem": problem}).encode())
    for line in lines:
        for text in (line.label, line.name, line.reason, *line.users):
            assert harmless(text) == text
            assert len(text) <= 300
        assert 0 <= line.used_mb <= 1e9
        assert line.utilisation is None or 0 <= line.utilisation <= 100
        assert line.idle_s is None or 0 <= line.idle_s <= 1e9
        assert line.free or line.reason
    assert reason is None or harmless(reason) == reason


def test_machines_are_asked_in_the_background_and_what_they_said_last_stays(fake_ssh: FakeSsh, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    fake_ssh(
        f"if 'slow' in sys.argv: time.sleep(60)\nif os.path.exists({str(gone)!r}): sys.exit(255)\n{printing(FREE)}"
    )
    known = Hosts(["quick", "slow"], every_s=0.05, again_s=0.05)
    began = time.monotonic()
    assert known.looks() == (HostLook("quick"), HostLook("slow"))
    assert time.monotonic() - began < 1
    try:
        wait_until(lambda: known.looks()[0].answers)
        gone.touch()
        wait_until(lambda: not known.looks()[0].answers)
        quick, slow = known.looks()
        assert quick.gpus
        assert quick.at is not None
        assert "no connection" in (quick.problem or "")
        assert slow == HostLook("slow")
    finally:
        known.close()


def test_no_ssh_is_left_behind_when_the_server_ends(fake_ssh: FakeSsh, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    fake_ssh(f"open({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)")
    known = Hosts(["slow"])
    known.looks()
    wait_until(lambda: pid.exists() and bool(pid.read_text()))
    known.close()
    assert not Path(f"/proc/{pid.read_text()}").exists()
    known.looks()  # a request that comes late
    assert not any(thread.name == "gpuherd-web-slow" for thread in threading.enumerate())
