"""The filter of system calls, by a small machine that runs it as the kernel does."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.posttrain.rewards import isolation
from gpuherd.posttrain.rewards.isolation import filter_program

X86, ARM = 0xC000003E, 0xC00000B7
MACHINES = {"x86_64": X86, "aarch64": ARM}
ALLOW, KILL = 0x7FFF0000, 0x80000000
CLONE_THREAD, SIGCHLD, CLONE_NEWUSER = 0x10000, 17, 0x10000000


def decided(program: bytes, architecture: int, number: int, *arguments: int) -> int | str:
    """What a filter says of a call: ``allow``, ``kill``, or the error number."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *(0,) * (6 - len(arguments)))
    lines = [struct.unpack_from("=HBBI", program, place) for place in range(0, len(program), 8)]
    value: int = 0
    place = 0
    while True:
        code, if_true, if_false, constant = lines[place]
        place += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, constant)
        elif code == 0x06:
            said: dict[int, int | str] = {ALLOW: "allow", KILL: "kill"}
            return said.get(constant, int(constant) & 0xFFFF)
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
            place += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("children", [False, True])
@pytest.mark.parametrize("namespaces", [False, True])
def test_calls_are_refused_as_listed(machine: str, children: bool, namespaces: bool) -> None:
    program = filter_program(machine, children=children, namespaces=namespaces)
    assert program is not None
    own, column = MACHINES[machine], list(MACHINES).index(machine)

    def said(number: int, *arguments: int) -> int | str:
        return decided(program, own, number, *arguments)

    tables = isolation
    for table, refused in (
        (tables._NEVER, True),
        (tables._NO_NETWORK, True),
        (tables._WITHOUT_NAMESPACES, not namespaces),
        (tables._FORKS, not children),
    ):
        for name, numbers in table.items():
            if (number := numbers[column]) is not None:
                assert said(number) == (errno.EPERM if refused else "allow"), name
    clone, prlimit = tables._CLONE[machine], tables._PRLIMIT[machine]
    assert said(435) == errno.ENOSYS
    assert said(clone, CLONE_THREAD | 0x3D0F00 & ~CLONE_NEWUSER) == "allow"
    assert said(clone, SIGCHLD) == ("allow" if children else errno.EPERM)
    if children:
        assert said(clone, SIGCHLD | CLONE_NEWUSER) == errno.EPERM
    assert said(prlimit, 0) == "allow"
    assert said(prlimit, 1) == errno.EPERM
    for name, (both, argument, values) in tables._ARGUMENTS.items():
        always = tables._ALWAYS[name][2] if name in tables._ALWAYS else ()
        assert set(always) <= set(values)
        for value in (0, 2, 9, 0x5401, *values):
            refused = value in (always if namespaces else values)
            given = [0] * argument + [0xFF << 32 | value]  # the kernel reads its lower half alone
            assert said(both[column], *given) == (errno.EPERM if refused else "allow")
    for number in (0, 1, 3, 9, 60, 231):  # read, write, and so on
        if all(
            numbers[column] != number
            for table in (tables._NEVER, tables._WITHOUT_NAMESPACES)
            for numbers in table.values()
        ):
            assert said(number) == "allow"


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**64 - 1), max_size=6))
def test_any_call_is_decided_and_other_architectures_are_killed(
    architecture: int, number: int, arguments: list[int]
) -> None:
    for machine, own in MACHINES.items():
        program = filter_program(machine, children=False, namespaces=False)
        assert program is not None
        found = decided(program, architecture, number, *arguments)
        assert architecture == own or found == "kill"
        assert decided(program, own, number, *arguments) in ("allow", "kill", errno.EPERM, errno.ENOSYS)
    x86 = filter_program("x86_64", children=True, namespaces=True)
    assert x86 is not None
    assert decided(x86, X86, number | 0x40000000, *arguments) == "kill"


def test_a_machine_that_is_not_known_has_no_filter() -> None:
    assert filter_program("riscv64", children=False, namespaces=True) is None


def test_no_number_stands_for_two_calls() -> None:
    for column in (0, 1):
        tables = (
            isolation._NEVER,
            isolation._NO_NETWORK,
            isolation._WITHOUT_NAMESPACES,
            isolation._FORKS,
        )
        numbers = [each[column] for table in tables for each in table.values() if each[column] is not None]
        numbers += [each[0][column] for each in isolation._ARGUMENTS.values()]
        assert len(set(numbers)) == len(numbers)
