"""GPUs to plan for, as data: what one has, kinds by name, GPUs in words, and what a GPU can compute with. Pure.

``inventory`` finds those of this machine and of a cluster's nodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from gpuherd.errors import UsageError
from gpuherd.gpus.state import Maker
from gpuherd.models.memory.kv_cache import GIB, MIB, Reserve
from gpuherd.models.memory.weights import Precision
from gpuherd.options import nearest
from gpuherd.units import counted, gib, size_mb


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """A GPU that a plan may use. Bytes.

    Attributes:
        label: what people call it: ``0``, ``3:1``.
        name: ``NVIDIA A100-SXM4-40GB``, or as requested: ``40GB``.
        total: all of its memory.
        free: what may be used of it now; less than ``total`` where others use the rest.
        capability: CUDA compute capability, None where it is not known.
        uuid: of a GPU that is really there.
        mig: a MIG instance: CUDA never uses two of those in one process.
    """

    label: str
    name: str
    total: int
    free: int
    capability: tuple[int, int] | None = None
    uuid: str | None = None
    mig: bool = False

    def available(self, reserve: Reserve) -> int:
        """Bytes that a model may take here; below 1 where nothing may."""
        return self.free - reserve.context - reserve.on(self.total)


def able_to_cooperate(gpus: Sequence[GpuSpec]) -> list[GpuSpec]:
    """Those that can work together in one process or one group: MIG instances can't, as neither CUDA nor NCCL joins
    them."""
    return [gpu for gpu in gpus if not gpu.mig]


def gpus_with_memory(gpus: Sequence[GpuSpec]) -> str:
    """How many GPUs of how much memory that may be used: ``4 GPUs of 40.0 GiB``, ``2 GPUs of 22.1 to 40.0 GiB``."""
    least, most = min(gpu.free for gpu in gpus), max(gpu.free for gpu in gpus)
    sizes = gib(most) if gib(least) == gib(most) else f"{gib(least).removesuffix(' GiB')} to {gib(most)}"
    return f"{counted(len(gpus), 'GPU')} of {sizes}"


# ---- kinds of GPUs by the names that people use, with the memory that programs really get on them --------------------
#
# ``A100-40`` has not 40 GiB: firmware, page tables and error correction take their part. The figures are what
# ``torch.cuda.mem_get_info`` reports as total on an idle gpu, rounded down to 0.1 GiB, from the makers' and users'
# reports; drivers differ by up to 0.3 GiB, so the lower figure stands here. An MI250 or MI250X is two GPUs to
# programs; its figure is that of one.


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A kind of GPU: its name here, memory in bytes that can be used, CUDA compute capability (None for AMD)."""

    name: str
    memory: int
    capability: tuple[int, int] | None
    maker: Maker = Maker.NVIDIA


def _nvidia(name: str, memory_gib: float, capability: str) -> GpuKind:
    major, minor = capability.split(".")
    return GpuKind(name, int(memory_gib * GIB), (int(major), int(minor)))


def _amd(name: str, memory_gib: float) -> GpuKind:
    return GpuKind(name, int(memory_gib * GIB), None, Maker.AMD)


KINDS: tuple[GpuKind, ...] = (
    _nvidia("A2", 14.5, "8.6"),
    _nvidia("A10", 22.0, "8.6"),
    _nvidia("A10G", 22.0, "8.6"),
    _nvidia("A16", 14.5, "8.6"),
    _nvidia("A30", 23.5, "8.0"),
    _nvidia("A40", 44.3, "8.6"),
    _nvidia("A100-40", 39.4, "8.0"),
    _nvidia("A100-80", 79.2, "8.0"),
    _nvidia("B200", 178.3, "10.0"),
    _nvidia("GH200", 94.5, "9.0"),
    _nvidia("H100", 79.1, "9.0"),
    _nvidia("H100-NVL", 93.1, "9.0"),
    _nvidia("H20", 95.0, "9.0"),
    _nvidia("H200", 139.7, "9.0"),
    _nvidia("L4", 22.0, "8.9"),
    _nvidia("L40", 44.3, "8.9"),
    _nvidia("L40S", 44.3, "8.9"),
    _nvidia("P40", 22.3, "6.1"),
    _nvidia("P100", 15.8, "6.0"),
    _nvidia("T4", 14.5, "7.5"),
    _nvidia("V100-16", 15.7, "7.0"),
    _nvidia("V100-32", 31.7, "7.0"),
    _nvidia("GTX1080Ti", 10.9, "6.1"),
    _nvidia("RTX2080Ti", 10.5, "7.5"),
    _nvidia("RTX3060", 11.6, "8.6"),
    _nvidia("RTX3080", 9.6, "8.6"),
    _nvidia("RTX3090", 23.5, "8.6"),
    _nvidia("RTX4060Ti-16", 15.5, "8.9"),
    _nvidia("RTX4070", 11.5, "8.9"),
    _nvidia("RTX4080", 15.5, "8.9"),
    _nvidia("RTX4090", 23.5, "8.9"),
    _nvidia("RTX5080", 15.4, "12.0"),
    _nvidia("RTX5090", 31.3, "12.0"),
    _nvidia("RTX-A4000", 15.6, "8.6"),
    _nvidia("RTX-A5000", 23.5, "8.6"),
    _nvidia("RTX-A6000", 47.4, "8.6"),
    _nvidia("RTX6000-Ada", 47.3, "8.9"),
    _nvidia("RTX8000", 47.3, "7.5"),
    _nvidia("RTX-PRO-6000", 94.9, "12.0"),
    _amd("MI100", 31.6),
    _amd("MI210", 63.6),
    _amd("MI250", 63.6),
    _amd("MI250X", 63.6),
    _amd("MI300X", 191.6),
    _amd("MI325X", 255.6),
    _amd("MI350X", 287.6),
    _amd("MI355X", 287.6),
)

# Words of longer names that say nothing of which kind it is: NVIDIA A100-SXM4-40GB, NVIDIA GeForce RTX 4090.
_NOISE = re.compile(
    r"nvidia|geforce|tesla|quadro|sxm\d?|pcie?|hbm\de?|generation|tensorcore|amd|instinct|oam|simulated", re.ASCII
)
# Other keys of the same kinds.
_ALSO = {
    "6000ada": "rtx6000ada",
    "a4000": "rtxa4000",
    "a5000": "rtxa5000",
    "a6000": "rtxa6000",
    "gh200480": "gh200",
    "h10094": "h100nvl",
}
# How much more memory a maker names than programs get, as a part of it: at most.
_NAMED_MORE = 0.11


def _key_of(name: str) -> str:
    """The name without what people write differently.

    >>> _key_of("NVIDIA A100-SXM4-40GB"), _key_of("RTX 4090"), _key_of("geforce rtx4090"), _key_of("H100-94GB")
    ('a10040', 'rtx4090', 'rtx4090', 'h100nvl')
    """
    bare = re.sub(r"(\d)\s*gi?b\b", r"\1", name.casefold())
    key = re.sub(r"[^a-z0-9]", "", _NOISE.sub("", bare))
    return _ALSO.get(key, key)


_BY_KEY = {_key_of(kind.name): kind for kind in KINDS}
# A board name alone that comes in several sizes.
_SEVERAL = {"a100": ("A100-40", "A100-80"), "v100": ("V100-16", "V100-32"), "rtx4060ti": ("RTX4060Ti-16",)}


def find_kind(name: str) -> GpuKind | None:
    """The kind that is meant, None for a name that is unknown or could mean several.

    >>> find_kind("H100-80GB").name, find_kind("Tesla T4 16GB").name, find_kind("H100-40GB")
    ('H100', 'T4', None)
    """
    key = _key_of(name)
    if key in _BY_KEY:
        return _BY_KEY[key]
    for digits in (2, 3):  # a board's name, and the memory that its maker gives it
        kind, size = _BY_KEY.get(_key_of(key[:-digits])), key[-digits:]
        if kind is not None and size.isdecimal() and 0 <= int(size) * GIB - kind.memory <= _NAMED_MORE * kind.memory:
            return kind
    return None


def nearest_kinds(name: str) -> tuple[str, ...]:
    """Names that may have been meant: the sizes of a board that comes in several, else the most alike."""
    key = _key_of(name)
    if key in _SEVERAL:
        return _SEVERAL[key]
    near = nearest(key, _BY_KEY, most=3, cutoff=0.5)
    inside = [known for known in _BY_KEY if key and key in known and known not in near]
    return tuple(_BY_KEY[each].name for each in [*near, *inside][:4])


# Kinds that clusters and clouds have, by memory: for users who have no GPU yet, and choose.
COMMON_KINDS = ("T4", "RTX4090", "A100-40", "L40S", "A100-80", "H200", "B200")
MOST_COMMON_GPUS = 16  # that a plan for common GPUs takes at most


def common_kinds() -> list[GpuKind]:
    """The common kinds, smallest first."""
    return [kind for kind in map(find_kind, COMMON_KINDS) if kind is not None]


def gpus_of_kind(kind: GpuKind, count: int) -> tuple[GpuSpec, ...]:
    """So many of a kind, with nothing on them."""
    return tuple(GpuSpec(str(number), kind.name, kind.memory, kind.memory, kind.capability) for number in range(count))


# ---- GPUs in words: 4x40GB, 2x80GB+4x24GB, 8xH100 --------------------------------------------------------------------
#
# A gigabyte is 2^30 bytes. A size means a GPU that has all of it; a kind of GPU has what CUDA really gives out there.

MOST_GPUS = 1024
# Two thousand gigabytes on one gpu: a slip of the unit, for years to come.
_MOST_MB = 2 << 20

GRAMMAR = "write 4x40GB, 2x80GB+4x24GB, 4xA100-40 or 8xH100"

_COUNTED = re.compile(r"([+-]?\d{1,9})\s*[x×*]\s*(.+)", re.ASCII | re.IGNORECASE)
_SIZE = re.compile(r"\d{1,15}(?:\.\d{1,9})?\s*[mgt]i?b?", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII)


def parse_gpus(text: str, flag: str = "--gpus") -> tuple[GpuSpec, ...]:
    """The gpus that these words describe, labelled 0, 1, ... in that order.

    Raises UsageError with a sentence that says what to write: no unit, no or too many GPUs, an unknown kind (the
    nearest are named). ``flag``: what it calls the words.

    >>> [(gpu.label, gpu.name, gpu.total >> 20) for gpu in parse_gpus("2x40GB+RTX4090")]
    [('0', '40GB', 40960), ('1', '40GB', 40960), ('2', 'RTX4090', 24064)]
    """
    gpus: list[GpuSpec] = []
    prefix = f"{flag} {text!r}"
    for group in text.split("+"):
        count, word = _counted(group.strip(), prefix)
        name, total, capability = _described(word, count, prefix)
        if len(gpus) + count > MOST_GPUS:
            raise UsageError(f"{prefix}: {len(gpus) + count} GPUs; a plan is made for at most {MOST_GPUS}")
        gpus += [GpuSpec(str(len(gpus) + place), name, total, total, capability) for place in range(count)]
    return tuple(gpus)


def _counted(group: str, prefix: str) -> tuple[int, str]:
    """How many, and of what."""
    found = _COUNTED.fullmatch(group)
    if found is None:
        # A minus sign is a wrong count, not part of a name.
        if not group or group.startswith("-"):
            raise UsageError(f"{prefix}: {group!r} describes no GPUs; {GRAMMAR}")
        return 1, group
    count = int(found[1])
    if count < 1:
        raise UsageError(f"{prefix}: {count} GPUs; a plan needs at least 1")
    return count, found[2].strip()


def _described(word: str, count: int, prefix: str) -> tuple[str, int, tuple[int, int] | None]:
    """Name, bytes and capability of the GPUs that a word means."""
    if _NUMBER.fullmatch(word):
        kinds = [name for name in nearest_kinds(word) if word in name and len(word) > 2]
        meant = f"{count}x{word}GB" if not kinds else f"{count}x{kinds[0]} (or {count}x{word}MB)"
        raise UsageError(f"{prefix}: {word} of what? A size needs its unit: write {meant}")
    if _SIZE.fullmatch(word):
        try:
            mb = size_mb(word)
        except ValueError as problem:
            raise UsageError(f"{prefix}: {problem}") from problem
        if mb > _MOST_MB:
            raise UsageError(f"{prefix}: no GPU has {word}; {GRAMMAR}")
        return _size_word(mb), mb * MIB, None
    kind = find_kind(word)
    if kind is None:
        near = nearest_kinds(word)
        hint = f"did you mean {' or '.join(near)}?" if near else "give its memory: 4x40GB"
        raise UsageError(f"{prefix}: no kind of GPU {word!r} is known here; {hint}")
    return kind.name, kind.memory, kind.capability


def _size_word(mb: int) -> str:
    """``40GB``, or ``1500MB`` where that is no whole number of them."""
    return f"{mb // 1024}GB" if mb % 1024 == 0 else f"{mb}MB"


def gpus_option(gpus: Sequence[GpuSpec]) -> str:
    """These gpus as ``--gpus`` takes them. GPUs that are really there are named by their kind, others by their memory.

    >>> gpus_option(parse_gpus("2x80GB+4x24GB"))
    '2x80GB+4x24GB'
    """
    groups = [(name, len(list(same))) for name, same in groupby(gpus, key=_group_name)]
    return "+".join(f"{count}x{name}" for name, count in groups)


def _group_name(gpu: GpuSpec) -> str:
    kind = find_kind(gpu.name)
    # What is asked for by size has that size as its name; a real gpu of an unknown kind gets its whole gigabytes.
    return kind.name if kind is not None else _size_word(max(1, gpu.total // MIB))


# ---- what a GPU can compute with, by its CUDA compute capability -----------------------------------------------------
#
# Sources: the CUDA programming guide (arithmetic by capability: bfloat16 from 8.0, float16 from 5.3), torch's
# ``is_bf16_supported`` (emulated below 8.0), bitsandbytes' requirements (6.0 and above; its 8-bit product is fast
# only with the integer tensor cores of 7.5) and FlashAttention's (8.0).

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CapabilityVerdict:
    """Whether it can be done, and a sentence where it can't, or only badly; "" where all is well."""

    possible: bool
    sentence: str = ""


# Precision -> capability below which it can't be done, and below which it is slow; why.
_NEEDS: dict[Precision, tuple[Capability, Capability, str]] = {
    Precision.FP32: ((3, 5), (3, 5), ""),
    Precision.FP16: ((5, 3), (7, 0), "fp16 is slow below 7.0, where there are no tensor cores"),
    Precision.BF16: ((7, 0), (8, 0), "bf16 is emulated below 8.0 and slow; fp16 is fast there"),
    Precision.INT8: ((6, 0), (7, 5), "bitsandbytes' int8 is slow below 7.5, where there are no int8 tensor cores"),
    Precision.NF4: ((6, 0), (7, 5), "bitsandbytes' 4-bit is slow below 7.5"),
    Precision.NF4_DQ: ((6, 0), (7, 5), "bitsandbytes' 4-bit is slow below 7.5"),
}
# Method of a checkpoint that is quantised already -> capability below which transformers (5.23) unpacks it to bf16, or
# refuses to load it: those of its quantizers.
_STORED_NEEDS: dict[str, Capability] = {"fp8": (8, 9), "fbgemm_fp8": (9, 0), "mxfp4": (7, 5)}
UNPACKED = frozenset({"fp8", "mxfp4"})


def capability_verdict(
    precision: Precision, capability: Capability | None, stored_method: str | None = None
) -> CapabilityVerdict:
    """What a GPU of this capability makes of this precision. Unknown capabilities are taken to be enough.

    ``stored_method``: of weights that are quantised already, and are to stay so.
    """
    what, instead, method = f"{precision} needs", "", stored_method or ""
    if precision is Precision.AS_STORED:
        what = f"weights stored as {method} need"
        instead = "; transformers would unpack them to bf16" if method in UNPACKED else ""
        least = fast = _STORED_NEEDS.get(method, (0, 0))
        slow = ""
    else:
        least, fast, slow = _NEEDS[precision]
    if capability is None or capability >= fast:
        return CapabilityVerdict(True)
    if capability >= least:
        return CapabilityVerdict(True, slow)
    needed, has = "{}.{}".format(*least), "{}.{}".format(*capability)
    return CapabilityVerdict(False, f"{what} compute capability {needed}; it has {has}{instead}")


def split_by_capability(
    precision: Precision, gpus: Sequence[GpuSpec], stored_method: str | None = None
) -> tuple[tuple[GpuSpec, ...], tuple[str, ...]]:
    """The gpus that can compute with this precision, and what a person should know of the others and of slow ones."""
    verdicts = [(gpu, capability_verdict(precision, gpu.capability, stored_method)) for gpu in gpus]
    able = tuple(gpu for gpu, found in verdicts if found.possible)
    sentences = [
        f"GPU {gpu.label} ({gpu.name}) can't be used: {found.sentence}"
        if not found.possible
        else f"on GPU {gpu.label} ({gpu.name}) {found.sentence}"
        for gpu, found in verdicts
        if found.sentence
    ]
    return able, tuple(sentences)
