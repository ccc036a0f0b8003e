"""Merging to disk: files equal, byte for byte, to those of PEFT's merge_and_unload and save_pretrained."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from tests.models.conftest import build
from tests.models.peft_adapters import save_adapter

from gpuherd.errors import BadModel, CannotWrite, MissingModel, QueueBusy, UsageError
from gpuherd.models.lora.merge import RECORD, final_folder, merge_to_folder, prepare_merge

Tiny = Callable[..., tuple[Any, Path]]

ALL_LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FORMATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def in_format(folder: Path, target: Path, dtype: torch.dtype) -> Path:
    """The model of ``folder`` saved in another format."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(target)
    return target


def train(base_folder: Path, folder: Path, *, auto_class: str = "AutoModelForCausalLM", **settings: Any) -> None:
    """A PEFT adapter of the model in ``base_folder`` with random trained weights, saved into ``folder``."""
    import transformers

    torch.manual_seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_adapter(getattr(transformers, auto_class).from_pretrained(base_folder), folder, **settings)


def by_peft(
    base_folder: Path, adapter: Path, target: Path, *, auto_class: str = "AutoModelForCausalLM", **loading: Any
) -> Path:
    """What PEFT and transformers make of both."""
    import transformers
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = getattr(transformers, auto_class).from_pretrained(base_folder, **loading)
        PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(target)
    return target


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(ours: Path, theirs: Path) -> None:
    """The same tensors, bit for bit."""
    mine, wanted = tensors_of(ours), tensors_of(theirs)
    assert sorted(mine) == sorted(wanted)
    for name, tensor in wanted.items():
        assert mine[name].dtype == tensor.dtype, name
        assert mine[name].shape == tensor.shape, name
        assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ALL_LLAMA, "r": 5, "lora_alpha": 7}),
    "rslora": ("llama", {"target_modules": ALL_LLAMA, "use_rslora": True}),
    "dora": ("llama", {"target_modules": ALL_LLAMA, "use_dora": True}),
    "patterns": ("llama", {"target_modules": ALL_LLAMA, "rank_pattern": {"q_proj": 2, r"layers.1.*up_proj": 8},
                           "alpha_pattern": {"down_proj": 32, "model.layers.0.self_attn.k_proj": 1}}),
    "modules to save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "head": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "embeddings": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    "embeddings with dora": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2 with dora": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "use_dora": True,
                                "fan_in_fan_out": True}),
    "gpt2 tied embeddings": ("gpt2", {"target_modules": ["wte", "wpe", "c_proj"], "fan_in_fan_out": True}),
    "gpt2 biases": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    "opt trained biases": ("opt", {"target_modules": ["q_proj", "fc1"], "bias": "lora_only"}),
    "opt lora_bias": ("opt", {"target_modules": ["q_proj", "fc1"], "lora_bias": True}),
    "mixtral attention": ("mixtral", {"target_modules": ["q_proj", "o_proj"]}),
    "fused experts": ("gpt_oss", {"target_modules": ["q_proj"],
                                  "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "bloom": ("bloom", {"target_modules": ["query_key_value"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", VARIANTS)
def test_same_bytes_as_peft(tiny: Tiny, tmp_path: Path, case: str) -> None:
    model_type, settings = VARIANTS[case]
    _, base = tiny(model_type)
    train(base, tmp_path / "adapter", **settings)
    for name, dtype in FORMATS.items():
        folder = in_format(base, tmp_path / f"base-{name}", dtype)
        theirs = by_peft(folder, tmp_path / "adapter", tmp_path / f"peft-{name}")
        ours = tmp_path / f"ours-{name}"
        result = merge_to_folder(folder, tmp_path / "adapter", ours)
        assert_same(ours, theirs)
        assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
        assert result.plan.dtype == name and result.plan.changed and result.output == ours


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "olmoe"])
def test_factors_of_fused_experts(tiny: Tiny, tmp_path: Path, model_type: str, fused: bool) -> None:
    """transformers 5 fuses experts in memory, and PEFT trains them so; files have them apart, or fused if asked."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    _, folder = tiny(model_type)
    base, keep = tmp_path / "base", {"save_original_format": not fused}
    load = AutoModelForCausalLM.from_pretrained
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(folder, dtype=torch.bfloat16).save_pretrained(base, **keep)
        save_adapter(load(base), tmp_path / "a", target_modules=["q_proj"], target_parameters=EXPERTS)
        PeftModel.from_pretrained(load(base), tmp_path / "a").merge_and_unload().save_pretrained(tmp_path / "p", **keep)
    result = merge_to_folder(base, tmp_path / "a", tmp_path / "ours")
    assert_same(result.output, tmp_path / "p")
    assert len(result.plan.changed) == 2 + (4 if fused else 2 * 3 * 3)


def test_experts_of_other_shapes(tiny: Tiny, tmp_path: Path) -> None:
    _, base = tiny("qwen3_moe")
    train(base, tmp_path / "a", target_modules=["q_proj"], target_parameters=EXPERTS)
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "r": 2, "rank_pattern": {"q_proj": 4}}))
    with pytest.raises(BadModel, match="finds no experts in the base model that its factors"):
        prepare_merge(base, tmp_path / "a")


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("how", ["saved whole", "by factors"])
def test_the_trained_head_of_a_tied_model(tiny: Tiny, tmp_path: Path, form: str, how: str) -> None:
    model, base = tiny("opt")
    settings: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    if how == "by factors":
        settings = {"target_modules": ["q_proj", "lm_head"]}
    train(base, tmp_path / "a", **settings)
    theirs = by_peft(base, tmp_path / "a", tmp_path / "peft")
    if form == "bin":
        folder = tmp_path / "base"
        folder.mkdir()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        shutil.copy(base / "config.json", folder)
        base = folder
    ours = merge_to_folder(base, tmp_path / "a", tmp_path / "ours").output
    assert_same(ours, theirs)
    tied = json.loads((ours / "config.json").read_text())["tie_word_embeddings"]
    assert tied is (how == "by factors")
    assert tied is json.loads((theirs / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("tying", [False, True])
@pytest.mark.parametrize("saved", [["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_the_trained_embedding_of_a_tied_model(
    tiny: Tiny, tmp_path: Path, form: str, tying: bool, saved: list[str]
) -> None:
    """The head stays what the base's embedding was, unless both were trained as one."""
    model, base = tiny("opt")
    train(base, tmp_path / "a", target_modules=["q_proj"], modules_to_save=saved, ensure_weight_tying=tying)
    theirs = by_peft(base, tmp_path / "a", tmp_path / "peft")
    if form == "bin":
        folder = tmp_path / "base"
        folder.mkdir()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        shutil.copy(base / "config.json", folder)
        base = folder
    ours = merge_to_folder(base, tmp_path / "a", tmp_path / "ours").output
    assert_same(ours, theirs)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (ours, theirs)]
    assert configs[0]["tie_word_embeddings"] is configs[1]["tie_word_embeddings"] is tying


def test_a_grown_tied_model_stays_tied(tmp_path: Path) -> None:
    """PEFT saves embedding and head, which are one, beside the factors."""
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    build("llama", tie_word_embeddings=True).save_pretrained(base)
    larger = AutoModelForCausalLM.from_pretrained(base)
    larger.resize_token_embeddings(70)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_adapter(larger, tmp_path / "a", target_modules=["q_proj"])
    path = tmp_path / "a" / "adapter_model.safetensors"
    rows = larger.get_input_embeddings().weight.detach()
    names = ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight")
    save_file({**load_file(path), **{name: rows.clone() for name in names}}, path)
    ours = merge_to_folder(base, tmp_path / "a", tmp_path / "ours").output
    config = json.loads((ours / "config.json").read_text())
    assert config["tie_word_embeddings"] and config["vocab_size"] == 70
    assert "lm_head.weight" not in tensors_of(ours)
    loaded = AutoModelForCausalLM.from_pretrained(ours)
    assert torch.equal(loaded.lm_head.weight, rows)


def test_embedding_and_tied_head_trained_apart(tiny: Tiny, tmp_path: Path) -> None:
    _, base = tiny("opt")
    train(base, tmp_path / "a", target_modules=["lm_head"], modules_to_save=["embed_tokens"])
    with pytest.raises(BadModel, match="whole, and factors of the head that is tied to it"):
        prepare_merge(base, tmp_path / "a")


def test_another_format_is_what_peft_makes_of_a_base_loaded_in_it(tiny: Tiny, tmp_path: Path) -> None:
    _, base = tiny("llama")
    train(base, tmp_path / "a", target_modules=["q_proj", "down_proj"])
    for name, dtype in FORMATS.items():
        theirs = by_peft(base, tmp_path / "a", tmp_path / f"peft-{name}", dtype=dtype)
        ours = merge_to_folder(base, tmp_path / "a", tmp_path / f"ours-{name}", dtype=name).output
        assert_same(ours, theirs)
        config = json.loads((ours / "config.json").read_text())
        assert config["dtype"] == str(dtype).removeprefix("torch.")


def test_the_format_is_the_one_that_the_config_names(tiny: Tiny, tmp_path: Path) -> None:
    """A float32 file whose config says bfloat16 is loaded in that; a tensor of another format stays what it is."""
    _, base = tiny("llama")
    train(base, tmp_path / "a", target_modules=["q_proj"])
    folder = tmp_path / "base"
    folder.mkdir()
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    tensors = load_file(base / "model.safetensors")
    shutil.copy(base / "model.safetensors", folder)
    ours = merge_to_folder(folder, tmp_path / "a", tmp_path / "ours").output
    assert_same(ours, by_peft(folder, tmp_path / "a", tmp_path / "peft"))
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()} | {
        "model.norm.weight": tensors["model.norm.weight"], "model.steps": torch.tensor([3]),
    }  # fmt: skip
    save_file(halves, folder / "model.safetensors")
    merged = tensors_of(merge_to_folder(folder, tmp_path / "a", tmp_path / "mixed").output)
    assert merged["model.norm.weight"].dtype == torch.float32 and merged["model.steps"].dtype == torch.int64
    assert merged["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16


def test_files_are_divided_as_the_bases_or_by_size(tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, base = tiny("llama")
    train(base, tmp_path / "a", target_modules=ALL_LLAMA)
    theirs = by_peft(base, tmp_path / "a", tmp_path / "peft")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    files = sorted(path.name for path in (tmp_path / "sharded").glob("*.safetensors"))
    assert len(files) > 2
    kept = merge_to_folder(tmp_path / "sharded", tmp_path / "a", tmp_path / "kept")
    assert list(kept.files) == files
    parted = merge_to_folder(base, tmp_path / "a", tmp_path / "parted", shard_bytes=10_000)
    sizes = [(parted.output / file).stat().st_size for file in parted.files]
    assert len(sizes) > 4 and sorted(sizes)[-1] < 12_000
    for result in (kept, parted):
        assert_same(result.output, theirs)
        loaded = AutoModelForCausalLM.from_pretrained(result.output).state_dict()
        for name, tensor in tensors_of(theirs).items():
            assert torch.equal(loaded[name], tensor)
        index = json.loads((result.output / "model.safetensors.index.json").read_text())
        wanted = sum(tensor.numel() * 4 for tensor in tensors_of(theirs).values())
        assert index["metadata"] == {"total_parameters": wanted // 4, "total_size": wanted}


def test_a_classification_head(tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    _, base = tiny("llama")
    kind = "AutoModelForSequenceClassification"
    train(base, tmp_path / "a", auto_class=kind, target_modules=["q_proj"], task_type="SEQ_CLS")
    ours = merge_to_folder(base, tmp_path / "a", tmp_path / "ours").output
    theirs = tensors_of(by_peft(base, tmp_path / "a", tmp_path / "peft", auto_class=kind))
    mine = tensors_of(ours)
    assert mine.pop("lm_head.weight") is not None  # the base's, of no use to a classifier
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)
    config = json.loads((ours / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and len(config["id2label"]) == 2
    loaded = AutoModelForSequenceClassification.from_pretrained(ours)
    assert torch.equal(loaded.score.weight, theirs["score.weight"])


@pytest.mark.parametrize("use_dora", [False, True])
def test_convolutions(tmp_path: Path, use_dora: bool) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    def network() -> torch.nn.Module:
        torch.manual_seed(5)
        parts = [torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 1), torch.nn.Conv1d(4, 6, 3), torch.nn.Conv3d(2, 4, 2)]
        return torch.nn.Sequential(*parts).bfloat16()

    (tmp_path / "base").mkdir()
    save_file(network().state_dict(), tmp_path / "base" / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = LoraConfig(r=2, lora_alpha=3, target_modules=["0", "1", "2", "3"], use_dora=use_dora)
        adapted = get_peft_model(network(), settings)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0.0, 0.3)
        adapted.save_pretrained(tmp_path / "a")
        state = PeftModel.from_pretrained(network(), tmp_path / "a").merge_and_unload().state_dict()
    mine = tensors_of(merge_to_folder(tmp_path / "base", tmp_path / "a", tmp_path / "ours").output)
    assert all(torch.equal(mine[name].view(torch.uint8), state[name].view(torch.uint8)) for name in state)


@pytest.mark.parametrize("shape", [(257, 1031), (1031, 64), (64, 4096), (3, 5)])
@pytest.mark.parametrize("rank", [1, 7, 64])
def test_any_shape_and_rank(tmp_path: Path, shape: tuple[int, int], rank: int) -> None:
    """Against PEFT's own layer: products of all shapes are rounded alike."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def network() -> torch.nn.Module:
        torch.manual_seed(rank)
        return torch.nn.Sequential(torch.nn.Linear(shape[1], shape[0], bias=False)).bfloat16()

    (tmp_path / "base").mkdir()
    save_file(network().state_dict(), tmp_path / "base" / "model.safetensors")
    adapted = get_peft_model(network(), LoraConfig(r=rank, lora_alpha=3, target_modules=["0"], use_rslora=True))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "a")
    state = PeftModel.from_pretrained(network(), tmp_path / "a").merge_and_unload().state_dict()
    mine = tensors_of(merge_to_folder(tmp_path / "base", tmp_path / "a", tmp_path / "ours").output)
    assert torch.equal(mine["0.weight"].view(torch.int16), state["0.weight"].view(torch.int16))


# What lies beside the weights.


@pytest.fixture(scope="module")
def trained(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and an adapter of it."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(tiny("llama")[1], folder / "base")
    train(folder / "base", folder / "adapter", target_modules=["q_proj"])
    return folder


@pytest.fixture
def pair(trained: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of both."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "base", tmp_path / "adapter"


def test_config_and_tokenizer_are_copied(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "LICENSE", "README.md"):
        (base / name).write_text(f'"{name}"')
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "rag.jinja").write_text("{{ x }}")
    ours = merge_to_folder(base, adapter, tmp_path / "one").output
    assert (ours / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert (ours / "tokenizer.model").read_text() == '"tokenizer.model"' and (ours / "LICENSE").exists()
    assert (ours / "generation_config.json").exists() and (ours / "additional_chat_templates/rag.jinja").exists()
    assert not (ours / "README.md").exists() and not (ours / "adapter_config.json").exists()
    # A tokenizer that the adapter was trained with takes the place of the base's, as a whole.
    (adapter / "tokenizer.json").write_text('"trained"')
    (adapter / "tokenizer_config.json").write_text("{}")
    ours = merge_to_folder(base, adapter, tmp_path / "two").output
    assert (ours / "tokenizer.json").read_text() == '"trained"' and not (ours / "tokenizer.model").exists()


def test_a_grown_vocabulary(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    path = adapter / "adapter_model.safetensors"
    grown = torch.randn(70, 32)
    whole = {f"base_model.model.{name}.weight": grown.clone() for name in ("model.embed_tokens", "lm_head")}
    save_file({**load_file(path), **whole}, path)
    ours = merge_to_folder(base, adapter, tmp_path / "ours").output
    assert json.loads((ours / "config.json").read_text())["vocab_size"] == 70
    assert torch.equal(tensors_of(ours)["model.embed_tokens.weight"], grown)


# Durable and resumable.

MERGE = """
import sys
from pathlib import Path
from gpuherd.models.lora.merge import merge_to_folder
def told(done, total, what):
    print(done, flush=True)
    if sys.argv[4] == "slowly":
        import time
        time.sleep(0.01)
result = merge_to_folder(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), shard_bytes=9000, on_progress=told)
print("kept", result.kept_bytes)
"""


def test_killed_at_any_instant_it_goes_on(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    wanted = merge_to_folder(base, adapter, tmp_path / "wanted", shard_bytes=9000)
    output = tmp_path / "out"
    command = [sys.executable, "-c", MERGE, str(base), str(adapter), str(output)]
    for lines in (1, 9):
        child = subprocess.Popen([*command, "slowly"], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(lines):
            assert child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert not output.exists()
    assert merge_to_folder(base, adapter, output, shard_bytes=9000).kept_bytes > 0
    for path in wanted.output.iterdir():
        assert (output / path.name).read_bytes() == path.read_bytes()
    assert sorted(os.listdir(output)) == sorted(os.listdir(wanted.output))
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.slow
def test_killed_at_random_instants_and_two_at_once(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    wanted = merge_to_folder(base, adapter, tmp_path / "wanted", shard_bytes=9000).output
    command = [sys.executable, "-c", MERGE, str(base), str(adapter), str(tmp_path / "out"), "slowly"]
    draw = random.Random(3)
    for _ in range(12):
        children = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()  # what has been imported
        time.sleep(draw.uniform(0, 0.6))
        for child in children:
            child.send_signal(signal.SIGKILL)
            _, told = child.communicate()
            assert "Traceback" not in told or "QueueBusy: another merge is writing" in told
        assert not (tmp_path / "out").exists() or same_files(tmp_path / "out", wanted)
    assert same_files(merge_to_folder(base, adapter, tmp_path / "out", shard_bytes=9000).output, wanted)
    assert not list(tmp_path.glob(".out*"))


def same_files(one: Path, other: Path) -> bool:
    names = sorted(os.listdir(one))
    return names == sorted(os.listdir(other)) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names if (one / name).is_file()
    )


def test_another_merge_does_not_go_on_from_it(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair

    def stop(done: int, total: int, what: str) -> None:
        if done > 20_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_to_folder(base, adapter, tmp_path / "out", shard_bytes=9000, on_progress=stop)
    staging = tmp_path / ".out.merging"
    assert len(list(staging.glob("*.safetensors"))) > 1 and not (tmp_path / "out").exists()
    assert not (staging / "model.safetensors.index.json").exists()
    result = merge_to_folder(base, adapter, tmp_path / "out", dtype="BF16", shard_bytes=9000)
    assert result.kept_bytes == 0 and not staging.exists()
    assert {tensor.dtype for tensor in tensors_of(result.output).values()} == {torch.bfloat16}


def test_what_is_there_is_left_alone(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    first = merge_to_folder(base, adapter, tmp_path / "out", names=("org/base", "org/adapter"))
    assert not first.was_there
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert record["base_model"] == "org/base" and record["adapter"] == "org/adapter"
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    assert merge_to_folder(base, adapter, tmp_path / "out").was_there
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(UsageError, match="is not empty, and what is in it is no merge of these files"):
        merge_to_folder(base, adapter, tmp_path / "out", dtype="BF16")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is no folder"):
        merge_to_folder(base, adapter, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert merge_to_folder(base, adapter, tmp_path / "empty").output.is_dir()


def test_only_one_at_a_time(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    refused: list[str] = []

    def meanwhile(done: int, total: int, what: str) -> None:
        if not refused:
            with pytest.raises(QueueBusy, match="another merge is writing"):
                merge_to_folder(base, adapter, tmp_path / "out")
            refused.append(what)

    merge_to_folder(base, adapter, tmp_path / "out", on_progress=meanwhile)
    assert refused


def test_no_room_and_no_right(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = pair
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="can't be written"):
        merge_to_folder(base, adapter, tmp_path / "file" / "out")
    usage = shutil.disk_usage(tmp_path)._replace(free=5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CannotWrite, match=r"the merged model 'out' takes 1 MB on the disk of .*, where 0 MB are free"):
        merge_to_folder(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_somebody_elses_is_not_cleared_away(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    staging = tmp_path / ".out.merging"
    for name in ("thesis.tex", ".hidden.tmp"):
        staging.mkdir()
        (staging / name).write_text("all of it")
        with pytest.raises(UsageError, match=r"\.out\.merging is in the way, and holds no interrupted merge"):
            merge_to_folder(base, adapter, tmp_path / "out")
        assert (staging / name).read_text() == "all of it"
        shutil.rmtree(staging)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / RECORD).write_text('{"fingerprint": "x"}')
    staging.symlink_to(tmp_path / "home")
    with pytest.raises(UsageError, match="is in the way"):
        merge_to_folder(base, adapter, tmp_path / "out")
    assert (tmp_path / "home" / RECORD).exists()
    staging.unlink()
    # Killed before the record was whole, it is ours.
    staging.mkdir()
    (staging / f".{RECORD}.abc.tmp").write_text("{")
    merged = merge_to_folder(base, adapter, tmp_path / "out").output
    assert not list(merged.glob(".*"))


def test_what_a_killed_merge_leaves_is_not_in_the_result(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "a.jinja").write_text("{{ x }}")

    def stop(done: int, total: int, what: str) -> None:
        if done > 20_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_to_folder(base, adapter, tmp_path / "out", shard_bytes=9000, on_progress=stop)
    templates = tmp_path / ".out.merging" / "additional_chat_templates"
    templates.mkdir()
    (templates / ".a.jinja.x.tmp").write_text("{{")
    (tmp_path / ".out.merging" / "tokenizer.json").write_text("of another time")
    result = merge_to_folder(base, adapter, tmp_path / "out", shard_bytes=9000)
    assert result.kept_bytes > 0
    assert os.listdir(result.output / "additional_chat_templates") == ["a.jinja"]
    assert not (result.output / "tokenizer.json").exists()


def test_where_nothing_can_be_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for folder in (Path(), Path("/"), Path("/proc"), tmp_path / "empty" / "x" / ".."):
        with pytest.raises(UsageError, match=r"is a mount point or the current folder|is not empty"):
            final_folder(folder)
    with pytest.raises(UsageError, match="mount point"):
        final_folder(Path("/dev/shm"))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match="is there and is no folder"):
        final_folder(tmp_path / "loop")
    with pytest.raises(CannotWrite, match="can't be looked at: File name too long"):
        final_folder(tmp_path / ("x" * 300))


def test_a_link_to_an_empty_folder(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out").symlink_to("scratch")
    assert merge_to_folder(base, adapter, tmp_path / "out").output == (tmp_path / "scratch").resolve()
    assert (tmp_path / "out").is_symlink() and (tmp_path / "out" / "model.safetensors").exists()


def test_a_file_system_that_sends_no_files(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = pair
    wanted = merge_to_folder(base, adapter, tmp_path / "wanted").output

    def refuse(*_: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sendfile", refuse)
    assert same_files(merge_to_folder(base, adapter, tmp_path / "out").output, wanted)


def test_a_disk_that_fills_up(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = pair
    send, full = os.sendfile, [False]

    def fill(*words: Any) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return send(*words)

    def told(done: int, total: int, what: str) -> None:
        full[0] = done > 20_000

    monkeypatch.setattr(os, "sendfile", fill)
    with pytest.raises(CannotWrite, match=r"No space left on device; what is written stays in .*\.out\.merging, and"):
        merge_to_folder(base, adapter, tmp_path / "out", shard_bytes=9000, on_progress=told)
    assert not (tmp_path / "out").exists()
    full[0] = False
    assert merge_to_folder(base, adapter, tmp_path / "out", shard_bytes=9000).kept_bytes > 0


# What is refused.


def test_bases_that_no_sum_can_be_written_into(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    with pytest.raises(BadModel, match="is itself an adapter"):
        prepare_merge(adapter, adapter)
    with pytest.raises(BadModel, match="is no adapter"):
        prepare_merge(base, base)
    with pytest.raises(MissingModel):
        prepare_merge(tmp_path / "absent", adapter)
    path = base / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, columns = tensors[name].shape
    codes = {name: torch.ones(rows, columns, dtype=torch.int8), name.replace("weight", "SCB"): torch.ones(rows)}
    save_file({**tensors, **codes}, path)
    with pytest.raises(BadModel, match=r"the base is quantised \('model.layers.0.self_attn.q_proj.weight' is"):
        prepare_merge(base, adapter)


def test_an_adapter_of_another_base(tiny: Tiny, pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, other = tiny("gpt2")
    with pytest.raises(BadModel, match=r"q_proj.*is this the right base model"):
        merge_to_folder(other, pair[1], tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.merging").exists()


def test_damaged_numbers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    path = adapter / "adapter_model.safetensors"
    factors = load_file(path)
    name = next(iter(factors))
    save_file({**factors, name: torch.full_like(factors[name], float("nan"))}, path)
    with pytest.raises(BadModel, match="holds NaN or infinities; the adapter is damaged"):
        merge_to_folder(base, adapter, tmp_path / "out")
    save_file({**factors, name: torch.full_like(factors[name], 1e7)}, path)
    with pytest.raises(BadModel, match="has numbers beyond fp16's 65504"):
        merge_to_folder(base, adapter, tmp_path / "out", dtype="F16")
    assert not (tmp_path / "out").exists()
    assert merge_to_folder(base, adapter, tmp_path / "out", dtype="BF16").plan.dtype == "BF16"


@pytest.mark.parametrize("use_dora", [False, True])
def test_sums_that_are_no_numbers(pair: tuple[Path, Path], tmp_path: Path, use_dora: bool) -> None:
    base, adapter = pair
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    if use_dora:
        name = next(name.partition(".lora_A")[0] for name in factors if ".lora_A" in name)
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
        zeros = {f"{name}.lora_magnitude_vector": torch.ones(32), f"{name}.lora_A.weight": torch.zeros(4, 32)}
        magnitudes = {
            key.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(32) for key in factors if "lora_A" in key
        }
        save_file({**factors, **magnitudes, **zeros}, adapter / "adapter_model.safetensors")
        model = load_file(base / "model.safetensors")
        inner = f"{name.removeprefix('base_model.model.')}.weight"
        save_file({**model, inner: torch.zeros(32, 32)}, base / "model.safetensors")
    else:
        large = {name: tensor * 1e9 for name, tensor in factors.items()}
        save_file(large, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 9e29}))
    with pytest.raises(BadModel, match=r"merged, '.*q_proj.weight' would hold NaN or infinities"):
        merge_to_folder(base, adapter, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("use_dora", [False, True])
def test_dora_that_config_and_file_disagree_about(tiny: Tiny, tmp_path: Path, use_dora: bool) -> None:
    _, base = tiny("llama")
    train(base, tmp_path / "a", target_modules=["q_proj"], use_dora=use_dora)
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": not use_dora}))
    with pytest.raises(BadModel, match=r"use_dora, but there are (no )?DoRA magnitudes of module 'model.layers.0.self"):
        prepare_merge(base, tmp_path / "a")


def test_a_tokenizer_that_changes(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Meanwhile, or after the merge: the result was made with another one."""
    base, adapter = pair
    (base / "tokenizer.json").write_text('"one"')

    def spoil(done: int, total: int, what: str) -> None:
        (base / "tokenizer.json").write_text('"another"')

    with pytest.raises(BadModel, match=r"tokenizer.json was changed while it was being read"):
        merge_to_folder(base, adapter, tmp_path / "out", on_progress=spoil)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    merge_to_folder(base, adapter, tmp_path / "out")
    (base / "tokenizer.json").write_text('"a third"')
    with pytest.raises(UsageError, match="no merge of these files"):
        merge_to_folder(base, adapter, tmp_path / "out")


def test_two_adapters_of_one_size_and_age(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """As out of an archive: one is not taken for the other."""
    base, adapter = pair
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    path = other / "adapter_model.safetensors"
    save_file({name: -tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    for folder in (adapter, other):
        for path in folder.iterdir():
            os.utime(path, ns=(1, 1))
    assert not merge_to_folder(base, adapter, tmp_path / "out").was_there
    with pytest.raises(UsageError, match="no merge of these files"):
        merge_to_folder(base, other, tmp_path / "out")


def test_hostile_bases(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    path = base / "model.safetensors"
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    for name, reason in (("\\ud800", "can't be the name of a tensor"), ("x", None)):
        header = good[8 : 8 + length].replace(b'"model.norm.weight"', f'"{name}"'.encode())
        path.write_bytes(len(header).to_bytes(8, "little") + header + good[8 + length :])
        if reason is None:
            prepare_merge(base, adapter)
        else:
            with pytest.raises(BadModel, match=reason):
                merge_to_folder(base, adapter, tmp_path / "out")
    name = "model.layers.0.self_attn.q_proj.weight"
    path.unlink()
    state = {**load(good), "__metadata__": torch.ones(3)}
    torch.save(state, base / "pytorch_model.bin")
    with pytest.raises(BadModel, match="'__metadata__' can't be the name of a tensor"):
        merge_to_folder(base, adapter, tmp_path / "out")
    del state["__metadata__"]
    torch.save({**state, name: state[name].long()}, base / "pytorch_model.bin")
    with pytest.raises(BadModel, match=r"q_proj.weight', but the base's numbers there are I64, no weights"):
        merge_to_folder(base, adapter, tmp_path / "out")
    torch.save({**state, "steps": torch.arange(6).reshape(2, 3).T}, base / "pytorch_model.bin")
    with pytest.raises(BadModel, match=r"tensor 'steps' .* has the format I64 and skips numbers of its storage"):
        merge_to_folder(base, adapter, tmp_path / "out")
    torch.save({**state, "ids": torch.arange(6).expand((1, -1)), "mask": torch.ones(1, 1, 4, 4).bool()},
               base / "pytorch_model.bin")  # fmt: skip
    merged = tensors_of(merge_to_folder(base, adapter, tmp_path / "out").output)
    assert merged["ids"].tolist() == [[0, 1, 2, 3, 4, 5]] and merged["mask"].dtype == torch.bool


def test_a_base_that_changes_meanwhile(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair

    def spoil(done: int, total: int, what: str) -> None:
        os.utime(base / "model.safetensors", ns=(1, 1))

    with pytest.raises(BadModel, match=r"model.safetensors was changed while it was being read"):
        merge_to_folder(base, adapter, tmp_path / "out", on_progress=spoil)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_benchmark_in_small(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "benchmarks", "merge", "--quick", "--output", str(tmp_path)]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    subprocess.run(command, check=True, cwd=root, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": paths})
    figures = json.loads((tmp_path / "merge.json").read_text())["figures"]
    assert figures["numbers_that_differ"] == 0 and figures["tensors"] == 21
    assert figures["ours"]["anonymous_peak_mb"] < figures["peft"]["anonymous_peak_mb"]
