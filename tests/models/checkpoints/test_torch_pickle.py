"""PyTorch files: read as torch.load(weights_only=True) reads them, without ever running what is in them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.open import open_checkpoint


def state_dict() -> dict[str, Any]:
    torch.manual_seed(3)
    base = torch.randn(40, 30)
    return OrderedDict(
        {
            "plain": torch.randn(7, 5),
            "parameter": torch.nn.Parameter(torch.randn(4, 3)),
            "bf16": torch.randn(6, 6).bfloat16(),
            "half": torch.randn(6, 6).half(),
            "double": torch.randn(2, 3, 4).double(),
            "transposed": torch.randn(5, 8).t(),
            "view": base[10:20, 5:9],
            "same_storage": base,
            "permuted": torch.randn(3, 4, 5).permute(2, 0, 1),
            "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "empty": torch.zeros(0, 3),
            "ids": torch.arange(5),
        }
    )


@pytest.mark.parametrize("zip_format", [True, False])
def test_equal_to_torch(tmp_path: Path, zip_format: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(state_dict(), path, _use_new_zipfile_serialization=zip_format)
    wanted = torch.load(path, weights_only=True)
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.tensors) == list(wanted)
    for name, tensor in wanted.items():
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
        if tensor.is_floating_point():
            numbers = tensor.detach()
            numbers = numbers if numbers.dtype == torch.float64 else numbers.float()
            assert np.array_equal(checkpoint.read(name), numbers.numpy()), name
            if len(tensor) > 3:
                assert np.array_equal(checkpoint.read(name, 1, 3), numbers.numpy()[1:3]), name


def test_tied_weights_are_known_by_their_storage(tmp_path: Path) -> None:
    shared = torch.randn(8, 4)
    torch.save({"wte.weight": shared, "h.weight": torch.randn(8, 4), "lm_head.weight": shared}, tmp_path / "m.bin")
    tensors = open_checkpoint(tmp_path / "m.bin").tensors
    assert [tensors[name].shares for name in tensors] == [None, None, "wte.weight"]


@pytest.mark.parametrize("nest", ["state_dict", "model"])
def test_weights_one_level_down(tmp_path: Path, nest: str) -> None:
    torch.save({"epoch": 3, nest: {"w": torch.ones(2, 2)}, "note": "text"}, tmp_path / "m.pt")
    assert list(open_checkpoint(tmp_path / "m.pt").tensors) == ["w"]


class Evil:
    """Makes a pickle that creates a file when it is opened carelessly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zip_format", [True, False])
def test_a_pickle_that_wants_code_is_refused_and_not_run(tmp_path: Path, zip_format: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.ones(2), "x": Evil(tmp_path / "run")}, path, _use_new_zipfile_serialization=zip_format)
    with pytest.raises(BadModel, match=r"wants to run code \((posix|os)\.mkdir\)"):
        open_checkpoint(path)
    assert not (tmp_path / "run").exists()


def test_a_whole_module_is_refused(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "m.pt")
    with pytest.raises(BadModel, match="wants to run code"):
        open_checkpoint(tmp_path / "m.pt")


def test_other_content(tmp_path: Path) -> None:
    cases: dict[str, Any] = {"number": 3, "list": [torch.ones(2)], "no tensor": {"a": 1}, "numbers": {1: torch.ones(2)}}
    for name, content in cases.items():
        torch.save(content, tmp_path / "m.pt")
        with pytest.raises(BadModel, match="no state dictionary"):
            open_checkpoint(tmp_path / "m.pt")
        assert name
    (tmp_path / "m.pt").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(BadModel, match=r"no file of PyTorch weights"):
        open_checkpoint(tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "z.bin", "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(BadModel, match=r"no data.pkl"):
        open_checkpoint(tmp_path / "z.bin")


def test_torchscript_is_told(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        archive.writestr("m/data.pkl", b"x")
        archive.writestr("m/constants.pkl", b"x")
    with pytest.raises(BadModel, match="TorchScript"):
        open_checkpoint(tmp_path / "m.pt")


@pytest.mark.parametrize("zip_format", [True, False])
def test_truncated(tmp_path: Path, zip_format: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.ones(100, 100)}, path, _use_new_zipfile_serialization=zip_format)
    whole = path.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 10_000, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(BadModel, match=r"pytorch_model.bin"):
            open_checkpoint(path)


@settings(max_examples=150, deadline=None)
@given(
    zip_format=st.booleans(), flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_fuzzed_files_open_or_give_our_error(
    tmp_path_factory: pytest.TempPathFactory, zip_format: bool, flips: list[tuple[float, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.bin"
    torch.save({"a": torch.ones(3, 4), "b": torch.ones(5).half()}, path, _use_new_zipfile_serialization=zip_format)
    data = bytearray(path.read_bytes())
    for place, value in flips:
        data[int(place * (len(data) - 1))] = value
    path.write_bytes(bytes(data))
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors:
            checkpoint.read(name)
    except BadModel as problem:
        assert str(problem)


def test_a_few_bytes_can_not_claim_much_memory(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "m.bin")
    with pytest.raises(BadModel, match="beyond its storage"):
        open_checkpoint(tmp_path / "m.bin")


class _Rebuilt:
    """Pickles as a tensor whose storage is replaced afterwards, by what pickle calls its state."""

    def __reduce__(self) -> Any:
        return (
            torch._utils._rebuild_tensor_v2,
            (_Place(), 0, (2, 2), (2, 1), False, OrderedDict()),
            [5, "F32", 0, (2, 2), (2, 1)],
        )


class _Place:
    """Becomes a reference to a storage."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.FloatStorage, "0", "cpu", 4) if isinstance(obj, _Place) else None


def test_a_pickle_that_fills_a_tensor_with_nonsense(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("archive/data.pkl", "w") as stream:
            _Pickler(stream, protocol=2).dump({"w.weight": _Rebuilt()})
        archive.writestr("archive/data/0", bytes(16))
    with pytest.raises(BadModel, match="damaged or no PyTorch file"):
        open_checkpoint(path)


def test_a_shape_that_no_array_has(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w.weight": torch.zeros(0, 1 << 40), "v": torch.ones(2)}, path)
    assert len(open_checkpoint(path).tensors) == 2
    torch.save({"w.weight": torch.ones(2).reshape((1,) * 64 + (2,))}, path)
    with pytest.raises(BadModel, match="has 65 axes"):
        open_checkpoint(path)


def test_views_that_overlap_without_end(tmp_path: Path) -> None:
    """Each is of another place, so none is tied to another; together they would be work for days."""
    path, numbers = tmp_path / "pytorch_model.bin", torch.randn(1000)
    views = {f"h.{start}.weight": numbers[start : start + 900].reshape(30, 30) for start in range(90)}
    torch.save(dict(list(views.items())[:60]), path)
    assert len(open_checkpoint(path).tensors) == 60
    torch.save(views, path)
    with pytest.raises(BadModel, match="64 times over"):
        open_checkpoint(path)


def test_torch_is_not_imported(tmp_path: Path) -> None:
    torch.save({"w.weight": torch.ones(4, 4)}, tmp_path / "pytorch_model.bin")
    code = (
        "import sys; from pathlib import Path; from gpuherd.models.subject import examine; "
        f"print(examine({str(tmp_path)!r}).num_matrices, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]


def rezipped(path: Path, change: Callable[[zipfile.ZipFile, zipfile.ZipInfo, bytes], None]) -> None:
    """Writes an archive of torch anew, each member as ``change`` adds it."""
    with zipfile.ZipFile(path) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for info, content in members:
            change(archive, info, content)


def test_members_that_are_compressed(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"w": torch.zeros(1000, 1000)}, path)
    rezipped(path, lambda archive, info, content: archive.writestr(info.filename, content, zipfile.ZIP_DEFLATED))
    with pytest.raises(BadModel, match="its weights are compressed"):
        open_checkpoint(path)


def test_a_pickle_that_unpacks_to_much_more_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("archive/data.pkl", "w") as stream:
            for _ in range(101):
                stream.write(bytes(1_000_000))
        archive.writestr("archive/data/0", bytes(16))
    assert path.stat().st_size < 1_000_000
    with pytest.raises(BadModel, match="its pickle of 101000000 bytes is over the limit"):
        open_checkpoint(path)


def test_a_pickle_that_claims_a_text_larger_than_any_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    for opcode in (pickle.BINUNICODE8, pickle.BINBYTES8, pickle.BYTEARRAY8):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(
                "archive/data.pkl", pickle.PROTO + b"\5" + opcode + (1 << 50).to_bytes(8, "little") + b"x."
            )
        with pytest.raises(BadModel, match="damaged or no PyTorch file"):
            open_checkpoint(path)


def test_names_that_lead_out_of_the_archive_are_only_names(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"w": torch.ones(2)}, path)

    def out(archive: zipfile.ZipFile, info: zipfile.ZipInfo, content: bytes) -> None:
        archive.writestr(info.filename.replace("data/0", "data/../../../0"), content)

    rezipped(path, out)
    with pytest.raises(BadModel, match="the numbers of tensor 'w' are not in it"):
        open_checkpoint(path)
    assert [file.name for file in tmp_path.iterdir()] == ["m.bin"]


def test_a_member_that_is_listed_under_many_names(tmp_path: Path) -> None:
    """A few bytes for each name would claim the whole of it as work."""
    path = tmp_path / "m.bin"
    weights = torch.ones(2, 1000)
    torch.save({"v": weights, "w": weights + 1}, path)
    with zipfile.ZipFile(path, "a") as archive:
        members = {info.filename.rpartition("/")[2]: info for info in archive.infolist()}
        members["1"].header_offset = members["0"].header_offset
        archive.writestr("m/comment", "")  # so that the list of members is written anew
    with pytest.raises(BadModel, match="storage '1' overlaps another"):
        open_checkpoint(path)
