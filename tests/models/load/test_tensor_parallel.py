"""Each layer over several processes: what can't be divided is refused before; two by gloo compute what one does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.forking import Forking

from gpuherd.errors import BadModel, MissingExtra, UsageError
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.load.options import LoadRequest
from gpuherd.models.load.prepare import ModelDoesNotFit
from gpuherd.models.load.tensor_parallel import (
    TensorParallelRank,
    command,
    environment_for,
    load_tensor_parallel,
    plan_tensor_parallel,
    relaunch,
    this_rank,
)
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import MemoryPlan

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

Small = Callable[..., Path]

LOGITS = """
import os, sys, torch
from gpuherd.models.load.options import LoadRequest
from gpuherd.models.load.tensor_parallel import leave, load_tensor_parallel, this_rank
loaded, _ = load_tensor_parallel(LoadRequest(model=sys.argv[1], dtype="fp32"))
ids = torch.arange(24, device=loaded.input_device).reshape(2, 12)
with torch.inference_mode():
    logits = loaded.model(ids).logits
    answer = loaded.model.generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=0)
if this_rank(os.environ).number == 0:
    parameters = sum(each.to_local().numel() if hasattr(each, "to_local") else each.numel()
                     for each in loaded.model.parameters())
    torch.save({"logits": logits, "answer": answer, "parameters": parameters}, sys.argv[2])
leave()
"""


def two_ranks(script: str, *words: str) -> None:
    """Runs the script as two ranks by gloo, as torchrun would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "2"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    modules = ("torch.distributed.tensor", "transformers.models.llama.modeling_llama")
    with Forking(*modules, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="") as forking:
        running = [
            forking.start(code=script, words=words, env={**common, "RANK": str(number), "LOCAL_RANK": str(number)})
            for number in range(2)
        ]
        for program in running:
            done = program.end()
            assert done.returncode == 0, done.stderr[-3000:]


def ranks(tmp_path: Path, script: str, *words: str, cuda: bool = False) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "ranks.py"
    path.write_text(script)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({} if cuda else {"CUDA_VISIBLE_DEVICES": ""})}
    return subprocess.run(run, env=environment, capture_output=True, text=True, timeout=110)


def gpus() -> int:
    return int(torch.cuda.device_count())


@pytest.mark.parametrize("cuda", [False, True], ids=["gloo", "nccl"])
def test_two_processes_compute_what_one_does(small: Small, tmp_path: Path, cuda: bool) -> None:
    from transformers import AutoModelForCausalLM

    if cuda and gpus() < 2:
        pytest.skip("needs two GPUs")
    folder = small("llama", dtype="float32")
    if cuda:
        done = ranks(tmp_path, LOGITS, str(folder), str(tmp_path / "out.pt"), cuda=True)
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        two_ranks(LOGITS, str(folder), str(tmp_path / "out.pt"))
    found = torch.load(tmp_path / "out.pt", map_location="cpu")
    one = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(24).reshape(2, 12)
    with torch.inference_mode():
        logits = one(ids).logits
        answer = one.generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=0)
    assert (found["logits"] - logits).abs().max() < 1e-5
    assert torch.equal(found["answer"], answer)
    # As planned: half of all but the norms.
    architecture = read_architecture(str(folder))
    split = sum(tensor.numel for tensor in architecture.tensors() if tensor.split)
    assert found["parameters"] == architecture.parameters - split // 2


@pytest.mark.slow
def test_the_worker_becomes_a_rank_for_each_gpu(small: Small, tmp_path: Path) -> None:
    words = [
        "--parallel",
        "tensor",
        "--gpus",
        "2x40GB",
        "--simulate",
        "--prompt-tokens",
        "16",
        "--json",
        str(tmp_path / "out.json"),
    ]
    run = [sys.executable, "-m", "gpuherd.models.load.worker", str(small("llama")), *words]
    done = subprocess.run(run, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["trial"]["finite"] and report["within_tolerance"]
    (here,) = report["devices"]
    assert here["blocks"] == "part 1 of 2 of every layer" and here["real_bytes"] == here["predicted_bytes"]


@pytest.mark.slow
def test_a_rank_that_dies_ends_all(tmp_path: Path) -> None:
    script = "import os, time\nif os.environ['RANK'] == '1': os._exit(9)\ntime.sleep(100)\n"
    assert ranks(tmp_path, script).returncode != 0  # within the time limit of the call: the other did not go on


def asked(model: object, **more: object) -> LoadRequest:
    return LoadRequest(**{"model": str(model), "gpus": "2x40GB", **more})  # type: ignore[arg-type]


def test_what_can_be_divided_is_planned_without_torch(small: Small) -> None:
    plan = plan_tensor_parallel(asked(small("llama"), gpus="4x40GB"))
    # Two key-value heads: four GPUs don't divide them.
    assert plan.parallel == "tensor" and plan.gpus == 2


@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        ({"quantization": "int8"}, ModelDoesNotFit, "can't be split by transformers' tensor parallelism"),
        ({"adapter": "x"}, UsageError, "no adapter, no offloading"),
        ({"allow_offload": "cpu"}, UsageError, "no adapter, no offloading"),
        ({"device_map": "cpu"}, UsageError, "no device map"),
        ({"gpus": "2x1MB"}, ModelDoesNotFit, "needs"),
    ],
)
def test_what_does_not_go_with_it_is_refused_before(
    small: Small, more: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        plan_tensor_parallel(asked(small("llama"), **more))


def test_an_adapters_folder_is_not_its_base(small: Small, tmp_path: Path) -> None:
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": str(small("llama")),
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    factors: dict[str, Any] = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        factors |= {f"{name}.lora_A.weight": torch.zeros(4, 64), f"{name}.lora_B.weight": torch.zeros(64, 4)}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UsageError, match="is an adapter: merge it"):
        plan_tensor_parallel(asked(tmp_path))


def test_gpus_that_are_there_are_not_replaced_by_the_processor(small: Small, standin: Any) -> None:
    if gpus():
        pytest.skip("torch sees real GPUs")
    standin("2x40GB")
    with pytest.raises(MissingExtra, match="the plan is for GPUs, and torch"):
        relaunch(asked(small("llama"), gpus="auto"), ["no.such.module"])


def test_what_a_card_can_not_compute_in_is_refused(small: Small) -> None:
    with pytest.raises(ModelDoesNotFit, match="bf16 needs compute capability"):
        plan_tensor_parallel(asked(small("llama"), gpus="2xGTX1080Ti"))


def test_no_computer_holds_the_pretended_whole(small: Small) -> None:
    """Each rank has its own part: the room for all of it on this machine is not asked for."""
    assert plan_tensor_parallel(asked(small("llama"), gpus="2x80GB")).gpus == 2


def test_a_model_whose_layers_transformers_can_not_split_is_refused(small: Small) -> None:
    with pytest.raises(ModelDoesNotFit, match="can't split the layers of gpt2"):
        plan_tensor_parallel(asked(small("gpt2")))


def test_more_ranks_than_divide_the_heads_are_refused(small: Small) -> None:
    with pytest.raises(ModelDoesNotFit, match="can be divided over 2 GPUs, and 4 ranks were started"):
        load_tensor_parallel(asked(small("llama")), TensorParallelRank(0, 0, 4))


def test_a_process_that_nobody_started_as_a_rank_is_told_so(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="under torchrun"):
        load_tensor_parallel(asked(small("llama")))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadModel):
        plan_tensor_parallel(asked(tmp_path / "nothing"))


def test_ranks_see_the_plans_gpus_and_share_the_cores() -> None:
    architecture = read_architecture("llama-3.1-8b")
    cards = [GpuSpec(str(place), "A100", 40 << 30, 40 << 30, (8, 0), f"GPU-{place}") for place in range(2)]
    plan = make_plan(architecture, cards, Precision.BF16, Workload(), parallel="tensor")
    assert isinstance(plan, MemoryPlan)
    found = environment_for(plan, {"HOME": "/x", "CUDA_VISIBLE_DEVICES": "0,1,2"}, cores=8)
    assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"], found["HOME"]) == ("GPU-0,GPU-1", "4", "/x")
    assert environment_for(plan, {}, cores=1, pretend=True)["CUDA_VISIBLE_DEVICES"] == ""


def test_the_command_line_of_the_ranks() -> None:
    words = command(2, ["gpuherd.models.load.worker", "m", "--json", "x"])
    assert words[:2] == [sys.executable, "-P"]
    assert words[words.index("torch.distributed.run") :] == [
        "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0",
        "-m", "gpuherd.models.load.worker", "m", "--json", "x",
    ]  # fmt: skip


def test_the_rank_of_a_process() -> None:
    assert this_rank({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}) == TensorParallelRank(1, 1, 2)
    assert this_rank({}) is None and this_rank({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}) is None
