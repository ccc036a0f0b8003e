"""``gpuherd plan`` as users run it: exit codes, what it says of real models, and that every command it names works."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuherd.cli.main import build_parser, run
from gpuherd.cli.plan import agrees, check_lines, worker_words
from gpuherd.errors import BadModel, ExitCode, GpuherdError, UsageError
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.load.worker import LoadWorkerOptions
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import parse_gpus
from gpuherd.models.place.page import Window, text_of
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.request import PlanOptions, PlanRequest, TrainingOptions
from gpuherd.models.place.result import MemoryPlan
from gpuherd.options import Parser, add_options, build
from gpuherd.standin.machine import SimulatedMachine

Standin = Callable[..., SimulatedMachine]
Capture = pytest.CaptureFixture[str]

SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Path]:
    """A folder with a config alone."""

    def make(name: str = "small", **fields: object) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**SMALL, **fields}))
        return folder

    return make


def told(capsys: Capture, *words: str, code: int = ExitCode.OK) -> str:
    assert run(["plan", *words]) == code
    return capsys.readouterr().out


def as_json(capsys: Capture, *words: str, code: int = ExitCode.OK) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(told(capsys, *words, "--json", code=code))
    return read


def plan_of(capsys: Capture, *words: str, code: int = ExitCode.OK) -> dict[str, Any]:
    plans = as_json(capsys, *words, code=code)["plans"]
    assert len(plans) == 1
    plan: dict[str, Any] = plans[0]
    return plan


def commands(text: str) -> list[list[str]]:
    """The words of the commands that are printed, put together again where they go over several lines."""
    joined = text.replace(" \\\n", " ")
    return [shlex.split(line) for line in joined.splitlines() if line.startswith("  ") and " plan " in line]


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_the_guides_own_case(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = told(capsys, "llama-3.1-70b", "--gpus", "4xA100-40", "--batch", "8")
    first = text.splitlines()[0]
    assert first.startswith("llama-3.1-70b in bf16 fits on 4 of 4 GPUs of 39.4 GiB: 1 replica, at most ")
    assert first.endswith(" answers of 576 tokens at once.")
    assert "weights  131.4 GiB (141.11 GB) in bf16" in text
    assert "70,553,706,496 parameters in 80 layers" in text
    assert "gpuherd submit --num-gpus 4 --mem " in text
    assert "sbatch --gres=gpu:4 " in text


def test_a_refusal_says_what_is_missing_and_what_would_fit(capsys: Capture) -> None:
    plan = plan_of(capsys, "llama-3.1-70b", "--gpus", "4x24GB", code=ExitCode.FAILED)
    assert plan["fits"] is False
    assert plan["missing_bytes"] > 10 << 30
    assert plan["alternatives"]
    text = told(capsys, "llama-3.1-70b", "--gpus", "4x24GB", code=ExitCode.FAILED)
    assert text.startswith("Doesn't fit: llama-3.1-70b in bf16 needs ")
    printed = commands(text)
    assert printed == [each["command"] for each in plan["alternatives"]]


@pytest.mark.parametrize(
    "words",
    [
        ["llama-3.1-70b", "--gpus", "4x24GB", "--batch", "8"],
        ["llama-3.1-8b", "--gpus", "2x24GB", "--batch", "4000", "--dtype", "fp16"],
        ["llama-2-13b-8bit", "--gpus", "1xT4", "--new-tokens", "1000"],
        ["llama-3.1-8b", "--gpus", "3x10GB", "--parallel", "replica"],
        ["llama-3.1-8b", "--gpus", "4x10GB", "--gpus-per-job", "1"],
        ["llama-3.1-8b", "--gpus", "2x40GB", "--train", "sft", "--batch", "4", "--no-checkpointing"],
        ["llama-3.1-70b", "--gpus", "1xT4", "--dtype", "fp32", "--parallel", "replica", "--prompt-tokens", "8000"],
        ["qwen2.5-72b", "--gpus", "2x24GB", "--batch", "64", "--prompt-tokens", "8000", "--gpus-per-job", "2"],
        ["phi-4", "--gpus", "1xT4", "--batch", "8", "--prompt-tokens", "16", "--train", "ppo"],
        ["llama-3.1-8b", "--gpus", "4x24GB", "--train", "dpo", "--strategy", "ddp", "--new-tokens", "4000"],
        ["llama-3.1-70b", "--gpus", "8x40GB", "--train", "grpo", "--lora", "8"],
    ],
)
def test_every_alternative_fits_when_it_is_asked_for(capsys: Capture, words: list[str]) -> None:
    plan = plan_of(capsys, *words, code=ExitCode.FAILED)
    assert plan["alternatives"]
    for each in plan["alternatives"]:
        assert each["command"][:2] == ["gpuherd", "plan"]
        assert plan_of(capsys, *each["command"][2:])["fits"], each


def test_every_next_step_is_a_command_of_ours(capsys: Capture) -> None:
    parser = build_parser(["submit", "plan"])
    for words in (
        ["llama-3.1-8b", "--gpus", "4x40GB"],
        ["llama-3.1-8b", "--gpus", "4x40GB", "--train", "sft", "--lora"],
    ):
        text = told(capsys, *words).replace(" \\\n", " ")
        lines = [shlex.split(line) for line in text.splitlines() if line.startswith("  gpuherd ")]
        assert lines
        for line in lines:
            args, unknown = parser.parse_known_args(line[1:])
            assert not unknown
            if args.command == "submit":
                assert args.words[0] == "--"


def test_the_request_holds_what_each_gpu_takes(capsys: Capture) -> None:
    plan = plan_of(capsys, "llama-3.1-70b", "--gpus", "4x40GB")
    assert plan["request"]["gpus"] == len(plan["gpus"]) == 4
    assert plan["request"]["memory_mb"] << 20 >= max(gpu["used_bytes"] for gpu in plan["gpus"])
    for gpu in plan["gpus"]:
        parts = ("weights", "quantisation", "cache", "workspace", "context", "reserve")
        assert (
            sum(gpu[f"{part}_bytes"] for part in parts) == gpu["used_bytes"] == gpu["total_bytes"] - gpu["left_bytes"]
        )


def test_the_device_map_alone(capsys: Capture) -> None:
    words = ["llama-3.1-70b", "--gpus", "4x40GB"]
    read = json.loads(told(capsys, *words, "--device-map"))
    assert read == plan_of(capsys, *words)["device_map"]
    assert set(read.values()) == {0, 1, 2, 3}
    assert {"model.embed_tokens", "model.norm", "lm_head", "model.layers.79"} <= set(read)


def test_a_refused_device_map_leaves_standard_output_empty(capsys: Capture) -> None:
    assert run(["plan", "llama-3.1-70b", "--gpus", "1x24GB", "--device-map"]) == ExitCode.FAILED
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "lacks" in shown.err


def test_without_gpus_a_table_of_usual_ones(capsys: Capture, standin: Standin) -> None:
    # The stand-in driver without a machine: there are no GPUs.
    text = told(capsys, "llama-3.1-70b")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line[:1].isupper() and "GiB" in line}
    assert rows["A100-40"][3] == "4"
    assert rows["A100-80"][3:5] == ["2", "1"]
    read = as_json(capsys, "llama-3.1-70b")
    assert {each["name"] for each in read["plans"][0]["usual_gpus"]} >= {"T4", "RTX4090", "A100-80"}
    assert commands(text) == [["gpuherd", "plan", "llama-3.1-70b", "--gpus", "4xA100-40"]]
    training = told(capsys, "llama-3.1-8b", "--train", "sft", "--strategy", "fsdp")
    assert training.startswith("GPUs that SFT of llama-3.1-8b takes")
    for words in commands(training):
        assert run(words[1:]) == ExitCode.OK
    capsys.readouterr()


def test_without_gpus_a_model_that_is_not_there_does_not_stop_the_others(
    capsys: Capture, standin: Standin, tmp_path: Path
) -> None:
    words = [f"{tmp_path}/none", "llama-3.2-1b"]
    text = told(capsys, *words, code=ExitCode.MISSING)
    assert "none: no plan: model" in " ".join(text.split())
    assert "GPUs that it takes" in text
    none, known = as_json(capsys, *words, code=ExitCode.MISSING)["plans"]
    assert none["model"]["name"] == words[0]
    assert none["fits"] is None
    assert "no such folder" in none["error"]
    assert known["usual_gpus"]


def test_several_models_a_line_each(capsys: Capture) -> None:
    words = ["llama-3.2-1b", "llama-3.1-8b-4bit", "llama-3.1-70b", "--gpus", "2x24GB"]
    text = told(capsys, *words, code=ExitCode.FAILED)
    assert text.startswith("2 of 3 models fit on 2 GPUs of 24.0 GiB")
    read = as_json(capsys, *words, code=ExitCode.FAILED)
    assert read["fits"] is False
    assert [(plan["model"]["name"], plan["dtype"], plan["fits"]) for plan in read["plans"]] == [
        ("llama-3.2-1b", "bf16", True),
        ("llama-3.1-8b", "nf4", True),
        ("llama-3.1-70b", "bf16", False),
    ]
    assert told(capsys, *words[:2], "--gpus", "2x24GB").startswith("2 of 2 models fit")


def test_a_bad_model_harms_no_other(capsys: Capture) -> None:
    words = ["llama-3.2-1b", "/no/such/model", "--gpus", "2x24GB"]
    text = told(capsys, *words, code=ExitCode.MISSING)
    assert text.startswith("1 of 2 models fit")
    assert "no plan" in text
    plans = as_json(capsys, *words, code=ExitCode.MISSING)["plans"]
    assert [plan["fits"] for plan in plans] == [True, None]
    assert "/no/such/model" in plans[1]["error"]


def test_an_encoder_reads_texts_and_writes_no_answers(capsys: Capture, small: Callable[..., Path]) -> None:
    folder = small("bert", model_type="bert", max_position_embeddings=512, type_vocab_size=2, dtype="float32")
    text = told(capsys, str(folder), "--gpus", "1x8GB")
    assert " texts of 512 tokens" in " ".join(text.split())
    assert "made for at most" not in text


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def test_the_checkpoints_dtype_is_the_default(capsys: Capture, small: Callable[..., Path]) -> None:
    half, unknown = small("half", dtype="float16"), small("unknown")
    assert plan_of(capsys, str(half), "--gpus", "1x8GB")["dtype"] == "fp16"
    plan = plan_of(capsys, str(unknown), "--gpus", "1x8GB")
    assert plan["dtype"] == "bf16"
    assert any("bf16 is assumed" in sentence for sentence in plan["model"]["assumptions"])
    assert "note: " in told(capsys, str(unknown), "--gpus", "1x8GB")


@pytest.mark.parametrize(("suffix", "dtype"), [("-8bit", "int8"), ("-4bit", "nf4")])
def test_the_guides_suffixes(capsys: Capture, small: Callable[..., Path], suffix: str, dtype: str) -> None:
    plan = plan_of(capsys, f"llama-3.1-8b{suffix}", "--gpus", "1x24GB")
    assert plan["dtype"] == dtype
    assert plan == plan_of(capsys, "llama-3.1-8b", "--dtype", dtype, "--gpus", "1x24GB")
    folder = small(f"mine{suffix}", dtype="float32")
    assert plan_of(capsys, str(folder), "--gpus", "1x8GB")["dtype"] == "fp32", "a folder of that very name wins"


def test_two_dtypes_are_one_too_many() -> None:
    with pytest.raises(UsageError, match="leave one of them out"):
        run(["plan", "llama-3.1-8b-8bit", "--dtype", "nf4", "--gpus", "1x24GB"])


def test_double_quantisation_is_4_bit_too(capsys: Capture) -> None:
    words = ["--gpus", "1x24GB", "--dtype", "nf4-dq"]
    assert plan_of(capsys, "llama-3.1-8b-4bit", *words) == plan_of(capsys, "llama-3.1-8b", *words)


def test_what_is_quantised_already_stays_so(capsys: Capture, small: Callable[..., Path]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    folder = small("packed", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    tensors = {
        "model.embed_tokens.weight": np.zeros((1000, 256), np.float16),
        "model.norm.weight": np.zeros(256, np.float16),
    }
    tensors["lm_head.weight"] = np.zeros((1000, 256), np.float16)
    for layer in range(4):
        before = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{before}.{name}.weight"] = np.zeros(256, np.float16)
        sizes = {"q_proj": (256, 256), "k_proj": (256, 128), "v_proj": (256, 128), "o_proj": (256, 256)}
        modules = {f"self_attn.{name}": size for name, size in sizes.items()}
        modules |= {"mlp.gate_proj": (256, 512), "mlp.up_proj": (256, 512), "mlp.down_proj": (512, 256)}
        for name, (rows, columns) in modules.items():
            groups = rows // 128
            tensors[f"{before}.{name}.qweight"] = np.zeros((rows // 8, columns), np.int32)
            tensors[f"{before}.{name}.qzeros"] = np.zeros((groups, columns // 8), np.int32)
            tensors[f"{before}.{name}.scales"] = np.zeros((groups, columns), np.float16)
            tensors[f"{before}.{name}.g_idx"] = np.zeros(rows, np.int32)
    save_file(tensors, folder / "model.safetensors")
    plan = plan_of(capsys, str(folder), "--gpus", "1x8GB")
    assert plan["dtype"] == "as-stored"
    assert plan["weights_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    with pytest.raises(UsageError, match="quantised already"):
        run(["plan", str(folder), "--gpus", "1x8GB", "--dtype", "int8"])


def test_an_adapter_beside_its_base(capsys: Capture, small: Callable[..., Path], tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    base, other = small("base", dtype="float32"), small("other", dtype="float32", hidden_size=128)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": str(base),
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(4):
        before = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{before}.lora_A.weight"] = np.zeros((4, 256), np.float32)
        tensors[f"{before}.lora_B.weight"] = np.zeros((256, 4), np.float32)
    save_file(tensors, adapter / "adapter_model.safetensors")
    alone = plan_of(capsys, str(base), "--gpus", "1x8GB")
    both = plan_of(capsys, str(base), "--gpus", "1x8GB", "--adapter", str(adapter))
    assert both["weights_bytes"] - alone["weights_bytes"] == 4 * 2 * 4 * 256 * 4
    assert plan_of(capsys, str(adapter), "--gpus", "1x8GB")["weights_bytes"] == both["weights_bytes"]
    with pytest.raises(BadModel, match="q_proj"):
        run(["plan", str(other), "--gpus", "1x8GB", "--adapter", str(adapter)])


# ---- what was said ---------------------------------------------------------------------------------------------------


def test_what_is_kept_free_can_be_said(capsys: Capture) -> None:
    words = ["llama-3.1-8b", "--gpus", "1x40GB"]
    usual, none = plan_of(capsys, *words), plan_of(capsys, *words, "--reserve", "0", "--cuda-context", "1MB")
    assert usual["gpus"][0]["reserve_bytes"] == (256 << 20) + int(0.05 * (40 << 30))
    assert (none["gpus"][0]["reserve_bytes"], none["gpus"][0]["context_bytes"]) == (0, 1 << 20)
    assert none["largest_batch"] > usual["largest_batch"]


def test_the_largest_batch_fits_and_one_more_does_not(capsys: Capture) -> None:
    words = ["llama-3.1-8b", "--gpus", "1x24GB", "--prompt-tokens", "2000"]
    most = plan_of(capsys, *words)["largest_batch"]
    assert plan_of(capsys, *words, "--batch", str(most))["fits"]
    plan_of(capsys, *words, "--batch", str(most + 1), code=ExitCode.FAILED)


def test_ways_to_lay_it_out(capsys: Capture) -> None:
    words = ["llama-3.1-8b", "--gpus", "4x40GB"]
    assert plan_of(capsys, *words)["replicas"] == 4
    assert len(plan_of(capsys, *words, "--parallel", "layers")["gpus"]) == 4
    assert len(plan_of(capsys, *words, "--gpus-per-job", "2")["gpus"]) == 2
    tensor = plan_of(capsys, *words, "--parallel", "tensor")
    assert (tensor["parallel"], tensor["device_map"]) == ("tensor", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "4x40"], "of what"),
        (["--gpus", "0x40GB"], "at least 1"),
        (["--gpus=-2x40GB"], "at least 1"),
        (["--gpus", "2xA100"], "A100-40 or A100-80"),
        (["--gpus", "auto"], "--gpus 4x40GB"),
        (["--gpus", "4x40GB", "--gpus-per-job", "5"], "there are 4"),
        (["--gpus", "4x40GB", "--busy-too"], "--gpus auto"),
        (["--gpus", "4x40GB", "--lora"], "add --train"),
        (["--gpus", "4x40GB", "--strategy", "ddp"], "--strategy is said of a training"),
        (["--gpus", "4x40GB", "--train", "sft", "--dtype", "bf16"], "add --lora"),
        (["--gpus", "4x40GB", "--train", "sft", "--lora-targets", "q_proj"], "add --lora"),
        (["--gpus", "4x40GB", "--train", "sft", "--parallel", "tensor"], "--strategy"),
        (["--gpus", "4x40GB", "--train", "sft", "--device-map"], "without --train"),
        (["--gpus", "4x40GB", "--train", "sft", "--adapter", "x"], "--lora RANK"),
        (["--gpus", "4x40GB", "--train", "sft", "--lora", "--lora-targets", "nope"], "nope"),
        (["--gpus", "4x40GB", "--train", "sft", "--lora", "--lora-targets", " , "], "trains nothing"),
        (["--gpus", "4x40GB", "--train", "sft", "--samples", "3"], "--samples is an option of grpo"),
        (["--gpus", "4x40GB", "--train", "grpo", "--value", "model"], "--value is an option of ppo"),
        (["--gpus", "4x40GB", "--train", "sft", "--no-reshard"], "--no-reshard is an option of fsdp"),
        (["--gpus", "4x40GB", "--train", "sft", "--bucket-view"], "--bucket-view is an option of ddp"),
        (["--gpus", "4x40GB", "--train", "sft", "--reference", "no"], "with sft leave it out"),
        (["--gpus", "4x40GB", "--parallel", "tensor", "--device-map"], "no device map"),
        (["llama-3.2-1b", "--gpus", "4x40GB", "--device-map"], "one model"),
        (["llama-3.2-1b", "--gpus", "4x40GB", "--train", "sft"], "one model at a time"),
        (["--device-map"], "name those that the map is for"),
    ],
)
def test_wrong_words(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as problem:
        run(["plan", "llama-3.1-8b", *words])
    assert message in str(problem.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "0"], "'0' is not a whole number above 0"),
        (["--new-tokens", "-3"], "--new-tokens"),
        (["--dtype", "int7"], "there are fp32, bf16"),
        (["--reserve", "much"], "write 2GB, 5%"),
        (["--reserve", "60%+60%"], "whole GPU"),
        (["--parallel", "fast"], "tensor"),
        (["--train", "rlhf"], "grpo"),
        (["--dtpye", "bf16"], "did you mean --dtype"),
    ],
)
def test_wrong_values_name_the_right_ones(capsys: Capture, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as end:
        run(["plan", "llama-3.1-8b", "--gpus", "1x24GB", *words])
    assert end.value.code == ExitCode.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("model", ["", "../../etc/x\x1b[2J", "a\nb", "no/such/../path", "x" * 5000, "$(reboot)"])
def test_models_that_can_be_none(model: str) -> None:
    with pytest.raises(GpuherdError) as problem:
        run(["plan", model, "--gpus", "1x24GB"])
    assert str(problem.value).isprintable()
    assert problem.value.exit_code in (ExitCode.BAD_INPUT, ExitCode.MISSING, ExitCode.USAGE)


def test_a_typo_names_the_nearest(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadModel, match=r"[Ll]lama-3\.1-70B"):
        run(["plan", "lama-3.1-70b", "--gpus", "1x24GB"])
    with pytest.raises(BadModel):
        run(["plan", "lama-3.1-70b", "--gpus", "1x24GB", "--json"])
    assert json.loads(capsys.readouterr().out)["exit_code"] in (ExitCode.BAD_INPUT, ExitCode.MISSING)


def test_a_config_of_strangers_is_printable(capsys: Capture, small: Callable[..., Path]) -> None:
    folder = small("it's $(a) trap", model_type="llama", architectures=["\x1b]0;owned\x07"], dtype="float16")
    text = told(capsys, str(folder), "--gpus", "1x8GB")
    assert text.replace("\n", "").isprintable()
    (words,) = commands(text)
    assert json.loads(told(capsys, *words[2:]))["lm_head"] == 0


# ---- loading as planned ----------------------------------------------------------------------------------------------


def checked_words(*, here: bool = False, simulate: str | None = None, **options: Any) -> list[str]:
    """The words of the worker for a plan of Llama-3.1-8B on four GPUs."""
    chosen = PlanOptions(gpus="4x40GB", **options)
    asked = PlanRequest(("llama-3.1-8b-8bit",), chosen, TrainingOptions(), simulate, here)
    plan = make_plan(read_architecture("llama-3.1-8b"), parse_gpus("4x10GB"), Precision.INT8, chosen.workload())
    assert isinstance(plan, MemoryPlan)
    return worker_words(plan, asked, Path("map.json"), Path("report.json"))


def test_a_check_on_this_machine_takes_gpus_as_any_job_does() -> None:
    words = checked_words(here=True)
    at = words.index("--")
    assert words[:4] == [sys.executable, "-m", "gpuherd", "run"]
    parser = build_parser(["run"])
    args, unknown = parser.parse_known_args(words[3:])
    assert (unknown, args.num_gpus > 0, args.no_wait) == ([], True, True)
    assert "--simulate" not in words[at:]


@pytest.mark.parametrize(("here", "simulate"), [(False, None), (True, "4x40GB")])
def test_a_check_of_gpus_that_are_not_here_pretends_them(here: bool, simulate: str | None) -> None:
    words = checked_words(here=here, simulate=simulate, batch=3, adapter="org/lora")
    assert words[:4] == [sys.executable, "-m", "gpuherd.models.load.worker", "llama-3.1-8b"]
    parser = Parser()
    add_options(parser, LoadWorkerOptions)
    options = build(LoadWorkerOptions, parser.parse_args(words[4:]))
    assert (options.simulate, options.device_map, options.json) == (True, "map.json", "report.json")
    assert (options.batch, options.prompt_tokens, options.new_tokens) == (3, 512, 64)
    assert (options.dtype, options.adapter) == ("int8", "org/lora")


REPORT: dict[str, Any] = {
    "class": "LlamaForCausalLM",
    "simulated": True,
    "seconds": 3.25,
    "within_tolerance": True,
    "notes": ["a note"],
    "trial": {"finite": True, "within_plan": True},
    "devices": [
        {"device": 0, "blocks": "embedding, layers 0-2", "predicted_bytes": 1000, "real_bytes": 1001},
        {"device": "cpu\x1b", "blocks": "head", "predicted_bytes": 0, "real_bytes": None},
    ],
}


def test_a_check_in_words() -> None:
    text = "\n".join(text_of(line) for line in check_lines(REPORT, Window(80)))
    assert "take the memory it predicts" in " ".join(text.split())
    assert " ".join(text.split()).count("GPU 0 1,000 1,001 +0.100 % embedding, layers 0-2") == 1
    assert "cpu\\x1b" in text
    bad = {**REPORT, "trial": {"finite": True, "within_plan": False}}
    assert not agrees(bad)
    text = "\n".join(text_of(line) for line in check_lines(bad, Window(80)))
    assert "it is NOT as planned" in " ".join(text.split())


@pytest.mark.parametrize(
    "words",
    [
        ["--gpus", "4x40GB", "--device-map"],
        ["--gpus", "4x40GB", "--train", "sft"],
        ["llama-3.2-1b", "--gpus", "4x40GB"],
        [],
        ["--gpus", "4x40GB", "--parallel", "tensor"],
    ],
)
def test_what_cannot_be_checked(words: list[str]) -> None:
    with pytest.raises(UsageError, match="--check"):
        run(["plan", "llama-3.1-8b", *words, "--check"])


@pytest.mark.slow
def test_a_small_model_is_loaded_as_planned(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=300
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "tiny")
    words = [str(tmp_path / "tiny"), "--gpus", "2x1GB", "--parallel", "layers", "--prompt-tokens", "20", "--check"]
    done = plan_process(*words, "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    plan = json.loads(done.stdout)["plans"][0]
    assert plan["check"]["device_map"] == plan["device_map"]
    assert plan["check"]["within_tolerance"]
    # Weights that are not to be had are the worker's to tell, and its exit code is ours.
    done = plan_process("llama-3.1-8b", "--gpus", "1x40GB", "--check", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert (done.returncode, "was not loaded as planned" in done.stderr) == (ExitCode.MISSING, True)


# ---- this machine ----------------------------------------------------------------------------------------------------


def test_free_gpus_of_this_machine_are_the_default(capsys: Capture, standin: Standin) -> None:
    machine = standin("4x40GB")
    machine.occupy(1, 20_000)
    read = as_json(capsys, "llama-3.1-70b-4bit")
    assert (read["this_machine"], len(read["given_gpus"])) == (True, 3)
    assert any("GPU 1 is left out" in sentence for sentence in read["left_out"])
    text = told(capsys, "llama-3.1-70b-4bit")
    assert "note: GPU 1 is left out" in text
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=" in text
    both = as_json(capsys, "llama-3.1-8b", "--gpus", "auto", "--busy-too")
    assert len(both["given_gpus"]) == 4
    assert min(card["free_bytes"] for card in both["given_gpus"]) < 21 << 30


def test_no_gpu_is_free(standin: Standin) -> None:
    machine = standin("1x40GB")
    machine.occupy(0, 20_000)
    with pytest.raises(UsageError, match=r"GPU 0 is left out.*--busy-too"):
        run(["plan", "llama-3.1-8b"])


# ---- looks -----------------------------------------------------------------------------------------------------------

LOOKS = [
    ["llama-3.1-70b", "--gpus", "4x40GB", "--batch", "8"],
    ["llama-3.1-70b", "--gpus", "4x24GB", "--batch", "8"],
    ["llama-3.1-8b", "--gpus", "8xH100", "--parallel", "tensor"],
    ["llama-3.2-1b", "llama-3.1-8b", "llama-3.1-405b", "--gpus", "2x80GB+4x24GB"],
    ["llama-3.1-70b-4bit"],
    ["llama-3.1-8b", "--gpus", "8x40GB", "--train", "sft", "--strategy", "fsdp"],
    ["llama-3.1-8b", "--gpus", "4x24GB", "--train", "ppo"],
    ["llama-3.1-8b", "--train", "grpo", "--lora"],
]


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
@pytest.mark.parametrize("width", ["40", "80", "200"])
def test_lines_keep_within_the_window(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: list[str], width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    run(["plan", *words])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= int(width)
    assert "\x1b" not in text, "no colours where nobody sees them"
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def plan_process(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-m", "gpuherd", "plan", *words], capture_output=True, text=True, check=False, env=environment
    )


def test_signs_of_ascii_where_there_are_no_others() -> None:
    done = plan_process("llama-3.1-8b", "--gpus", "1x40GB", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "# weights" in done.stdout


def on_a_terminal(*words: str, **variables: str) -> str:
    """What is printed where somebody sees it."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **variables}
    command = [sys.executable, "-m", "gpuherd", "plan", *words]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        pieces = []
        with contextlib.suppress(OSError):  # this is how a terminal ends
            while piece := os.read(controller, 65536):
                pieces.append(piece)
        process.wait()
    os.close(controller)
    return b"".join(pieces).decode()


def test_colours_on_a_terminal_and_never_by_colour_alone() -> None:
    words = ["llama-3.1-8b", "--gpus", "1x40GB"]
    coloured = on_a_terminal(*words)
    assert "\x1b[1;32m" in coloured
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured).replace("\r\n", "\n")
    assert [line.rstrip() for line in bare.splitlines()] == plan_process(*words, COLUMNS="100").stdout.splitlines()
    assert "\x1b[1;32m" not in on_a_terminal(*words, NO_COLOR="1")


HEAVY = {"torch", "numpy", "transformers", "rich", "huggingface_hub", "safetensors", "psutil"}


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from gpuherd.cli.main import run; code = run(sys.argv[1:]); "
        f"print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    for words in (["--batch", "8"], ["--train", "sft", "--strategy", "fsdp"]):
        done = subprocess.run(
            [sys.executable, "-c", program, "plan", "llama-3.1-8b", "--gpus", "8x40GB", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr.strip()) == (0, "[]")


@pytest.mark.parametrize(("command", "extra"), [("plan", "plan"), ("merge", "load")])
def test_without_the_libraries_the_extra_is_named(command: str, extra: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    words = [str(tmp_path), *(["--output-dir", "out"] if command == "merge" else ["--gpus", "1x24GB"])]
    script = "import sys; sys.modules['numpy'] = None; from gpuherd.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", script, command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"pip install 'gpuherd[{extra}]'" in done.stderr
