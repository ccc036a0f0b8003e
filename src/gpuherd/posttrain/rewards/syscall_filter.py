"""The seccomp filter of the sandbox: which system calls code of strangers is refused, as a BPF program. Pure.

A call that is refused fails with EPERM, so that Python raises PermissionError; ``clone3`` fails with ENOSYS, whereupon
the C library takes ``clone``, whose flags a filter can read. Calls of another architecture end the process.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # of struct seccomp_data
_X32 = 0x40000000
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000  # CLONE_NEWNS, CLONE_NEWUSER and so on

_ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMNS = {"x86_64": 0, "aarch64": 1}

# Numbers on x86_64 and on aarch64; None where the call is not there. Calls from 424 on have one number everywhere.
_NO_NETWORK: Mapping[str, tuple[int | None, int | None]] = {"socket": (41, 198)}
_NEVER: Mapping[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "open_tree_attr": (467, 467),
    "unshare": (272, 97),
    "setns": (308, 268),
    "memfd_create": (319, 279),  # memory that no limit counts
    "vmsplice": (278, 75),  # pages of a pipe, which stay when their addresses are given back
    "splice": (275, 76),
    "tee": (276, 77),
    "memfd_secret": (447, 447),
    # System V objects are found by number: without a namespace they are those of all the user's programs.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_setup": (206, 0),  # the whole machine has so many of these requests
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "personality": (135, 92),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "vhangup": (153, 58),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
# What namespaces of processes and mounts make harmless, and nothing else does.
_WITHOUT_NAMESPACES: Mapping[str, tuple[int | None, int | None]] = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setsid": (112, 157),  # so that all stay in the group that is killed in the end
    "setpgid": (109, 154),
    "truncate": (76, 45),
    # Landlock does not see to owners, permissions, times and attributes of files.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "inotify_init": (253, None),  # names of files that come and go
    "inotify_init1": (294, 26),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
# The same by an argument: its place, and the values that are refused. Whose input is announced by a signal of one's
# choice (F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP) can be anybody; and who does not end with the one that started
# him (PR_SET_PDEATHSIG) is left behind.
_ARGUMENTS: Mapping[str, tuple[tuple[int, int], int, tuple[int, ...]]] = {
    "fcntl": ((72, 25), 1, (8, 15)),
    "ioctl": ((16, 29), 1, (0x8901, 0x8902)),
    "prctl": ((157, 167), 0, (1, 41)),
}
_ALWAYS = {"prctl": ((157, 167), 0, (41,))}  # PR_SET_THP_DISABLE
_FORKS: Mapping[str, tuple[int | None, int | None]] = {"fork": (57, None), "vfork": (58, None)}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_PRLIMIT = {"x86_64": 302, "aarch64": 261}


def filter_program(machine: str, *, children: bool, namespaces: bool) -> bytes | None:
    """The filter as an array of ``struct sock_filter``; None for a machine whose system calls are not listed here.

    Args:
        machine: as ``os.uname().machine`` has it.
        children: processes may be made; threads always may.
        namespaces: the code has its own namespaces of processes and mounts.
    """
    if machine not in _ARCHITECTURES:
        return None
    return b"".join(struct.pack("=HBBI", *each) for each in _instructions(machine, children, namespaces))


def _instructions(machine: str, children: bool, namespaces: bool) -> Iterator[tuple[int, int, int, int]]:
    """Instructions as (code, jump if true, jump if false, constant)."""
    column = _COLUMNS[machine]
    yield (_LOAD, 0, 0, _ARCH_AT)
    yield (_EQUAL, 1, 0, _ARCHITECTURES[machine])
    yield (_RETURN, 0, 0, _KILL)
    yield (_LOAD, 0, 0, _NUMBER_AT)
    if machine == "x86_64":
        yield (_AT_LEAST, 0, 1, _X32)
        yield (_RETURN, 0, 0, _KILL)
    denied = {**_NEVER, **_NO_NETWORK, **({} if children else _FORKS), **({} if namespaces else _WITHOUT_NAMESPACES)}
    for numbers in denied.values():
        if (number := numbers[column]) is not None:
            yield from _refused(number, _EPERM)
    yield from _refused(_CLONE3, _ENOSYS)
    for both, argument, values in (_ALWAYS if namespaces else _ARGUMENTS).values():
        yield from _refused_with(both[column], argument, values)
    # clone: threads, and processes only where they are allowed, never with namespaces of their own.
    yield (_EQUAL, 0, 4, _CLONE[machine])
    yield (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)
    yield (_ANY_BIT, 1, 0, _CLONE_NEW) if children else (_ANY_BIT, 0, 1, _CLONE_THREAD)
    yield (_RETURN, 0, 0, _ALLOW)
    yield (_RETURN, 0, 0, _ERRNO | _EPERM)
    # prlimit64: of the process itself, and of no other one.
    yield (_EQUAL, 0, 3, _PRLIMIT[machine])
    yield (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)
    yield (_EQUAL, 1, 0, 0)
    yield (_RETURN, 0, 0, _ERRNO | _EPERM)
    yield (_RETURN, 0, 0, _ALLOW)


def _refused(number: int, error: int) -> Iterator[tuple[int, int, int, int]]:
    yield (_EQUAL, 0, 1, number)
    yield (_RETURN, 0, 0, _ERRNO | error)


def _refused_with(number: int, argument: int, values: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Refused where an argument, of whose halves the kernel reads the lower one alone, has one of these values."""
    yield (_EQUAL, 0, len(values) + 3, number)
    yield (_LOAD, 0, 0, _FIRST_ARGUMENT_AT + 8 * argument)
    for left in range(len(values), 0, -1):
        yield (_EQUAL, left, 0, values[-left])
    yield (_RETURN, 0, 0, _ALLOW)
    yield (_RETURN, 0, 0, _ERRNO | _EPERM)
