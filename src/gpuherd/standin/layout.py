"""The state file of a simulated machine: the fields that ``state.h`` declares, mirrored as ctypes structures.

The file is exactly one ``State``. Whoever changes it holds an exclusive flock on it; the library reads under a shared
one (``state.h`` says why). A change of the layout raises ``LAYOUT_VERSION`` here and in ``state.h``; a test compares
what both believe.
Knows only the fields; what they mean for a machine is in ``gpuherd.standin.machine``.
"""

from __future__ import annotations

from ctypes import Array, Structure, c_char, c_int64, c_uint8, c_uint32, c_uint64

LAYOUT_VERSION = 3
MAGIC = b"gpuherd standin"
MAX_GPUS = 32
MAX_DEVICES = 128
MAX_PROCESSES = 512
MAX_LINKS = 18
MAX_MIG_INSTANCES = 7
FOLLOWS_USE = 0xFFFFFFFF  # in place of a figure: low when the GPU is idle, high when something runs on it


class Device(Structure):
    """A GPU or a MIG instance."""

    uuid: bytes
    name: bytes
    serial: bytes
    total: int  # bytes
    ghost: int  # bytes in use that no listed process owns
    parent: int  # 1 + the GPU that this MIG instance is cut from; 0 for a whole GPU
    position: int  # number of the MIG instance on its GPU
    pci_bus: int
    numa_node: int
    lost: int  # 1: fallen off the bus
    mig_mode: int  # 1: split into instances
    utilisation: int  # percent, or FOLLOWS_USE
    temperature: int  # degrees Celsius, or FOLLOWS_USE
    power: int  # milliwatts, or FOLLOWS_USE
    power_limit: int  # milliwatts
    capability_major: int
    capability_minor: int
    multiprocessors: int
    compute_mode: int
    ecc_errors: int  # uncorrectable ones since the driver was loaded
    xid: int  # the last critical Xid error
    xids: int  # how many there have been

    _fields_ = [
        ("uuid", c_char * 64),
        ("name", c_char * 64),
        ("serial", c_char * 32),
        ("total", c_uint64),
        ("ghost", c_uint64),
        ("parent", c_uint32),
        ("position", c_uint32),
        ("pci_bus", c_uint32),
        ("numa_node", c_uint32),
        ("lost", c_uint32),
        ("mig_mode", c_uint32),
        ("utilisation", c_uint32),
        ("temperature", c_uint32),
        ("power", c_uint32),
        ("power_limit", c_uint32),
        ("capability_major", c_uint32),
        ("capability_minor", c_uint32),
        ("multiprocessors", c_uint32),
        ("compute_mode", c_uint32),
        ("ecc_errors", c_uint64),
        ("xid", c_uint32),
        ("xids", c_uint32),
    ]


class Process(Structure):
    """Memory that a process holds on a device. It counts while the process lives and ``until`` has not come."""

    counts: int  # 1: this entry is in use; written last
    device: int
    pid: int
    phantom: int  # 1: no such process need exist
    graphics: int  # 1: a display process
    ticket: int  # tells entries apart that have used the same place
    start: int  # clock ticks since boot: a pid that is used again is another process
    bytes: int
    until: int  # CLOCK_MONOTONIC nanoseconds; 0: for good

    _fields_ = [
        ("counts", c_uint32),
        ("device", c_uint32),
        ("pid", c_uint32),
        ("phantom", c_uint32),
        ("graphics", c_uint32),
        ("ticket", c_uint32),
        ("start", c_uint64),
        ("bytes", c_uint64),
        ("until", c_int64),
    ]


class State(Structure):
    """The whole file."""

    magic: bytes
    version: int
    size: int
    seed: Array[c_uint8]  # makes the UUIDs unique
    creator_start: int
    creator_pid: int
    gpus: int  # whole GPUs: the first entries of ``device``
    attribute: int  # 1: tagged jobs show with their own memory
    hide_pids: int  # 1: as in a container: memory is in use, but nobody is listed
    hide_memory: int  # 1: processes are listed without their memory
    fail_name: bytes  # the only function that fails; empty: all do
    fail_device: int  # 1 + the only device whose calls fail; 0: calls about any, and those about none
    fail_code: int  # the NVML code that these calls answer, if not 0
    fail_calls: int  # how many calls more; 0: until it is changed
    latency: int  # microseconds that every call takes
    cuda_version: int
    devices: int  # whole GPUs and MIG instances
    calls: int  # calls answered so far
    driver_version: bytes
    nvlinks: Array[Array[c_uint8]]  # number of links between two GPUs
    proximity: Array[Array[c_uint8]]  # nvmlGpuTopologyLevel_t between two GPUs
    device: Array[Device]
    process: Array[Process]

    _fields_ = [
        ("magic", c_char * 16),
        ("version", c_uint32),
        ("size", c_uint32),
        ("seed", c_uint8 * 16),
        ("creator_start", c_uint64),
        ("creator_pid", c_uint32),
        ("gpus", c_uint32),
        ("attribute", c_uint32),
        ("hide_pids", c_uint32),
        ("hide_memory", c_uint32),
        ("fail_name", c_char * 60),
        ("fail_device", c_uint32),
        ("fail_code", c_uint32),
        ("fail_calls", c_uint32),
        ("latency", c_uint32),
        ("cuda_version", c_uint32),
        ("devices", c_uint32),
        ("calls", c_uint64),
        ("driver_version", c_char * 80),
        ("nvlinks", c_uint8 * MAX_GPUS * MAX_GPUS),
        ("proximity", c_uint8 * MAX_GPUS * MAX_GPUS),
        ("device", Device * MAX_DEVICES),
        ("process", Process * MAX_PROCESSES),
    ]
