"""Models that come as something else: quantised already, from the Hub, as a map of the real size for a reduced copy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.models.load.conftest import Small, slow
from tests.models.local_hub import running

from gpuherd.errors import UsageError
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.load.loading import LoadedTensor, of_other_dtypes
from gpuherd.models.load.options import LoadRequest
from gpuherd.models.load.prepare import prepare
from gpuherd.models.load.pretrained import check_gpus, expected_dtypes, loading_words
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import parse_gpus
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import MemoryPlan

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gpuherd.models.load.loading import load_model, load_prepared  # noqa: E402


@pytest.mark.parametrize("quantization", [slow("int8"), slow("nf4"), "nf4-dq"])
def test_a_checkpoint_that_is_quantised_already_is_loaded_as_it_is(
    small: Small, tmp_path: Path, quantization: str
) -> None:
    pytest.importorskip("bitsandbytes")
    first = load_model(str(small("llama")), quantization=quantization, device_map="cpu")
    first.model.save_pretrained(tmp_path / "quantised")
    again = load_model(str(tmp_path / "quantised"), gpus="2x24GB", parallel="layers")
    assert again.report.precision is Precision.AS_STORED and again.report.within
    ids = torch.arange(9)[None] + 3
    with torch.inference_mode():
        assert torch.equal(first.model(input_ids=ids).logits, again.model(input_ids=ids).logits)
    with pytest.raises(UsageError, match="is quantised already"):
        load_model(str(tmp_path / "quantised"), dtype="fp32", device_map="cpu")
    with pytest.raises(UsageError, match="weights in as-stored can't be offloaded"):
        load_model(str(tmp_path / "quantised"), device_map={"": "cpu", "lm_head": "disk"}, allow_offload="disk")


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama-3.1-70B with all of its 80 layers, 64 numbers wide."""
    folder = tmp_path_factory.mktemp("reduced")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=80, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=320, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("precision", "cards", "gpus"),
    [(Precision.BF16, "4x40GB", 4), slow(Precision.INT8, "2x40GB", 2), slow(Precision.NF4_DQ, "4x24GB", 2)],
)
def test_the_map_of_a_70b_model_serves_its_reduced_copy(
    reduced: Path, precision: Precision, cards: str, gpus: int
) -> None:
    plan = make_plan(read_architecture("Llama-3.1-70B"), parse_gpus(cards), precision, Workload(8, 512, 64))
    assert isinstance(plan, MemoryPlan) and plan.gpus == gpus
    device_map = dict(plan.device_map)
    loaded = load_model(str(reduced), device_map=device_map, simulate=True)
    assert loaded.report.device_map == plan.device_map == device_map
    assert [each.device for each in loaded.report.devices] == list(range(gpus))
    assert all(each.predicted == each.real for each in loaded.report.devices)
    # transformers itself has none on a machine without GPUs.
    assert not hasattr(loaded.model, "hf_device_map") or set(loaded.model.hf_device_map.values()) == {"cpu"}


FETCH = """
import sys
from gpuherd.models.load.options import LoadRequest
from gpuherd.models.load.prepare import prepare
print(prepare(LoadRequest(sys.argv[1], device_map="cpu", dtype="bf16")).path, "torch" in sys.modules)
"""
HUB = """
import sys
from gpuherd.models.load.loading import load_model
loaded = load_model(sys.argv[1], device_map="cpu", dtype="bf16")
print(loaded.report.class_name, loaded.report.within, loaded.tokenizer("hello world")["input_ids"])
"""


def hub_files(small: Small, folder: Path) -> dict[str, bytes]:
    """The files of a small model with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return {path.name: path.read_bytes() for each in (small("llama"), folder) for path in each.iterdir()}


def load_from(url: str, cache: Path, script: str = HUB, model: str = "org/small", **more: str) -> str:
    """What the script prints in a process of its own."""
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **more}
    command = [sys.executable, "-c", script, model]
    answer = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def test_a_model_of_the_hub_comes_with_its_tokenizer(small: Small, tmp_path: Path) -> None:
    with running() as hub:
        hub.repos["org/small"] = hub_files(small, tmp_path / "files")
        path, torch_too = load_from(hub.url, tmp_path / "cache", FETCH).rsplit(" ", 1)
    assert torch_too == "False"
    loaded = load_model(path, device_map="cpu", dtype="bf16")
    assert loaded.report.within and loaded.tokenizer("hello world")["input_ids"] == [1, 2]


@pytest.mark.slow
def test_what_was_loaded_once_needs_no_network(small: Small, tmp_path: Path) -> None:
    with running() as hub:
        hub.repos["org/small"] = hub_files(small, tmp_path / "files")
        online = load_from(hub.url, tmp_path / "cache")
        assert online == "LlamaForCausalLM True [1, 2]"
        asked = sum(hub.asked.values())
        assert load_from(hub.url, tmp_path / "cache", HF_HUB_OFFLINE="1") == online
        assert sum(hub.asked.values()) == asked


REFUSED = """
import json
from gpuherd.models.load.options import LoadRequest
from gpuherd.models.load.prepare import prepare
from gpuherd.models.load.tensor_parallel import plan_tensor_parallel
asked = [
    lambda: prepare(LoadRequest("org/small", gpus="1x1MB")),
    lambda: prepare(LoadRequest("org/small", gpus="1x1MB", device_map="auto")),
    lambda: prepare(LoadRequest("org/small", device_map={"": 0})),
    lambda: prepare(LoadRequest("org/small", device_map={"nowhere": 0}, simulate=True)),
    lambda: prepare(LoadRequest("org/adapter", gpus="1x1MB")),
    lambda: plan_tensor_parallel(LoadRequest("org/small", gpus="2x1MB")),
]
said = []
for ask in asked:
    try:
        ask()
    except Exception as problem:
        said.append(type(problem).__name__)
print(json.dumps(said))
"""


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_what_has_no_place_is_refused_before_it_is_fetched(small: Small, adapter: Path, tmp_path: Path) -> None:
    with running() as hub:
        hub.repos["org/small"] = hub_files(small, tmp_path / "files")
        hub.repos["org/adapter"] = {path.name: path.read_bytes() for path in adapter.iterdir()}
        said = json.loads(load_from(hub.url, tmp_path / "cache", REFUSED))
        assert said == [*["ModelDoesNotFit"] * 2, *["UsageError"] * 2, *["ModelDoesNotFit"] * 2]
        # Nothing but the header.
        assert hub.sent["model.safetensors"] < len(hub.repos["org/small"]["model.safetensors"])
        path, _ = load_from(hub.url, tmp_path / "cache", FETCH, model="org/adapter").rsplit(" ", 1)
        again, _ = load_from(hub.url, tmp_path / "cache", FETCH, model="org/adapter", HF_HUB_OFFLINE="1").rsplit(" ", 1)
    assert path == again and (Path(path) / "model.safetensors").exists()


@pytest.fixture
def adapter(small: Small, tmp_path: Path) -> Path:
    """A LoRA adapter whose base is on the Hub."""
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(small("llama"), dtype=torch.bfloat16)
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "org/small"}))
    return tmp_path / "adapter"


# ---- what a card can do ----------------------------------------------------------------------------------------------


def test_a_precision_that_nobody_told_is_assumed_and_told(small: Small, tmp_path: Path) -> None:
    """A checkpoint of float64, which is no precision that weights are loaded in."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(small("llama"), tmp_path / "double")
    tensors = load_file(tmp_path / "double" / "model.safetensors")
    double = {name: each.double() for name, each in tensors.items()}
    save_file(double, tmp_path / "double" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "double" / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "double" / "config.json").write_text(json.dumps(config))
    report = load_model(str(tmp_path / "double"), device_map="cpu").report
    assert report.within and len(report.dtypes) == 1
    assert report.precision is Precision.FP32 or any("bf16 is assumed" in note for note in report.notes)


def test_cards_that_can_not_compute_in_a_precision_are_refused() -> None:
    with pytest.raises(Exception, match=r"GPU 0 \(GTX1080Ti\): bf16 needs compute capability"):
        check_gpus(Precision.BF16, parse_gpus("GTX1080Ti"))
    assert "emulated" in check_gpus(Precision.BF16, parse_gpus("V100-32"))[0]
    assert check_gpus(Precision.BF16, parse_gpus("A100-40")) == ()


@pytest.mark.parametrize(
    ("precision", "capability", "dtype"),
    [
        (Precision.BF16, (8, 0), "bfloat16"),
        (Precision.BF16, (7, 0), "bfloat16"),
        (Precision.INT8, (8, 0), "float16"),
        (Precision.NF4, (8, 0), "bfloat16"),
        (Precision.NF4, None, "bfloat16"),
        (Precision.NF4_DQ, (7, 5), "float16"),
    ],
)
def test_4_bit_weights_are_multiplied_in_float16_where_bfloat16_is_emulated(
    precision: Precision, capability: tuple[int, int] | None, dtype: str
) -> None:
    words: dict[str, Any] = loading_words(precision, [capability])
    assert words["dtype"] is getattr(torch, dtype)
    assert dtype in expected_dtypes(precision)
    if precision in (Precision.NF4, Precision.NF4_DQ):
        settings = words["quantization_config"]
        assert settings.bnb_4bit_compute_dtype is getattr(torch, dtype) and settings.bnb_4bit_quant_type == "nf4"
        assert settings.bnb_4bit_use_double_quant is (precision is Precision.NF4_DQ)


def test_weights_that_are_stored_in_8_bits_are_no_wrong_dtype() -> None:
    """FP8 checkpoints: transformers keeps their codes as parameters."""
    seen = [
        LoadedTensor("w", "cuda:0", "float8_e4m3fn", 1, 64),
        LoadedTensor("w.scale", "cuda:0", "float8_e8m0fnu", 2, 4),
        LoadedTensor("n", "cuda:0", "float64", 3, 8),
    ]
    found = of_other_dtypes(seen, expected_dtypes(Precision.AS_STORED), frozenset())
    assert len(found) == 1 and found[0].startswith("n is in float64")


def test_a_part_that_float16_is_too_narrow_for_keeps_the_rest_in_bfloat16(small: Small) -> None:
    """t5 in 4 bits on a card of compute capability 7.5: in float16 transformers would keep a part of it in float32."""
    pytest.importorskip("bitsandbytes")
    ready = prepare(LoadRequest(str(small("t5")), quantization="nf4", device_map="cpu"))
    report = load_prepared(replace(ready, capabilities=((7, 5),))).report
    assert report.within and "float32" not in report.dtypes


def test_a_report_is_plain_json(small: Small) -> None:
    report = load_model(str(small("tied")), gpus="2x24GB", parallel="layers").report
    again = json.loads(json.dumps(report.as_json()))
    assert again["device_map"] == report.device_map and again["input_device"] == "cpu"
    assert again["devices"][1]["planned_bytes"] > again["devices"][1]["real_bytes"]
