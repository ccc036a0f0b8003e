"""Kinds of GPU by the names that people use, with the memory that programs really get on them. Data, pure.

``A100-40`` has not 40 GiB: firmware, page tables and error correction take their part. The figures are what
``torch.cuda.mem_get_info`` reports as total on an idle card, rounded down to 0.1 GiB, from the makers' and users'
reports; drivers differ by up to 0.3 GiB, so the lower figure stands here. An MI250 or MI250X is two GPUs to programs;
its figure is that of one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuherd.gpus.state import Maker
from gpuherd.options import nearest

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of GPU: its name here, memory in bytes that can be used, CUDA compute capability (None for AMD)."""

    name: str
    memory: int
    capability: tuple[int, int] | None
    maker: Maker = Maker.NVIDIA


def _kind(name: str, gib: float, capability: str) -> Kind:
    major, minor = capability.split(".")
    return Kind(name, int(gib * GIB), (int(major), int(minor)))


def _instinct(name: str, gib: float) -> Kind:
    return Kind(name, int(gib * GIB), None, Maker.AMD)


KINDS: tuple[Kind, ...] = (
    _kind("A2", 14.5, "8.6"),
    _kind("A10", 22.0, "8.6"),
    _kind("A10G", 22.0, "8.6"),
    _kind("A16", 14.5, "8.6"),
    _kind("A30", 23.5, "8.0"),
    _kind("A40", 44.3, "8.6"),
    _kind("A100-40", 39.4, "8.0"),
    _kind("A100-80", 79.2, "8.0"),
    _kind("B200", 178.3, "10.0"),
    _kind("GH200", 94.5, "9.0"),
    _kind("H100", 79.1, "9.0"),
    _kind("H100-NVL", 93.1, "9.0"),
    _kind("H20", 95.0, "9.0"),
    _kind("H200", 139.7, "9.0"),
    _kind("L4", 22.0, "8.9"),
    _kind("L40", 44.3, "8.9"),
    _kind("L40S", 44.3, "8.9"),
    _kind("P40", 22.3, "6.1"),
    _kind("P100", 15.8, "6.0"),
    _kind("T4", 14.5, "7.5"),
    _kind("V100-16", 15.7, "7.0"),
    _kind("V100-32", 31.7, "7.0"),
    _kind("GTX1080Ti", 10.9, "6.1"),
    _kind("RTX2080Ti", 10.5, "7.5"),
    _kind("RTX3060", 11.6, "8.6"),
    _kind("RTX3080", 9.6, "8.6"),
    _kind("RTX3090", 23.5, "8.6"),
    _kind("RTX4060Ti-16", 15.5, "8.9"),
    _kind("RTX4070", 11.5, "8.9"),
    _kind("RTX4080", 15.5, "8.9"),
    _kind("RTX4090", 23.5, "8.9"),
    _kind("RTX5080", 15.4, "12.0"),
    _kind("RTX5090", 31.3, "12.0"),
    _kind("RTX-A4000", 15.6, "8.6"),
    _kind("RTX-A5000", 23.5, "8.6"),
    _kind("RTX-A6000", 47.4, "8.6"),
    _kind("RTX6000-Ada", 47.3, "8.9"),
    _kind("RTX8000", 47.3, "7.5"),
    _kind("RTX-PRO-6000", 94.9, "12.0"),
    _instinct("MI100", 31.6),
    _instinct("MI210", 63.6),
    _instinct("MI250", 63.6),
    _instinct("MI250X", 63.6),
    _instinct("MI300X", 191.6),
    _instinct("MI325X", 255.6),
    _instinct("MI350X", 287.6),
    _instinct("MI355X", 287.6),
)

# Words of longer names that say nothing of which kind it is: NVIDIA A100-SXM4-40GB, NVIDIA GeForce RTX 4090.
_NOISE = re.compile(
    r"nvidia|geforce|tesla|quadro|sxm\d?|pcie?|hbm\de?|generation|tensorcore|amd|instinct|oam|simulated", re.ASCII
)
# Other keys of the same kinds: with the memory that all of them have, without what their maker adds.
_ALSO = {
    "6000ada": "rtx6000ada",
    "a1024": "a10",
    "a10g24": "a10g",
    "a3024": "a30",
    "a4000": "rtxa4000",
    "a4048": "a40",
    "a5000": "rtxa5000",
    "a6000": "rtxa6000",
    "b200180": "b200",
    "gh200480": "gh200",
    "gh20096": "gh200",
    "h10080": "h100",
    "h10094": "h100nvl",
    "h200141": "h200",
    "l40s48": "l40s",
    "mi10032": "mi100",
    "mi21064": "mi210",
    "mi25064": "mi250",
    "mi250x64": "mi250x",
    "mi300x192": "mi300x",
    "mi325x256": "mi325x",
    "l424": "l4",
    "p10016": "p100",
    "rtx309024": "rtx3090",
    "rtx409024": "rtx4090",
    "rtx509032": "rtx5090",
    "rtxa600048": "rtxa6000",
    "t416": "t4",
}


def key_of(name: str) -> str:
    """The name without what people write differently.

    >>> key_of("NVIDIA A100-SXM4-40GB"), key_of("RTX 4090"), key_of("geforce rtx4090"), key_of("H100-80GB")
    ('a10040', 'rtx4090', 'rtx4090', 'h100')
    """
    bare = re.sub(r"(\d)\s*gi?b\b", r"\1", name.casefold())
    key = re.sub(r"[^a-z0-9]", "", _NOISE.sub("", bare))
    return _ALSO.get(key, key)


_BY_KEY = {key_of(kind.name): kind for kind in KINDS}
# A board name alone that comes in several sizes.
_SEVERAL = {"a100": ("A100-40", "A100-80"), "v100": ("V100-16", "V100-32"), "rtx4060ti": ("RTX4060Ti-16",)}


def kind_named(name: str) -> Kind | None:
    """The kind that is meant, None for a name that is unknown or could mean several."""
    return _BY_KEY.get(key_of(name))


def nearest_kinds(name: str) -> tuple[str, ...]:
    """Names that may have been meant: the sizes of a board that comes in several, else the most alike."""
    key = key_of(name)
    if key in _SEVERAL:
        return _SEVERAL[key]
    near = nearest(key, _BY_KEY, most=3, cutoff=0.5)
    inside = [known for known in _BY_KEY if key and key in known and known not in near]
    return tuple(_BY_KEY[each].name for each in [*near, *inside][:4])
