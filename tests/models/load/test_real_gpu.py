"""What only real GPUs can show: blocks on their devices, and memory that CUDA gave out beside what was predicted.

Skipped, saying so, where none is at hand. The driver is met in child processes: this one has the stand-in loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def child(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the machine's own driver."""
    hidden = ("GPUHERD_STANDIN", "LD_LIBRARY_PATH", "PYTORCH_NVML_BASED_CUDA_CHECK")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | more
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)


def gpus() -> int:
    """How many CUDA shows, by the driver library; no torch is imported to find that there are none."""
    shown = child("-c", "from gpuherd.esd.resources import cuda_devices; print(len(cuda_devices().names))")
    return int(shown.stdout) if shown.returncode == 0 and shown.stdout.strip() else 0


GPUS = gpus()
pytestmark = pytest.mark.skipif(not GPUS, reason="no real NVIDIA GPU is at hand")

MAKE = """
import sys, torch, transformers
config = transformers.LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
                                  num_key_value_heads=4, vocab_size=32000, tie_word_embeddings=False)
transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    made = child("-c", MAKE, str(folder))
    assert made.returncode == 0, made.stderr
    return folder


def loaded(model: Path, tmp_path: Path, *words: str) -> dict[str, Any]:
    report = tmp_path / "report.json"
    done = child("-m", "gpuherd.models.load.worker", str(model), "--batch", "4", "--json", str(report), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "nf4", "nf4-dq"])
def test_cuda_gives_out_what_was_predicted(model: Path, tmp_path: Path, dtype: str) -> None:
    report = loaded(model, tmp_path, "--dtype", dtype)
    assert report["within_tolerance"] and not report["simulated"]
    for device in report["devices"]:
        assert device["real_bytes"] == pytest.approx(device["predicted_bytes"], rel=1e-3)
        assert device["cuda_bytes"] == pytest.approx(device["predicted_bytes"], rel=0.03)
    assert report["trial"]["finite"] and report["trial"]["within_plan"]


@pytest.mark.skipif(GPUS < 2, reason="one GPU only")
def test_layers_lie_on_the_gpus_that_were_planned(model: Path, tmp_path: Path) -> None:
    report = loaded(model, tmp_path, "--parallel", "layers")
    assert [each["device"] for each in report["devices"]] == list(range(GPUS))
    assert report["trial"]["finite"] and report["trial"]["within_plan"]


def test_what_is_offloaded_beside_a_gpu_computes(model: Path, tmp_path: Path) -> None:
    device_map = tmp_path / "map.json"
    device_map.write_text(json.dumps({"": 0, "model.layers.6": "cpu", "model.layers.7": "cpu"}))
    report = loaded(model, tmp_path, "--device-map", str(device_map), "--allow-offload", "cpu")
    assert {each["device"] for each in report["devices"]} == {0, "cpu"}
    assert report["trial"]["finite"]


AGAIN = """
import sys, torch
from gpuherd.models.load.loading import load_model
from gpuherd.models.memory.kv_cache import Reserve
first = load_model(sys.argv[1])
free, total = torch.cuda.mem_get_info(0)
kept = torch.empty(int(0.6 * free), dtype=torch.uint8, device="cuda:0")
del kept
second = load_model(sys.argv[1], reserve=Reserve(fixed=int(0.6 * free)))
print(first.report.within, second.report.within)
"""


def test_what_torch_keeps_for_itself_is_room_for_a_second_model(model: Path) -> None:
    # Named, because a container hides from the driver's list which process is ours.
    done = child("-c", AGAIN, str(model), CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]
