"""Checkpoints: every stored number comes back exactly, and every kind of damage is named."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.checkpoints.open import open_checkpoint


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_values_are_exact(tmp_path: Path, dtype: torch.dtype, ending: str) -> None:
    values = (torch.randn(37, 11, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-7]).to(dtype)
    state = {"a.weight": values, "b": special, "scalar": torch.tensor(3.0).to(dtype), "none": torch.zeros(0, 4)}
    path = tmp_path / f"x.{ending}"
    save_file(state, path) if ending == "safetensors" else torch.save(state, path)
    checkpoint = open_checkpoint(path)
    for name, tensor in state.items():
        wanted = tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32).numpy()
        got = checkpoint.read(name)
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        assert got.tobytes() == wanted.tobytes() or np.array_equal(got, wanted, equal_nan=True)
    assert np.array_equal(checkpoint.read("a.weight", 5, 9), checkpoint.read("a.weight")[5:9])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_sixteen_bit_patterns(tmp_path: Path, dtype: torch.dtype) -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    save_file({"w": patterns}, tmp_path / "x.safetensors")
    got = open_checkpoint(tmp_path / "x.safetensors").read("w")
    assert np.array_equal(got, patterns.float().numpy(), equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(patterns.float().numpy()))


def test_a_big_tensor_in_several_panels(tmp_path: Path) -> None:
    values = torch.randn(3000, 2000).to(torch.bfloat16)
    save_file({"w": values}, tmp_path / "x.safetensors")
    assert np.array_equal(open_checkpoint(tmp_path / "x.safetensors").read("w"), values.float().numpy())


def test_reading_keeps_nothing_and_maps_nothing(tmp_path: Path) -> None:
    save_file({f"w{number}": torch.ones(1000, 1000) for number in range(8)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for name in checkpoint.tensors:
        checkpoint.read(name)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


SPOILT: dict[str, tuple[Any, bytes, str]] = {
    "no header": (b"", b"", "damaged header"),
    "not json": (b"{nonsense", b"", "damaged header"),
    "a list": ([1], b"", "no JSON object"),
    "deep": (b"[" * 100_000, b"", "damaged header"),
    "entry is no object": ({"w": 5}, b"", "damaged entry"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [1]}}, b"", "damaged entry"),
    "negative": ({"w": entry("F32", [-1], 0, 4)}, b"0000", "damaged entry"),
    "text as size": ({"w": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, b"0000", "damaged entry"),
    "unknown format": ({"w": entry("Q4", [1], 0, 4)}, b"0000", "unknown format 'Q4'"),
    "wrong size": ({"w": entry("F32", [2], 0, 4)}, b"0000", "needs 8 bytes, not 4"),
    "overlap": ({"v": entry("F32", [2], 0, 8), "w": entry("F32", [1], 4, 8)}, b"0" * 8, "overlaps another"),
    "gap": ({"w": entry("F32", [1], 4, 8)}, b"0" * 8, "leaves a gap"),
    "truncated": ({"w": entry("F32", [100], 0, 400)}, b"0" * 399, "truncated"),
    "trailing": ({"w": entry("F32", [1], 0, 4)}, b"0" * 5, "1 bytes too many"),
    "twice": (b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],'
              b'"data_offsets":[0,4]}}', b"0000", "'w' is listed twice"),
    "a size beside none": ({"w": entry("F32", [0, 10**30], 0, 0)}, b"", "no array can have"),
    "many axes": ({"w": entry("F32", [1] * 65, 0, 4)}, b"0000", "has 65 axes"),
    "nothing in it": ({"__metadata__": {"format": "pt"}}, b"", "no tensor in"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_damaged_safetensors_are_told_by_file(tmp_path: Path, case: str) -> None:
    header, data, reason = SPOILT[case]
    path = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(BadModel, match=reason) as caught:
        open_checkpoint(path)
    assert "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_twice_among_many_is_found_at_once(tmp_path: Path) -> None:
    """It took time by the square of the names: hours for a header that the limit lets pass."""
    names = [*range(40_000), 39_999]
    listed = ",".join(f'"{name}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for name in names)
    path = write(tmp_path / "model.safetensors", b"{" + listed.encode() + b"}", b"")
    began = time.process_time()
    with pytest.raises(BadModel, match="'39999' is listed twice"):
        open_checkpoint(path)
    assert time.process_time() - began < 4


@pytest.mark.parametrize("content", [b"", b"\1", b"\xff" * 8, struct.pack("<Q", 10**9) + b"{}"])
def test_short_or_lying_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BadModel, match=r"model.safetensors (is empty|is truncated)"):
        open_checkpoint(tmp_path)


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 400), flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3))
def test_fuzzed_safetensors_open_or_give_our_error(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flips: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    save_file({"a": torch.ones(3, 4), "b": torch.ones(5).half()}, path)
    data = bytearray(path.read_bytes())
    for place, value in flips:
        data[place % len(data)] = value
    path.write_bytes(bytes(data[: len(data) - cut % 50]))
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors:
            checkpoint.read(name)
    except BadModel as problem:
        assert str(path) in str(problem) or "tensor" in str(problem)


def shard(folder: Path) -> None:
    save_file({"a.weight": torch.ones(2, 2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b.weight": torch.ones(2, 2) * 2}, folder / "model-00002-of-00002.safetensors")


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


GOOD_MAP = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}


def test_sharded(tmp_path: Path) -> None:
    shard(tmp_path)
    index(tmp_path, GOOD_MAP)
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["a.weight", "b.weight"]
    assert checkpoint.read("b.weight")[0, 0] == 2


def test_sharded_pickles(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2, 2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b.weight": torch.ones(2, 2)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {"a.weight": "pytorch_model-00001-of-00002.bin", "b.weight": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(open_checkpoint(tmp_path).tensors) == 2


@pytest.mark.parametrize(
    ("weight_map", "error", "reason"),
    [
        ({"a.weight": "../../etc/passwd"}, BadModel, "no file of this folder"),
        ({"a.weight": "/etc/passwd"}, BadModel, "no file of this folder"),
        ({"a.weight": "sub/model.safetensors"}, BadModel, "no file of this folder"),
        ({"a.weight": 3}, BadModel, "no file of this folder"),
        ({"a.weight": "x\0y"}, BadModel, "no file of this folder"),
        ({"a.weight": "x" * 300}, MissingModel, "lists shard"),
        ({"a.weight": "\ud800.safetensors"}, MissingModel, "lists shard"),
        ({}, BadModel, "no weight_map"),
        ([], BadModel, "no weight_map"),
        ({**GOOD_MAP, "c.weight": "model-00003-of-00003.safetensors"}, MissingModel, "model-00003-of-00003"),
        ({**GOOD_MAP, "c.weight": "model-00001-of-00002.safetensors"}, BadModel, "'c.weight' is not in shard"),
        ({**GOOD_MAP, "b.weight": "model-00001-of-00002.safetensors"}, BadModel, "'b.weight' is not in shard"),
    ],
)
def test_bad_indexes(tmp_path: Path, weight_map: Any, error: type[BadModel], reason: str) -> None:
    shard(tmp_path)
    index(tmp_path, weight_map)
    with pytest.raises(error, match=reason):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    shard(tmp_path)
    save_file({"a.weight": torch.ones(1), "b.weight": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    index(tmp_path, GOOD_MAP)
    with pytest.raises(BadModel, match=r"'a.weight' is both in"):
        open_checkpoint(tmp_path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    shard(tmp_path)
    assert len(open_checkpoint(tmp_path).tensors) == 2
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MissingModel, match="shard 2 of 2"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model-00007-of-00002.safetensors", "model-00000-of-00002.safetensors"])
def test_a_shard_too_many(tmp_path: Path, name: str) -> None:
    """Of another model or another saving: it was analysed as if it were a part."""
    shard(tmp_path)
    save_file({"c.weight": torch.ones(2, 2)}, tmp_path / name)
    with pytest.raises(BadModel, match="is not clear"):
        open_checkpoint(tmp_path)


def test_safetensors_before_pickles(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    torch.save({"b.weight": torch.ones(2, 2)}, tmp_path / "pytorch_model.bin")
    save_file({"c.weight": torch.ones(2, 2)}, tmp_path / "consolidated.00.safetensors")
    assert list(open_checkpoint(tmp_path).tensors) == ["a.weight"]


def test_one_file_of_another_name_among_those_of_training(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "my_weights.safetensors")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        (tmp_path / name).write_bytes(b"not a model")
    assert list(open_checkpoint(tmp_path).tensors) == ["a.weight"]
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(BadModel, match="several weight files"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "is an empty folder"),
        ({"config.json": "{}"}, "has a config.json but no weights"),
        ({"notes.txt": "hello"}, "is no model folder"),
        ({"model-q4.gguf": "GGUF"}, "is truncated or damaged"),
        ({"config.json": "{}", "tf_model.h5": "x"}, "only as TensorFlow"),
        ({"adapter_config.json": "{}"}, "is an adapter without model weights"),
        ({"config.json": "{oh", "model.safetensors": ""}, "can't be read as JSON"),
        ({"config.json": "[]", "model.safetensors": ""}, "holds no JSON object"),
    ],
)
def test_folders_that_are_no_models(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(BadModel, match=reason):
        open_checkpoint(tmp_path)


def test_missing_things(tmp_path: Path) -> None:
    with pytest.raises(MissingModel, match="is not there"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob-that-is-not-there")
    with pytest.raises(MissingModel, match=r"model.safetensors is not there"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("x.gguf", "truncated"), ("x.h5", "TensorFlow"), ("x.txt", "no weight file"), ("x.onnx", "ONNX")],
)
def test_single_files_of_other_kinds(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(BadModel, match=reason):
        open_checkpoint(tmp_path / name)


def test_a_folder_in_place_of_a_file_and_a_pipe(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match="no regular file"):
        open_checkpoint(tmp_path)


def test_a_file_changed_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(2, 2)}, path)
    checkpoint = open_checkpoint(path)
    save_file({"w": torch.ones(3, 3)}, path)
    with pytest.raises(BadModel, match="was changed while it was being read"):
        checkpoint.read("w")
    path.unlink()
    with pytest.raises(MissingModel, match="is not there"):
        checkpoint.read("w")


def test_integers_are_not_read_as_weights(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 2), "ids": torch.arange(3)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["ids"].dtype == "I64"
    with pytest.raises(BadModel, match="stored as I64"):
        checkpoint.read("ids")


def test_the_config_beside_the_weights(tiny: Callable[..., tuple[Any, Path]]) -> None:
    model, folder = tiny("llama")
    for path in (folder, folder / "model.safetensors"):
        checkpoint = open_checkpoint(path)
        assert checkpoint.config["model_type"] == "llama"
        assert set(checkpoint.tensors) == set(model.state_dict())


def test_a_huge_header_is_quick(tmp_path: Path) -> None:
    """A model of half a terabyte: 100 shards, 30,000 tensors; only headers are there to be read (the files are sparse).

    It takes a second; a look at all tensors for each shard would take minutes.
    """
    import os
    import time

    weight_map = {}
    for number in range(100):
        file = f"model-{number + 1:05}-of-00100.safetensors"
        size = 2 * 2048 * 4096
        header = {f"model.layers.{number}.mlp.experts.{e}.up_proj.weight":
                  entry("BF16", [2048, 4096], e * size, (e + 1) * size) for e in range(300)}  # fmt: skip
        weight_map.update(dict.fromkeys(header, file))
        write(tmp_path / file, header)
        os.truncate(tmp_path / file, (tmp_path / file).stat().st_size + 300 * size)
    index(tmp_path, weight_map)
    started = time.process_time()
    checkpoint = open_checkpoint(tmp_path)
    assert sum(info.nbytes for info in checkpoint.tensors.values()) > 5 * 10**11
    assert time.process_time() - started < 8


# VmHWM is the peak of this program; ru_maxrss would have that of the process that started it.
MEASURE = """
import re, sys
from pathlib import Path
from gpuherd.models.checkpoints.open import open_checkpoint

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

checkpoint = open_checkpoint(Path(sys.argv[1]))
checkpoint.read("small")
before = peak()
for name in ("first", "second", "third"):
    checkpoint.read(name)
print(peak() - before)
"""


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_peak_memory_is_that_of_one_tensor(tmp_path: Path, name: str) -> None:
    """Three bfloat16 tensors of 32 MB: each is 64 MB as float32, and a panel of 8 MB comes on top."""
    tensors = {key: torch.zeros(4096, 4096, dtype=torch.bfloat16) for key in ("first", "second", "third")}
    tensors["small"] = torch.zeros(4, 4, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / name) if name.endswith("safetensors") else torch.save(tensors, tmp_path / name)
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)
    assert 60 < float(done.stdout) < 64 + 8 + 8
