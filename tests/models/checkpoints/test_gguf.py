"""GGUF: what the library wrote, number by number; its metadata, its shards, and every kind of damage."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.checkpoints import gguf as gguf_file
from gpuherd.models.checkpoints.gguf import config_of
from gpuherd.models.checkpoints.open import open_checkpoint
from gpuherd.models.tensors.matrices import WeightMatrix, matrices
from gpuherd.models.tensors.source import FloatArray

gguf = pytest.importorskip("gguf")

RANDOM = np.random.default_rng(5)
METADATA = {
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 96,
}


def write(path: Path, tensors: dict[str, Any], arch: str = "llama", **metadata: int) -> Path:
    """A file by the library's own writer. A tensor is an array, or (raw bytes, type)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (METADATA | metadata).items():
        writer.add_uint32(key.replace("__", ".").replace("llama.", f"{arch}."), value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {number}" for number in range(6000)])
    writer.add_array("tokenizer.ggml.scores", [float(number) for number in range(6000)])
    writer.add_string("tokenizer.chat_template", "x" * 5000)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def floats(*shape: int) -> FloatArray:
    return RANDOM.standard_normal(shape, dtype=np.float32)


def found(path: Path, **options: bool) -> dict[str, WeightMatrix]:
    return {m.longname: m for m in matrices(open_checkpoint(path), **options) if m.skip is None}


def by_library(path: Path, name: str) -> FloatArray:
    """The tensor as the library itself reads and dequantises it."""
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == name)
    weights: FloatArray = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return weights.reshape([int(size) for size in reversed(tensor.shape)])


QUANTISED = [
    kind
    for kind in gguf.constants.GGML_QUANT_SIZES
    if kind.name not in ("F32", "F16", "F64", "BF16", "I8", "I16", "I32", "I64")
]


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: str(kind.name))
def test_every_quantised_type_is_read_as_by_the_library_or_refused_by_name(tmp_path: Path, kind: Any) -> None:
    """Random bytes: any codes, any scales, NaN and infinite ones too."""
    block, size = gguf.constants.GGML_QUANT_SIZES[kind]
    columns = 2 * 256 if 256 % block == 0 else 2 * block
    raw = RANDOM.integers(0, 256, (40, columns // block * size), dtype=np.uint8)
    path = write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (raw, kind), "output_norm.weight": floats(7)})
    try:
        with np.errstate(all="ignore"):
            wanted = by_library(path, "blk.0.attn_q.weight")
    except NotImplementedError:
        with pytest.raises(BadModel, match=f"stored as {kind.name}, which the gguf library can't"):
            open_checkpoint(path)
        return
    checkpoint = open_checkpoint(path)
    info = checkpoint.tensors["blk.0.attn_q.weight"]
    assert (info.dtype, info.shape, info.nbytes, info.dequantized) == (kind.name, wanted.shape, raw.nbytes, True)
    (matrix,) = matrices(checkpoint)
    assert matrix.skip is None and matrix.shape == (40, columns)
    assert np.array_equal(matrix.slices()[0], wanted, equal_nan=True)
    assert np.array_equal(np.concatenate(list(matrix.slabs(77)), axis=1), wanted, equal_nan=True)
    part = checkpoint.read_block("blk.0.attn_q.weight", (3, 9), (5, 301 % columns))
    assert np.array_equal(part, wanted[3:9, 5 : 301 % columns], equal_nan=True)
    assert np.array_equal(checkpoint.read("blk.0.attn_q.weight", 7, 30), wanted[7:30], equal_nan=True)


def test_plain_formats(tmp_path: Path) -> None:
    values = floats(24, 64)
    tensors: dict[str, Any] = {
        "blk.0.attn_q.weight": values,
        "blk.0.attn_k.weight": values.astype(np.float16),
        "blk.0.attn_v.weight": (
            gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16),
            gguf.GGMLQuantizationType.BF16,
        ),
        "blk.0.ffn_up.weight": values.astype(np.float64),
        "ids": np.arange(8, dtype=np.int32).reshape(2, 4),
    }
    path = write(tmp_path / "m.gguf", tensors)
    for name, matrix in found(path).items():
        # The library's own reader does not turn float64 into numbers.
        wanted = values if name.endswith("ffn_up") else by_library(path, f"{name}.weight")
        assert np.array_equal(matrix.slices()[0], wanted)
    assert next(str(m.skip) for m in matrices(open_checkpoint(path)) if m.longname == "ids").startswith("stored as I32")


def test_names_experts_and_fused_parts(tmp_path: Path) -> None:
    """(4 + 2 * 2) heads of 64 rows; gate above up; three experts; the head is the embedding."""
    qkv, up, experts = floats(8 * 64, 256), floats(192, 256), floats(3, 16, 256)
    gate_up, down = floats(3, 32, 256), floats(3, 256, 16)
    path = write(
        tmp_path / "m.gguf",
        {
            "token_embd.weight": floats(50, 256),
            "blk.0.attn_qkv.weight": qkv,
            "blk.0.ffn_up.weight": up,
            "blk.1.ffn_gate_exps.weight": experts,
            "blk.2.ffn_gate_up_exps.weight": gate_up,
            "blk.2.ffn_down_exps.weight": down,
            "blk.0.attn_norm.weight": floats(256),
            "blk.0.ffn_down_exps.bias": floats(3, 256),
        },
    )
    got = {name: matrix.slices()[0] for name, matrix in found(path, embeddings=True).items()}
    assert len(got) == 1 + 3 + 2 + 3 + 6 + 3
    q, k, v = (got[f"blk.0.attn_qkv_{part}"] for part in "qkv")
    assert np.array_equal(np.concatenate([q, k, v]), qkv) and (len(q), len(k)) == (256, 128)
    assert np.array_equal(got["blk.0.ffn_up_gate"], up[:96]) and np.array_equal(got["blk.0.ffn_up_up"], up[96:])
    for expert in range(3):
        assert np.array_equal(got[f"blk.1.ffn_gate.{expert}"], experts[expert])
        assert np.array_equal(got[f"blk.2.ffn_gate.{expert}"], gate_up[expert, :16])
        assert np.array_equal(got[f"blk.2.ffn_up.{expert}"], gate_up[expert, 16:])
        assert np.array_equal(got[f"blk.2.ffn_down.{expert}"], down[expert])
    skipped = {m.longname: str(m.skip) for m in matrices(open_checkpoint(path)) if m.skip}
    assert "use --embeddings" in skipped["token_embd"]


def test_config() -> None:
    assert config_of(METADATA | {"general.architecture": "llama"}, ["token_embd.weight"]) == {
        "model_type": "gguf", "architecture": "llama", "tie_word_embeddings": True, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256, "intermediate_size": 96,
    }  # fmt: skip
    odd = {"general.architecture": ["x"], "llama.attention.head_count": [4, 4]}
    assert config_of(odd, ["output.weight"]) == {
        "model_type": "gguf", "architecture": ["x"], "tie_word_embeddings": False,
    }  # fmt: skip


def test_shards(tmp_path: Path) -> None:
    """Opened by the folder or by any of them; a missing one is named."""
    values = [floats(4, 32) for _ in range(3)]
    for number, value in enumerate(values):
        name = tmp_path / f"model-{number + 1:05d}-of-00003.gguf"
        write(name, {f"blk.{number}.attn_q.weight": value}, split__count=3)
    for path in (tmp_path, tmp_path / "model-00002-of-00003.gguf"):
        got = found(path)
        assert list(got) == [f"blk.{number}.attn_q" for number in range(3)]
        assert all(np.array_equal(m.slices()[0], v) for m, v in zip(got.values(), values, strict=True))
    (tmp_path / "model-00002-of-00003.gguf").rename(tmp_path / "other.gguf")
    with pytest.raises(BadModel, match="several weight files"):
        open_checkpoint(tmp_path)
    with pytest.raises(BadModel, match="one of 3 shards, but not named like"):
        open_checkpoint(tmp_path / "other.gguf")
    (tmp_path / "other.gguf").unlink()
    for path in (tmp_path, tmp_path / "model-00001-of-00003.gguf"):
        with pytest.raises(MissingModel, match="shard 2 of 3"):
            open_checkpoint(path)


def test_which_file_of_a_folder(tmp_path: Path) -> None:
    """A projector beside it is passed over; safetensors win; two quantised forms are a question to the user."""
    write(tmp_path / "model-q8.gguf", {"blk.0.attn_q.weight": floats(4, 32)})
    write(tmp_path / "mmproj-model.gguf", {"v.blk.0.attn_q.weight": floats(4, 32)})
    assert list(found(tmp_path)) == ["blk.0.attn_q"]
    write(tmp_path / "model-q4.gguf", {"blk.0.attn_q.weight": floats(4, 32)})
    with pytest.raises(BadModel, match="several weight files"):
        open_checkpoint(tmp_path)


def test_a_scale_apart_from_its_weights_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": floats(4, 32), "blk.0.attn_q.scale": floats(1)})
    with pytest.raises(BadModel, match="keeps the scale of its weights apart"):
        open_checkpoint(path)


def test_a_file_that_changes_is_named(tmp_path: Path) -> None:
    raw = gguf.quants.quantize(floats(64, 64), gguf.GGMLQuantizationType.Q8_0)
    path = write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (raw, gguf.GGMLQuantizationType.Q8_0)})
    pieces = found(path)["blk.0.attn_q"].slabs(8)
    next(pieces)
    path.write_bytes(path.read_bytes() + b"0")
    with pytest.raises(BadModel, match=r"m.gguf was changed while it was being read"):
        list(pieces)


def header(*, version: int = 3, tensors: int = 0, entries: bytes = b"", metadata: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, metadata) + entries


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(name: bytes, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


DAMAGED = {
    "empty": (b"", "is empty"),
    "other": (b"GGML" + bytes(40), "is no GGUF file"),
    "short": (b"GGUF\3\0", "truncated"),
    "version 1": (header(version=1), "unknown version 1"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "many tensors": (header(tensors=1 << 60), "truncated"),
    "many entries": (header(metadata=1 << 60), "truncated"),
    "a text without end": (header(metadata=1, entries=struct.pack("<Q", 1 << 62)), "truncated"),
    "a list without end": (header(metadata=1, entries=text(b"k") + struct.pack("<IIQ", 9, 6, 1 << 61)), "truncated"),
    "texts without end": (header(metadata=1, entries=text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 61)), "truncated"),
    "a list of lists": (header(metadata=1, entries=text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "list of the unknown"),
    "unknown metadata": (header(metadata=1, entries=text(b"k") + struct.pack("<I", 77)), "unknown type 77"),
    "alignment": (
        header(metadata=1, entries=text(b"general.alignment") + struct.pack("<II", 4, 0)),
        "an alignment of 0",
    ),
    "axes": (header(tensors=1, entries=text(b"w") + struct.pack("<I", 9)), "has 9 axes"),
    "unknown type": (header(tensors=1, entries=entry(b"w", [4], kind=999)), "unknown type 999"),
    "no whole blocks": (header(tensors=1, entries=entry(b"w", [33], kind=2)), "no whole blocks of 32"),
    "no numbers": (header(tensors=1, entries=entry(b"w", [1 << 40])), "reaches beyond its end"),
    "overlap": (
        header(tensors=2, entries=entry(b"v", [8]) + entry(b"w", [8], offset=8)) + bytes(256),
        "overlaps another",
    ),
    "twice": (
        header(tensors=2, entries=entry(b"w", [8]) + entry(b"w", [8], offset=32)) + bytes(256),
        "is listed twice",
    ),
    "a size beside none": (header(tensors=1, entries=entry(b"w", [1 << 63, 0])), "no array can have"),
    "nothing": (header(), "no tensor in"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_told_by_file(tmp_path: Path, case: str) -> None:
    content, reason = DAMAGED[case]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(BadModel, match=reason) as caught:
        open_checkpoint(tmp_path / "m.gguf")
    assert "m.gguf" in str(caught.value)


def test_a_header_over_the_limit(tmp_path: Path) -> None:
    with (tmp_path / "m.gguf").open("wb") as file:
        file.write(header(metadata=1, entries=text(b"k") + struct.pack("<IQ", 8, gguf_file.MAX_HEADER_BYTES)))
        file.truncate(2 * gguf_file.MAX_HEADER_BYTES)
    with pytest.raises(BadModel, match="or one of more than"):
        open_checkpoint(tmp_path / "m.gguf")


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 900), flips=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=3))
def test_fuzzed_files_open_or_give_our_error(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flips: list[tuple[int, int]]
) -> None:
    entries = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    entries += text(b"l") + struct.pack("<IIQ4f", 9, 6, 4, 1, 2, 3, 4)
    entries += entry(b"a.weight", [8, 4]) + entry(b"b.weight", [32, 4], kind=8, offset=128)
    data = bytearray(header(tensors=2, metadata=2, entries=entries) + bytes(600))
    for position, value in flips:
        data[position % len(data)] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(bytes(data[: len(data) - cut]))
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors:
            checkpoint.read(name)
    except BadModel as problem:
        assert "fuzzed.gguf" in str(problem)


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": floats(4, 32)})
    program = (
        "import sys; sys.modules['gguf'] = None\n"
        "from pathlib import Path\n"
        "from gpuherd.errors import BadModel, MissingExtra\n"
        "from gpuherd.models.checkpoints.open import open_checkpoint\n"
        "try:\n    open_checkpoint(Path(sys.argv[1]))\n"
        "except BadModel as problem:\n    print(isinstance(problem, MissingExtra), problem)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True") and "pip install 'gpuherd[gguf]'" in done.stdout
