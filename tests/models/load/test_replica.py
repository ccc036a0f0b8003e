"""One replica a GPU: every input once, its own GPUs alone, and all of them ended together."""

from __future__ import annotations

import doctest
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.models.load import replica
from gpuherd.models.load.replica import Replica, environments, groups_of, run_replicas, this_replica


@given(inputs=st.integers(0, 500), of=st.integers(1, 20))
def test_every_input_goes_to_one_replica_and_none_gets_many_more(inputs: int, of: int) -> None:
    parts = [Replica(number, of).shard(inputs) for number in range(of)]
    assert sorted(place for part in parts for place in part) == list(range(inputs))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(gpus=st.integers(0, 16), each=st.integers(1, 8))
def test_no_gpu_is_in_two_groups(gpus: int, each: int) -> None:
    names = [f"GPU-{number}" for number in range(gpus)]
    groups = groups_of(names, each)
    taken = [name for group in groups for name in group]
    assert taken == names[: len(taken)] and len(groups) == gpus // each


def test_each_sees_its_own_gpus_and_its_number() -> None:
    first, second = environments([("GPU-a", "GPU-b"), ("GPU-c", "GPU-d")], {"HOME": "/x"}, 8)
    assert first["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b" and second["CUDA_VISIBLE_DEVICES"] == "GPU-c,GPU-d"
    assert (first["OMP_NUM_THREADS"], first["HOME"]) == ("4", "/x")
    assert (this_replica(first), this_replica(second), this_replica({})) == (Replica(0, 2), Replica(1, 2), Replica())


@pytest.mark.parametrize("word", ["", "1", "4/4", "a/b", "-1/2", "0/0"])
def test_a_number_that_can_not_be_is_refused(word: str) -> None:
    with pytest.raises(UsageError):
        this_replica({"GPUHERD_REPLICA": word})


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def settings(tmp_path: Path, many: int) -> tuple[dict[str, str], ...]:
    return environments([("x",)] * many, {"PATH": os.environ["PATH"], "HERE": str(tmp_path)}, 2)


def test_all_run_at_once_and_all_well_is_0(tmp_path: Path) -> None:
    # Each waits for the other's file: one after the other they would wait for ever.
    script = 'touch "$HERE/${GPUHERD_REPLICA%/*}"; until [ -e "$HERE/0" ] && [ -e "$HERE/1" ]; do sleep 0.01; done'
    assert run_replicas(shell(script), settings(tmp_path, 2)) == 0


def test_one_that_fails_ends_the_others_with_its_code(tmp_path: Path) -> None:
    script = '[ "$GPUHERD_REPLICA" = 1/3 ] && exit 71; exec sleep 100'
    told: list[str] = []
    began = time.monotonic()
    assert run_replicas(shell(script), settings(tmp_path, 3), tell=told.append) == 71
    assert time.monotonic() - began < 60
    assert told == ["replica 1 ended with exit code 71; the others are ended"]


def test_one_that_does_not_listen_is_killed_after_the_grace(tmp_path: Path) -> None:
    script = (
        'if [ "$GPUHERD_REPLICA" = 1/2 ]; then until [ -e "$HERE/deaf" ]; do sleep 0.01; done; exit 3; fi;'
        ' trap "" TERM; touch "$HERE/deaf"; while :; do sleep 0.05; done'
    )
    assert run_replicas(shell(script), settings(tmp_path, 2), grace_s=0.3) == 3


def test_one_that_a_signal_ends_is_told_as_shells_do(tmp_path: Path) -> None:
    assert run_replicas(shell("kill -KILL $$"), settings(tmp_path, 1)) == 128 + signal.SIGKILL


def test_a_signal_to_us_reaches_all_of_them(tmp_path: Path) -> None:
    script = (
        "import sys; from gpuherd.models.load.replica import environments, run_replicas\n"
        "command = ['/bin/sh', '-c', 'touch \"$HERE/${GPUHERD_REPLICA%/*}\"; exec sleep 100']\n"
        f"sys.exit(run_replicas(command, environments([('x',), ('y',)], {{'HERE': {str(tmp_path)!r}, "
        f"'PATH': {os.environ['PATH']!r}}}, 2)))"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        deadline = time.monotonic() + 60
        while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


def test_none_is_an_error() -> None:
    with pytest.raises(UsageError, match="fewer GPUs than one of them takes"):
        run_replicas(["true"], ())


def test_documented_examples() -> None:
    assert doctest.testmod(replica).failed == 0
