"""Models that come as something else: quantised already, from the Hub, as a map of the real size for a reduced copy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.models.load.conftest import Small
from tests.models.local_hub import running

from gpuherd.errors import UsageError
from gpuherd.models.load.quantised import check_cards, expected_dtypes, loading_words
from gpuherd.models.plan.cards import parse_cards
from gpuherd.models.plan.planner import make_plan
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.reading import read_architecture
from gpuherd.models.plan.result import MemoryPlan
from gpuherd.models.plan.workload import Workload

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gpuherd.models.load.loading import load_model  # noqa: E402


@pytest.mark.parametrize("quantization", ["int8", "nf4", "nf4-dq"])
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
    [(Precision.BF16, "4x40GB", 4), (Precision.INT8, "2x40GB", 2), (Precision.NF4_DQ, "4x24GB", 2)],
)
def test_the_map_of_a_70b_model_serves_its_reduced_copy(
    reduced: Path, precision: Precision, cards: str, gpus: int
) -> None:
    plan = make_plan(read_architecture("Llama-3.1-70B"), parse_cards(cards), precision, Workload(8, 512, 64))
    assert isinstance(plan, MemoryPlan) and plan.gpus == gpus
    device_map = dict(plan.device_map)
    loaded = load_model(str(reduced), device_map=device_map, simulate=True)
    assert loaded.report.device_map == plan.device_map == device_map
    assert [each.device for each in loaded.report.devices] == list(range(gpus))
    assert all(each.predicted == each.real for each in loaded.report.devices)
    # transformers itself has none on a machine without GPUs.
    assert not hasattr(loaded.model, "hf_device_map") or set(loaded.model.hf_device_map.values()) == {"cpu"}


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


def load_from(url: str, cache: Path, **more: str) -> str:
    """What ``HUB`` prints in a process of its own."""
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **more}
    command = [sys.executable, "-c", HUB, "org/small"]
    answer = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def test_a_model_of_the_hub_comes_with_its_tokenizer(small: Small, tmp_path: Path) -> None:
    with running() as hub:
        hub.repos["org/small"] = hub_files(small, tmp_path / "files")
        assert load_from(hub.url, tmp_path / "cache") == "LlamaForCausalLM True [1, 2]"


@pytest.mark.slow
def test_what_was_loaded_once_needs_no_network(small: Small, tmp_path: Path) -> None:
    with running() as hub:
        hub.repos["org/small"] = hub_files(small, tmp_path / "files")
        online = load_from(hub.url, tmp_path / "cache")
        asked = sum(hub.asked.values())
        assert load_from(hub.url, tmp_path / "cache", HF_HUB_OFFLINE="1") == online
        assert sum(hub.asked.values()) == asked


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
        check_cards(Precision.BF16, parse_cards("GTX1080Ti"))
    assert "emulated" in check_cards(Precision.BF16, parse_cards("V100-32"))[0]
    assert check_cards(Precision.BF16, parse_cards("A100-40")) == ()


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


def test_a_report_is_plain_json(small: Small) -> None:
    report = load_model(str(small("tied")), gpus="2x24GB", parallel="layers").report
    again = json.loads(json.dumps(report.as_json()))
    assert again["device_map"] == report.device_map and again["input_device"] == "cpu"
    assert again["devices"][1]["planned_bytes"] > again["devices"][1]["real_bytes"]
