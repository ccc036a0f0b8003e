"""Slabs: every number of a matrix once, from its own bytes, whatever tensor it lies in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.open import open_checkpoint
from gpuherd.models.tensors.matrices import WeightMatrix, matrices
from gpuherd.models.tensors.source import FloatArray, Region, Run, TensorInfo, clip, read_region, slabs

Tiny = Callable[..., tuple[Any, Path]]


@dataclass
class Counted:
    """A source in memory that counts how often each number is read."""

    values: FloatArray
    reads: FloatArray = field(init=False)
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reads = np.zeros(self.values.shape)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {"w": TensorInfo("w", self.values.shape, "F64", self.values.nbytes)}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> FloatArray:
        self.reads[start:stop] += 1
        return self.values[start:stop]

    def has_blocks(self, name: str) -> bool:
        return True

    def read_block(self, name: str, rows: Run, columns: Run) -> FloatArray:
        self.reads[slice(*rows), slice(*columns)] += 1
        return self.values[slice(*rows), slice(*columns)]


@settings(deadline=None)
@given(
    cuts=st.lists(st.integers(0, 30), min_size=2, max_size=8, unique=True),
    columns=st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda pair: (min(pair), max(pair))),
    most=st.integers(1, 40),
)
def test_slabs_partition_the_matrix(cuts: list[int], columns: Run, most: int) -> None:
    edges = sorted(cuts)[: len(cuts) // 2 * 2]
    runs = tuple(zip(edges[::2], edges[1::2], strict=True))
    source = Counted(np.arange(30 * 12, dtype=np.float64).reshape(30, 12))
    region = Region("w", runs, columns)
    wanted = np.concatenate([source.values[slice(*run)] for run in runs])[:, slice(*columns)]
    assert region.shape == wanted.shape
    pieces = list(slabs(source, region, most))
    along = 0 if wanted.shape[0] >= wanted.shape[1] else 1
    assert all(0 < piece.shape[along] <= most for piece in pieces)
    if pieces:
        assert np.array_equal(np.concatenate(pieces, axis=along), wanted)
    assert source.reads.sum() == wanted.size and source.reads.max(initial=0) <= 1
    assert np.array_equal(read_region(source, region), wanted)


def test_clip() -> None:
    assert clip([(0, 3), (10, 12)], 0, 5) == [(0, 3), (10, 12)]
    assert clip([(0, 3), (10, 12)], 3, 4) == [(10, 11)]
    assert clip([(0, 3)], 3, 9) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(300, 40), (40, 300), (64, 64)])
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_slabs_from_disk(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, int], ending: str) -> None:
    weight = torch.randn(*shape).to(dtype)
    path = tmp_path / f"m.{ending}"
    save_file({"a.weight": weight}, path) if ending == "safetensors" else torch.save({"a.weight": weight}, path)
    (matrix,) = matrices(open_checkpoint(path))
    (whole,) = matrix.slices()
    assert np.array_equal(whole, weight.double().numpy())
    before = bytes_read()
    pieces = list(matrix.slabs(37))
    assert (
        weight.numel() * weight.element_size() <= bytes_read() - before < weight.numel() * weight.element_size() + 999
    )
    assert [max(piece.shape) for piece in pieces[:1]] in ([40], [64])
    assert np.array_equal(np.concatenate(pieces, axis=0 if shape[0] >= shape[1] else 1), whole)
    assert all(piece.dtype == whole.dtype for piece in pieces)


def bytes_read() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def test_a_transposed_view_and_one_with_gaps_in_a_pickle(tmp_path: Path) -> None:
    big = torch.randn(50, 30)
    state = {"a.weight": big.t(), "b.weight": big[:, :9], "c.weight": big[::2, ::3], "d.weight": big[3:20]}
    torch.save(state, tmp_path / "m.bin")
    for matrix in matrices(open_checkpoint(tmp_path / "m.bin")):
        wanted = state[f"{matrix.longname}.weight"].numpy()
        assert np.array_equal(matrix.slices()[0], wanted)
        along = 0 if wanted.shape[0] >= wanted.shape[1] else 1
        assert np.array_equal(np.concatenate(list(matrix.slabs(4)), axis=along), wanted)


def every_matrix(folder: Path) -> list[WeightMatrix]:
    return [m for m in matrices(open_checkpoint(folder), embeddings=True) if m.skip is None]


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gpt2", "mixtral", "gpt_neox", "bloom", "falcon", "phi3", "gpt_bigcode", "codegen", "gpt_oss"],
)
def test_slabs_of_a_whole_model_read_each_number_once(tiny: Tiny, model_type: str) -> None:
    """Fused parts, experts, embeddings: the bytes of all matrices together, and no more."""
    _, folder = tiny(model_type)
    found = every_matrix(folder)
    stored = 4 * sum(matrix.params for matrix in found)
    for matrix in found:
        along = 0 if matrix.shape[0] >= matrix.shape[1] else 1
        assert np.array_equal(np.concatenate(list(matrix.slabs(11)), axis=along), matrix.slices()[0])
    before = bytes_read()
    for matrix in every_matrix(folder):
        for _ in matrix.slabs(11):
            pass
    headers = sum(path.stat().st_size for path in folder.iterdir() if path.suffix == ".json") + 100_000
    assert stored <= bytes_read() - before < stored + headers


# VmHWM is the peak of this program; ru_maxrss would have that of the process that started it.
MEASURE = """
import re, sys
from pathlib import Path
from gpuherd.models.checkpoints.open import open_checkpoint
from gpuherd.models.tensors.matrices import matrices

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

tall, wide = matrices(open_checkpoint(Path(sys.argv[1])))
next(tall.slabs(1))
before = peak()
for matrix in (tall, wide):
    for slab in matrix.slabs(4096):
        assert not slab.any()
print(peak() - before)
"""


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_peak_memory_is_that_of_one_slab(tmp_path: Path, name: str) -> None:
    """Two bfloat16 tensors of 64 MB, 128 MB as float32: a slab has 8 MB, and a panel of at most 8 MB comes on top.
    The last slab goes when the next one is there."""
    shapes = {"a.weight": (65536, 512), "b.weight": (512, 65536)}
    tensors = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    save_file(tensors, tmp_path / name) if name.endswith("safetensors") else torch.save(tensors, tmp_path / name)
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)
    assert 8 <= float(done.stdout) < 8 + 8 + 8 + 8


def test_slabs_of_less_than_one_row_are_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(4, 4), "conv.weight": torch.ones(2, 2, 3)}, tmp_path / "model.safetensors")
    linear, conv = matrices(open_checkpoint(tmp_path))
    with pytest.raises(ValueError, match="slabs of 0"):
        next(linear.slabs(0))
    with pytest.raises(ValueError, match="is a convolution"):
        next(conv.slabs(1))


@pytest.mark.parametrize("change", ["rewritten", "replaced", "gone", "truncated"])
def test_a_shard_that_changes_between_two_slabs_is_named(tmp_path: Path, change: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.ones(50, 20)}, path)
    (matrix,) = matrices(open_checkpoint(tmp_path))
    pieces = matrix.slabs(10)
    next(pieces)
    status = path.stat()
    if change == "gone":
        path.unlink()
    elif change == "truncated":
        os.truncate(path, status.st_size - 100)
    elif change == "rewritten":
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    else:
        other = tmp_path / "other"
        other.write_bytes(bytes(status.st_size))
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.rename(path)
    with pytest.raises(BadModel, match=r"model.safetensors (was changed while it was being read|is not there)"):
        list(pieces)
