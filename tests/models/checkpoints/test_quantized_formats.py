"""Quantised weights come back as their formats define them: against the libraries, or written out number by number."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gpuherd.errors import BadModel
from gpuherd.esd.worker import main
from gpuherd.models.checkpoints.open import Checkpoint, open_checkpoint
from gpuherd.models.checkpoints.quantized import e4m3, unpacked
from gpuherd.models.tensors.matrices import WeightMatrix, matrices
from gpuherd.models.tensors.source import FloatArray

RANDOM = np.random.default_rng(11)
Tensors = dict[str, torch.Tensor]
Case = tuple[Tensors, dict[str, Any], FloatArray]


def saved(folder: Path, tensors: Tensors, quantization_config: dict[str, Any] | None) -> Checkpoint:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {} if quantization_config is None else {"quantization_config": quantization_config}
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


def packed(numbers: np.ndarray[Any, Any], bits: int) -> torch.Tensor:
    """A stream of bits along the first axis, by Python's own whole numbers."""
    columns = []
    for column in numbers.T:
        stream = sum(int(number) << (bits * place) for place, number in enumerate(column))
        columns.append([stream >> (32 * word) & 0xFFFFFFFF for word in range(len(column) * bits // 32)])
    return torch.from_numpy(np.array(columns, np.uint32).T.astype(np.int64)).to(torch.int64).to(torch.int32)


def gptq(bits: int, *, acts: bool = False, version: str = "gptq") -> Case:
    """64 inputs in 4 groups, 96 outputs; with ``acts`` the inputs' groups are mixed (desc_act)."""
    inputs, out, count, top = 64, 96, 4, 1 << bits
    codes, zeros = RANDOM.integers(0, top, (inputs, out)), RANDOM.integers(0, top, (count, out))
    scales = RANDOM.standard_normal((count, out)).astype(np.float16)
    group = np.arange(inputs) // (inputs // count)
    if acts:
        RANDOM.shuffle(group)
    wanted = np.empty((out, inputs), np.float32)
    for o in range(out):
        for i in range(inputs):
            wanted[o, i] = np.float32(scales[group[i], o]) * (int(codes[i, o]) - int(zeros[group[i], o]))
    stored = zeros if version == "gptq_v2" else (zeros - 1) % top
    tensors = {
        "h.0.k.qweight": packed(codes, bits),
        "h.0.k.qzeros": packed(stored.T, bits).T,
        "h.0.k.scales": torch.from_numpy(scales),
        "h.0.k.g_idx": torch.from_numpy(group.astype(np.int32)),
        "h.0.k.bias": torch.ones(out),
    }
    return tensors, {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}, wanted


def awq() -> Case:
    inputs, out, count = 64, 40, 2
    codes, zeros = RANDOM.integers(0, 16, (inputs, out)), RANDOM.integers(0, 16, (count, out))
    scales = RANDOM.standard_normal((count, out)).astype(np.float16)

    def words(numbers: np.ndarray[Any, Any]) -> torch.Tensor:
        """Bits 4p to 4p + 3 of a word hold column order[p] of its eight, as AutoAWQ writes them."""
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        rows = [
            [sum(int(row[8 * word + order[place]]) << (4 * place) for place in range(8)) for word in range(out // 8)]
            for row in numbers
        ]
        return torch.tensor(rows, dtype=torch.int64).to(torch.int32)

    wanted = np.empty((out, inputs), np.float32)
    for o in range(out):
        for i in range(inputs):
            wanted[o, i] = np.float32(scales[i // 32, o]) * (int(codes[i, o]) - int(zeros[i // 32, o]))
    tensors = {"h.0.k.qweight": words(codes), "h.0.k.qzeros": words(zeros), "h.0.k.scales": torch.from_numpy(scales)}
    return tensors, {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 32}, wanted


def four_bit(kind: str, nested: bool, shape: tuple[int, int] = (40, 64)) -> Case:
    """As bitsandbytes' QuantState writes itself; the values are gone through one by one."""
    count, block, offset = shape[0] * shape[1], 64, 0.25
    codes = RANDOM.integers(0, 16, count)
    table = np.sort(RANDOM.standard_normal(16)).astype(np.float32)
    blocks = -(-count // block)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    absmax = RANDOM.random(blocks).astype(np.float32)
    tensors = {"h.0.k.weight.quant_map": torch.from_numpy(table)}
    if nested:
        small, scales = RANDOM.integers(0, 256, blocks), RANDOM.random(-(-blocks // 16)).astype(np.float32)
        map_ = RANDOM.standard_normal(256).astype(np.float32)
        absmax = np.array([map_[small[b]] * scales[b // 16] + np.float32(offset) for b in range(blocks)], np.float32)
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
        tensors["h.0.k.weight.absmax"] = torch.from_numpy(small.astype(np.uint8))
        tensors["h.0.k.weight.nested_absmax"] = torch.from_numpy(scales)
        tensors["h.0.k.weight.nested_quant_map"] = torch.from_numpy(map_)
    else:
        tensors["h.0.k.weight.absmax"] = torch.from_numpy(absmax)
    padded = np.append(codes, [0] * (count % 2))
    tensors["h.0.k.weight"] = torch.from_numpy((padded[::2] * 16 + padded[1::2]).astype(np.uint8)).reshape(-1, 1)
    text = json.dumps(state).encode()
    tensors[f"h.0.k.weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    wanted = np.array([table[code] * absmax[place // block] for place, code in enumerate(codes)], np.float32)
    return tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True}, wanted.reshape(shape)


def eight_bit() -> Case:
    codes, scale = RANDOM.integers(-127, 128, (40, 64)), RANDOM.random(40).astype(np.float32)
    tensors = {
        "h.0.k.weight": torch.from_numpy(codes.astype(np.int8)),
        "h.0.k.SCB": torch.from_numpy(scale),
        "h.0.k.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    wanted = (codes * (scale / np.float32(127))[:, None]).astype(np.float32)
    return tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True}, wanted


def float8(scale: str) -> Case:
    plain = torch.randn(200, 300, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    if scale == "block":
        factors = torch.rand(2, 3)
        wide = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
        tensors = {"h.0.k.weight": plain, "h.0.k.weight_scale_inv": factors}
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        return tensors, config, (plain.float() * wide).numpy()
    factors = torch.rand(200, 1) if scale == "row" else torch.rand(1)
    tensors = {"h.0.k.weight": plain, "h.0.k.weight_scale": factors, "h.0.k.input_scale": torch.rand(1)}
    return tensors, {"quant_method": "compressed-tensors"}, (plain.float() * factors).numpy()


def compressed(bits: int, *, inputs: int = 64, count: int = 4, zeros: bool = False, acts: bool = False) -> Case:
    """compressed-tensors, packed: word w of a row holds its inputs w k to w k + k - 1, k = 32 / bits, plus 2^(bits-1);
    a zero point's word so many outputs' of its group."""
    out, half, each = 37, 1 << (bits - 1), 32 // bits
    codes = RANDOM.integers(-half, half, (out, inputs))
    points = RANDOM.integers(-half, half, (out, count)) if zeros else np.zeros((out, count), np.int64)
    scales = torch.from_numpy(RANDOM.random((out, count))).to(torch.bfloat16)
    group = np.arange(inputs) // (inputs // count)
    if acts:
        RANDOM.shuffle(group)

    def words(numbers: np.ndarray[Any, Any]) -> torch.Tensor:
        padded = np.pad(numbers + half, ((0, 0), (0, -numbers.shape[1] % each)))
        grouped = padded.reshape(len(padded), -1, each)
        rows = [[sum(int(code) << (bits * k) for k, code in enumerate(word)) for word in row] for row in grouped]
        return torch.tensor(rows, dtype=torch.int64).to(torch.int32)

    wanted = np.empty((out, inputs), np.float32)
    for o in range(out):
        for i in range(inputs):
            wanted[o, i] = scales[o, group[i]].item() * (int(codes[o, i]) - int(points[o, group[i]]))
    tensors = {
        "h.0.k.weight_packed": words(codes),
        "h.0.k.weight_scale": scales,
        "h.0.k.weight_shape": torch.tensor([out, inputs]),
    }
    if zeros:
        tensors["h.0.k.weight_zero_point"] = words(points.T).T
    if acts:
        tensors["h.0.k.weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
    plan = {"group_0": {"weights": {"num_bits": bits, "type": "int"}, "targets": ["Linear"]}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": plan}
    return tensors, config, wanted


def int_quantized(scale: str) -> Case:
    codes = RANDOM.integers(-128, 128, (40, 64))
    scales = RANDOM.random((40, 1) if scale == "row" else (1,)).astype(np.float32)
    tensors = {"h.0.k.weight": torch.from_numpy(codes.astype(np.int8)), "h.0.k.weight_scale": torch.from_numpy(scales)}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    return tensors, config, (codes * scales).astype(np.float32)


CASES: dict[str, Callable[[], Case]] = {
    "compressed 4 bits": lambda: compressed(4),
    "compressed 4 bits, zeros": lambda: compressed(4, zeros=True),
    "compressed 4 bits, mixed groups": lambda: compressed(4, zeros=True, acts=True),
    "compressed 4 bits by rows, with padding": lambda: compressed(4, inputs=61, count=1),
    "compressed 2 bits": lambda: compressed(2, zeros=True),
    "compressed 8 bits": lambda: compressed(8, inputs=66, count=3, zeros=True),
    "int8 by rows": lambda: int_quantized("row"),
    "int8 as a whole": lambda: int_quantized("tensor"),
    **{f"gptq {bits} bits": lambda bits=bits: gptq(bits) for bits in (2, 3, 4, 8)},  # type: ignore[misc]
    "gptq mixed groups": lambda: gptq(4, acts=True),
    "gptq_v2": lambda: gptq(4, version="gptq_v2"),
    "awq": awq,
    "nf4": lambda: four_bit("nf4", nested=False),
    "nf4 nested": lambda: four_bit("nf4", nested=True),
    "fp4 nested": lambda: four_bit("fp4", nested=True),
    "nf4 with rows that begin within a byte": lambda: four_bit("nf4", nested=True, shape=(37, 51)),
    "8-bit": eight_bit,
    "float8 by blocks": lambda: float8("block"),
    "float8 by rows": lambda: float8("row"),
    "float8 as a whole": lambda: float8("tensor"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_format(tmp_path: Path, case: str) -> None:
    tensors, config, wanted = CASES[case]()
    checkpoint = saved(tmp_path, {**tensors, "h.0.plain.weight": torch.ones(4, 4)}, config)
    found = {m.longname: m for m in matrices(checkpoint)}
    assert set(found) == {"h.0.k", "h.0.plain"}
    # What it was made from stays in the list of tensors, and says so.
    beside = {name for name, info in checkpoint.tensors.items() if info.scales_of == "h.0.k.weight"}
    assert len(checkpoint.tensors) == len(tensors) + 1
    assert beside == set(tensors) - {"h.0.k.weight", "h.0.k.qweight", "h.0.k.weight_packed", "h.0.k.bias"}
    matrix = found["h.0.k"]
    assert matrix.skip is None and matrix.shape == wanted.shape and matrix.tensor == "h.0.k.weight"
    info = checkpoint.tensors["h.0.k.weight"]
    assert info.dequantized and info.shape == wanted.shape and info.nbytes > 0
    assert_same(matrix, checkpoint, wanted)


def assert_same(matrix: WeightMatrix, checkpoint: Checkpoint, wanted: FloatArray) -> None:
    """Whole, in slabs, rows, and a block in the middle, all the same to the bit."""
    (whole,) = matrix.slices()
    assert whole.dtype == np.float32 and np.array_equal(whole, wanted)
    along = 0 if wanted.shape[0] >= wanted.shape[1] else 1
    assert np.array_equal(np.concatenate(list(matrix.slabs(13)), axis=along), wanted)
    assert np.array_equal(checkpoint.read(matrix.tensor, 5, 20), wanted[5:20])
    block = checkpoint.read_block(matrix.tensor, (3, 30), (7, 45))
    assert np.array_equal(block, wanted[3:30, 7:45])
    assert checkpoint.read_block(matrix.tensor, (3, 3), (7, 45)).shape == (0, 38)
    with pytest.raises(ValueError, match="no block"):
        checkpoint.read_block(matrix.tensor, (0, 10**6), (0, 1))


@settings(max_examples=100, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), words=st.integers(1, 3), columns=st.integers(1, 3), data=st.data())
def test_a_stream_of_bits_comes_back(bits: int, words: int, columns: int, data: st.DataObject) -> None:
    size = 32 * words * columns
    numbers = np.array(data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=size, max_size=size)))
    numbers = numbers.reshape(-1, columns)
    assert np.array_equal(unpacked(packed(numbers, bits).numpy(), bits), numbers)


def test_the_values_of_float8() -> None:
    wanted = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3(), wanted, equal_nan=True)


def test_mxfp4_experts_as_transformers_unpacks_them(tmp_path: Path) -> None:
    """gpt-oss: the gate is every second column of what is unpacked and transposed."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(1)
    tensors: Tensors = {}
    wanted: dict[str, FloatArray] = {}
    # 32 outputs a side and 64 inputs; the down projection back from 32 to 64.
    for name, out, groups in (("gate_up_proj", 64, 2), ("down_proj", 64, 1)):
        blocks = torch.randint(0, 256, (3, out, groups, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(110, 140, (3, out, groups), generator=generator).to(torch.uint8)
        tensors |= {f"h.0.experts.{name}_blocks": blocks, f"h.0.experts.{name}_scales": scales}
        tensors[f"h.0.experts.{name}_bias"] = torch.ones(3, out)
        wanted[name] = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy()
    checkpoint = saved(tmp_path, tensors, {"quant_method": "mxfp4"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "gpt_oss"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert {info.dtype for info in checkpoint.tensors.values() if not info.scales_of} == {"MXFP4", "F32"}
    got = {m.longname: m.slices()[0] for m in matrices(open_checkpoint(tmp_path)) if m.skip is None}
    assert len(got) == 9
    for expert in range(3):
        assert np.array_equal(got[f"h.0.experts.{expert}.gate_proj"], wanted["gate_up_proj"][expert][:, ::2])
        assert np.array_equal(got[f"h.0.experts.{expert}.up_proj"], wanted["gate_up_proj"][expert][:, 1::2])
        assert np.array_equal(got[f"h.0.experts.{expert}.down_proj"], wanted["down_proj"][expert])


def test_a_quantised_model_through_the_worker(tmp_path: Path) -> None:
    """Its rows are those of the same numbers stored plainly; its coverage table has every tensor of the file."""
    tensors, config, wanted = gptq(4, acts=True)
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    quantised.mkdir()
    plain.mkdir()
    saved(quantised, tensors, config)
    saved(plain, {"h.0.k.weight": torch.from_numpy(wanted)}, None)
    for folder in (quantised, plain):
        assert main(["--model-id", str(folder), "--output-dir", f"{folder}-out", "--device-map", "cpu"]) == 0
    ours, theirs = (table(tmp_path / f"{name}-out" / "stats") for name in ("quantised", "plain"))
    assert [row["longname"] for row in ours] == ["h.0.k"]
    figures = ("longname", "M", "N", "params", "alpha", "D", "norm", "entropy", "matrix_rank", "fit_status")
    assert [[row[name] for name in figures] for row in ours] == [[row[name] for name in figures] for row in theirs]
    covered = {row["tensor"]: row for row in table(tmp_path / "quantised-out" / "coverage")}
    assert set(covered) == {"h.0.k.weight", "h.0.k.qzeros", "h.0.k.scales", "h.0.k.g_idx", "h.0.k.bias"}
    assert (covered["h.0.k.weight"]["status"], covered["h.0.k.weight"]["dtype"]) == ("analysed", "GPTQ4")
    assert covered["h.0.k.scales"]["reason"] == "scales or codes of h.0.k.weight, counted there"


def table(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.glob("*.csv")
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def without(case: Callable[[], Case], name: str) -> Case:
    tensors, config, wanted = case()
    del tensors[name]
    return tensors, config, wanted


def with_config(case: Callable[[], Case], **changes: Any) -> Case:
    tensors, config, wanted = case()
    return tensors, config | changes, wanted


def with_tensor(case: Callable[[], Case], name: str, value: torch.Tensor) -> Case:
    tensors, config, wanted = case()
    return {**tensors, name: value}, config, wanted


ODD: dict[str, tuple[Callable[[], Case], str]] = {
    "no scales": (lambda: without(lambda: gptq(4), "h.0.k.scales"), "GPTQ"),
    "bits that nobody has": (lambda: with_config(lambda: gptq(4), bits=5), "GPTQ"),
    "bits that don't fit": (lambda: with_config(lambda: gptq(4), bits=8), "GPTQ"),
    "bits as text": (lambda: with_config(lambda: gptq(4), bits="4"), "GPTQ"),
    "another packing": (lambda: with_config(awq, version="gemv"), "AWQ"),
    "zeros of another shape": (lambda: with_tensor(awq, "h.0.k.qzeros", torch.ones(1, 5, dtype=torch.int32)), "AWQ"),
    "a state that is no JSON": (
        lambda: with_tensor(
            lambda: four_bit("nf4", nested=False),
            "h.0.k.weight.quant_state.bitsandbytes__nf4",
            torch.ones(9, dtype=torch.uint8),
        ),
        "bitsandbytes",
    ),
    "a state of another shape": (
        lambda: with_tensor(
            lambda: four_bit("nf4", nested=False),
            "h.0.k.weight.quant_state.bitsandbytes__nf4",
            torch.tensor(list(b'{"shape": [1000000, 1000000], "blocksize": 64}'), dtype=torch.uint8),
        ),
        "bitsandbytes",
    ),
    "a block of 10^30": (
        lambda: with_tensor(
            lambda: with_tensor(lambda: four_bit("nf4", nested=False), "h.0.k.weight.absmax", torch.ones(1)),
            "h.0.k.weight.quant_state.bitsandbytes__nf4",
            torch.tensor(list(b'{"shape": [40, 64], "blocksize": 1' + b"0" * 30 + b"}"), dtype=torch.uint8),
        ),
        "bitsandbytes",
    ),
    "blocks of 10^30": (
        lambda: with_tensor(
            lambda: with_config(lambda: float8("block"), weight_block_size=[10**30, 10**30]),
            "h.0.k.weight_scale_inv",
            torch.ones(1, 1),
        ),
        "float8",
    ),
    "nested without its scales": (
        lambda: without(lambda: four_bit("nf4", nested=True), "h.0.k.weight.nested_absmax"),
        "bitsandbytes",
    ),
    "a tiled layout": (
        lambda: with_tensor(eight_bit, "h.0.k.weight_format", torch.tensor(2, dtype=torch.uint8)),
        "bitsandbytes",
    ),
    "blocks of another size": (lambda: with_config(lambda: float8("block"), weight_block_size=[64, 64]), "float8"),
    "packed without its shape": (lambda: without(lambda: compressed(4), "h.0.k.weight_shape"), "compressed-tensors"),
    "packed in other bits than said": (
        lambda: with_config(lambda: compressed(4), config_groups={"g": {"weights": {"num_bits": 3}}}),
        "compressed-tensors",
    ),
    "packed, of a shape below zero": (
        lambda: with_tensor(
            lambda: with_tensor(lambda: compressed(4), "h.0.k.weight_shape", torch.tensor([37, -5])),
            "h.0.k.weight_packed",
            torch.ones(37, 0, dtype=torch.int32),
        ),
        "compressed-tensors",
    ),
    "packed, zeros of another shape": (
        lambda: with_tensor(lambda: compressed(4), "h.0.k.weight_zero_point", torch.ones(2, 4, dtype=torch.int32)),
        "compressed-tensors",
    ),
    "packed, groups of another length": (
        lambda: with_tensor(lambda: compressed(4), "h.0.k.weight_g_idx", torch.ones(9, dtype=torch.int32)),
        "compressed-tensors",
    ),
    "packed, settings of another form": (
        lambda: with_config(lambda: compressed(4), config_groups=[{"weights": [1]}]),
        "compressed-tensors",
    ),
    "packed beside sparse": (
        lambda: with_tensor(lambda: compressed(4), "h.1.k.bitmask", torch.ones(9, 2, dtype=torch.uint8)),
        "compressed-tensors",
    ),
    "float8 without a scale": (lambda: without(lambda: float8("row"), "h.0.k.weight_scale"), "compressed-tensors"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, case: str) -> None:
    build, name = ODD[case]
    tensors, config, _ = build()
    with pytest.raises(BadModel, match=rf"is quantised \([^)]*{name}"):
        saved(tmp_path, tensors, config)


def test_one_layer_that_does_not_fit_refuses_the_model(tmp_path: Path) -> None:
    tensors, config, _ = gptq(4)
    with pytest.raises(BadModel, match=r"is quantised \(GPTQ"):
        saved(tmp_path, {**tensors, "h.1.k.qweight": torch.ones(4, 4, dtype=torch.int32)}, config)


def test_a_group_that_is_not_there(tmp_path: Path) -> None:
    tensors, config, _ = gptq(4)
    tensors["h.0.k.g_idx"][7] = 99
    checkpoint = saved(tmp_path, tensors, config)
    with pytest.raises(BadModel, match="g_idx' names a group that is not there"):
        checkpoint.read("h.0.k.weight")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(64, 128), (33, 192), (33, 51)])
def test_four_bits_as_bitsandbytes_has_them(tmp_path: Path, kind: str, nested: bool, shape: tuple[int, int]) -> None:
    """Not for even rows that are no multiple of 64: there its own CPU kernel is further from the weights that it was
    given than any rounding (1.6 for standard normal ones, against 0.46)."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    codes, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    tensors = {"h.0.k.weight": codes, **{f"h.0.k.weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
    checkpoint = saved(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with torch.compiler.set_stance("force_eager"):  # it would compile its kernel for 20 seconds
        theirs = functional.dequantize_4bit(codes, state).numpy()
    assert np.allclose(checkpoint.read("h.0.k.weight"), theirs, rtol=3e-7, atol=0)


def test_eight_bits_as_bitsandbytes_has_them(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(4)).half()
    codes, scale, _ = functional.int8_vectorwise_quant(weight)
    checkpoint = saved(tmp_path, {"h.0.k.weight": codes, "h.0.k.SCB": scale}, {"load_in_8bit": True})
    theirs = functional.int8_vectorwise_dequant(codes, scale).numpy()
    assert np.allclose(checkpoint.read("h.0.k.weight"), theirs, rtol=3e-7, atol=0)
