"""What an attempt's nodes must know of each other."""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.engines.slurm.node import NODE, SHELL_PORT, hosts
from gpuherd.engines.world import World, free_port, port_of
from gpuherd.errors import UsageError

_NAMES = st.from_regex(r"[a-z][a-z-]{0,5}", fullmatch=True)


@st.composite
def _lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A list of hosts as SLURM may write it, and the names in it."""
    words, names = [], []
    for _ in range(draw(st.integers(1, 3))):
        prefix, ending = draw(_NAMES), draw(st.just("") | _NAMES)
        width = draw(st.integers(1, 4))
        ranges, numbers = [], []
        for _ in range(draw(st.integers(0, 3))):
            first = draw(st.integers(0, 10**width - 1))
            last = draw(st.integers(first, min(first + 5, 10**width - 1)))
            ranges.append(f"{first:0{width}d}" if first == last else f"{first:0{width}d}-{last:0{width}d}")
            numbers += [f"{number:0{width}d}" for number in range(first, last + 1)]
        words.append(f"{prefix}[{','.join(ranges)}]{ending}" if ranges else f"{prefix}{ending}")
        names += [f"{prefix}{number}{ending}" for number in numbers or [""]]
    return ",".join(words), names


@given(_lists())
def test_hosts(case: tuple[str, list[str]]) -> None:
    text, names = case
    assert list(hosts(text)) == names


@pytest.mark.parametrize("text", ["", ",", "a,,b", "n[1-3", "n[a-b]", "n[1-]", "n]1[", "n[]", "n[1-999999999]"])
def test_no_list_of_hosts(text: str) -> None:
    with pytest.raises(UsageError, match="hosts"):
        list(hosts(text))


@given(st.text(max_size=40))
def test_hostile_list(text: str) -> None:
    """Any text is a list of names or refused."""
    with suppress(UsageError):
        assert all(hosts(text))


def test_variables() -> None:
    """As torchrun and programs without it read them."""
    assert World(1, 2, "n1", 20001).variables() == {
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "20001",
        "NNODES": "2",
        "NODE_RANK": "1",
        "PET_MASTER_ADDR": "n1",
        "PET_MASTER_PORT": "20001",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
    }


def test_of_slurm() -> None:
    told = {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "localhost,n2"}
    assert NODE.rank({**told, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}, 7).world == World(1, 2, "localhost", 7)
    # Names that only SLURM knows: then the address from which srun has started this.
    only_slurms = {**told, "SLURM_STEP_NODELIST": "no-such-host[1-2]"}
    assert NODE.rank({**only_slurms, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}, 7).world == World(1, 2, "10.0.0.1", 7)
    assert NODE.rank(only_slurms, 7).world == World(1, 2, "no-such-host1", 7)
    with pytest.raises(UsageError, match="'SLURM_NODEID' among SLURM's variables"):
        NODE.rank({}, 7)
    with pytest.raises(UsageError, match="invalid literal"):
        NODE.rank({**told, "SLURM_NODEID": "x"}, 7)


@given(st.text(st.characters(exclude_categories=())))
def test_port(tag: str) -> None:
    """Always the same, and none that Linux gives to those who ask for any."""
    assert 20_000 <= port_of(tag) < 32_000
    assert port_of(tag) == port_of(tag)


def test_free_port() -> None:
    """The attempt's own; the next one while somebody listens there."""
    tag = next(f"q/{number}" for number in range(1000) if free_port(f"q/{number}") == port_of(f"q/{number}"))
    with socket.socket() as listener:
        listener.bind(("", port_of(tag)))
        listener.listen()
        assert port_of(tag) < free_port(tag) <= port_of(tag) + 100
    assert free_port(tag) == port_of(tag)


@pytest.mark.parametrize("number", [1, 11_999, 12_000, 19_999, 4_294_967_294])
def test_a_shell_on_a_node_makes_a_port_by_the_same_rule(number: int) -> None:
    command = ["sh", "-c", f"echo {SHELL_PORT}"]
    told = subprocess.run(command, env={"SLURM_JOB_ID": str(number)}, capture_output=True, text=True, check=True)
    assert 20_000 <= int(told.stdout) < 32_000
    assert all(20_000 <= port_of(f"queue/{each}") < 32_000 for each in range(100))


def test_ports_differ() -> None:
    """A thousand attempts of one queue: hardly two meet."""
    assert len({port_of(f"queue/{number}") for number in range(1000)}) > 900
