"""Real small models loaded as planned: each block where it belongs, to the byte, or refused with figures."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.models.load.conftest import Small, slow

from gpuherd.errors import BadModel, MissingModel, UsageError
from gpuherd.models.describe.reading import read_architecture
from gpuherd.models.load.options import LoadRequest
from gpuherd.models.load.prepare import ModelDoesNotFit, prepare
from gpuherd.models.load.pretrained import classes_for, config_of
from gpuherd.models.memory.kv_cache import Reserve, Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import parse_gpus
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gpuherd.models.load.loading import Loaded, load_model  # noqa: E402
from gpuherd.models.load.pretrained import fitted_class  # noqa: E402


def forward(loaded: Loaded) -> Any:
    """Logits of a fixed prompt."""
    ids = torch.arange(18).reshape(2, 9) + 3
    words = {"decoder_input_ids": ids} if loaded.model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        return loaded.model(input_ids=ids, **words)


ALWAYS = {
    ("llama", "int8"),
    ("llama", "nf4"),
    ("gpt2", "int8"),
    ("tied", "nf4"),
    ("mixtral", "nf4-dq"),
    ("t5", "nf4-dq"),
}
KINDS = ("llama", "tied", "gpt2", "mixtral", "t5")
SWEEP = [(name, how) for name in KINDS for how in (None, "int8", "nf4", "nf4-dq")]


@pytest.mark.parametrize(
    ("name", "quantization"),
    [case if case[1] is None or case in ALWAYS else slow(*case) for case in SWEEP],
)
def test_a_planned_model_lies_as_planned_to_the_byte(small: Small, name: str, quantization: str | None) -> None:
    if quantization is not None:
        pytest.importorskip("bitsandbytes")
    loaded = load_model(str(small(name)), gpus="2x24GB", parallel="layers", quantization=quantization)
    report = loaded.report
    assert report.simulated and report.within
    assert [each.device for each in report.devices] == [0, 1]
    assert all(each.predicted == each.real for each in report.devices)
    assert set(report.device_map.values()) == {0, 1}
    assert torch.isfinite(forward(loaded).logits).all()


@pytest.mark.parametrize(
    ("asked", "stored", "dtypes"),
    [
        (None, "bfloat16", {"bfloat16"}),
        (None, "float16", {"float16"}),
        (None, "float32", {"float32"}),
        ("fp32", "bfloat16", {"float32"}),
        ("bf16", "float32", {"bfloat16"}),
        ("fp16", "bfloat16", {"float16"}),
    ],
)
def test_the_dtype_is_the_checkpoints_own_unless_asked(
    small: Small, asked: str | None, stored: str, dtypes: set[str]
) -> None:
    report = load_model(str(small("llama", dtype=stored)), device_map="cpu", dtype=asked).report
    assert set(report.dtypes) == dtypes
    assert report.within and report.devices[0].device == "cpu"


def test_t5_keeps_a_part_in_float32_when_loaded_in_float16(small: Small) -> None:
    report = load_model(str(small("t5")), device_map="cpu", dtype="fp16").report
    assert set(report.dtypes) == {"float16", "float32"} and report.within


def test_an_encoder_is_loaded_as_one(small: Small) -> None:
    loaded = load_model(str(small("bert")), device_map="cpu")
    assert torch.isfinite(forward(loaded).last_hidden_state).all()


def test_int8_computes_without_a_line_for_each_layer(small: Small, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("bitsandbytes")
    loaded = load_model(str(small("llama")), device_map="cpu", quantization="8bit")
    caplog.clear()
    forward(loaded)
    assert not [record for record in caplog.records if "will be cast" in record.getMessage()]


def test_names_may_end_in_the_precision(small: Small, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = tmp_path / "tiny"
    shutil.copytree(small("llama"), folder)
    assert load_model(f"{folder}-8bit", device_map="cpu").report.precision is Precision.INT8
    assert load_model(f"{folder}-4bit", device_map="cpu").report.precision is Precision.NF4


def test_a_buffer_beside_blocks_does_not_take_them_to_its_device(small: Small) -> None:
    """accelerate moves a module of its map whole: ``model``, for a number in it, would be all of the model."""
    ready = prepare(LoadRequest(str(small("recurrent")), gpus="2x24GB", parallel="layers"))
    config = config_of(ready.folder, trusted=False)
    _, _, device_map = fitted_class(classes_for(ready.base, config, trusted=False), config, ready)
    assert "model.normalizer" in device_map and not {"", "model", "model.layers"} & set(device_map)
    on_disk = load_model(
        str(small("recurrent")), device_map={"": "cpu", "model.layers.2": "disk"}, allow_offload="disk"
    )
    whole = load_model(str(small("recurrent")), device_map="cpu")
    assert torch.equal(forward(on_disk).logits, forward(whole).logits)


def test_loaded_equals_what_transformers_loads(small: Small) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(small("llama"), dtype=torch.bfloat16).eval()
    loaded = load_model(str(small("llama")), gpus="3x24GB", parallel="layers")
    with torch.inference_mode():
        expected = plain(input_ids=torch.arange(18).reshape(2, 9) + 3).logits
    assert torch.equal(forward(loaded).logits, expected)


# ---- plans and device maps -------------------------------------------------------------------------------------------


def planned(folder: Path, gpus: str, **more: Any) -> MemoryPlan:
    plan = make_plan(read_architecture(str(folder)), parse_gpus(gpus), Precision.BF16, Workload(), **more)
    assert isinstance(plan, MemoryPlan)
    return plan


def test_a_plan_is_carried_out(small: Small) -> None:
    plan = planned(small("llama"), "3x24GB", parallel="layers")
    report = load_model(str(small("llama")), plan=plan).report
    assert report.device_map == plan.device_map
    assert [each.planned for each in report.devices] == [load.usage.total for load in plan.loads]


def test_a_map_of_a_larger_model_serves_its_reduced_copy(small: Small) -> None:
    """The map of one model, as JSON, for another of the same blocks."""
    plan = planned(small("llama"), "2x24GB", parallel="layers")
    device_map = json.loads(json.dumps(plan.device_map))
    report = load_model(str(small("llama")), device_map=device_map, simulate=True).report
    assert report.device_map == plan.device_map and report.simulated and report.within


def test_a_map_with_gpus_is_not_carried_out_on_the_processor_unasked(small: Small) -> None:
    with pytest.raises(UsageError, match="CUDA shows this process no GPU"):
        load_model(str(small("llama")), device_map={"": 0})


def test_gpus_of_this_machine_are_not_pretended_unasked(small: Small, standin: Any) -> None:
    standin("2x40GB")
    with pytest.raises(Exception, match=r"the plan is for GPUs, and torch .* has no CUDA|can't use"):
        load_model(str(small("llama")))
    assert load_model(str(small("llama")), simulate=True).report.device_map["lm_head"] == 0


def test_a_plan_for_another_model_is_refused_with_the_tensor(small: Small) -> None:
    plan = planned(small("tied"), "2x24GB")
    with pytest.raises(UsageError, match=r"the plan is for .*tied.*embed_tokens"):
        load_model(str(small("gpt2")), plan=plan)


def test_a_plan_in_another_precision_is_refused(small: Small) -> None:
    with pytest.raises(UsageError, match="the plan is for bf16, and fp32 was asked for"):
        load_model(str(small("llama")), plan=planned(small("llama"), "2x24GB"), dtype="fp32")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"device_map": {"": 0}, "parallel": "layers"}, "a device map and parallel"),
        ({"device_map": "balanced"}, "it is auto, cpu, or a mapping"),
        ({"device_map": {"": "cpu", "lm_head": "disk"}}, "--allow-offload disk"),
        ({"gpus": "4x40"}, "of what"),
        ({"gpus": "0x40GB"}, "at least 1"),
        ({"merge_adapter": True}, "no adapter to merge"),
        ({"device_map": {"": "cpu"}, "gpus": "1x40GB"}, "gpus beside a plan or a device map"),
        ({"device_map": "cpu", "gpus": "1x40GB"}, "gpus beside a plan or a device map"),
        ({"allow_offload": "gpu"}, "it is one of cpu, disk"),
        ({"dtype": "int3"}, "no dtype that is planned for"),
        ({"parallel": "tensor"}, "a process a GPU"),
    ],
)
def test_what_contradicts_itself_is_refused(small: Small, words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        load_model(str(small("llama")), **words)


# ---- what doesn't fit ------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_figures_before_torch_is_imported(small: Small) -> None:
    """No gigabyte is fetched and no library of a second is imported for a refusal."""
    code = (
        "import sys, time\n"
        "from gpuherd.models.load.options import LoadRequest\n"
        "from gpuherd.models.load.prepare import prepare\n"
        "try:\n"
        "    prepare(LoadRequest('meta-llama/Llama-3.1-70B', dtype='fp16', gpus='4x30GB'))\n"
        "except Exception as problem:\n"
        "    print(type(problem).__name__, problem)\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, modules = answer.stdout.splitlines()
    assert first.startswith("ModelDoesNotFit") and "lacks" in first and "What would fit: " in first
    assert modules == "False False"


def test_a_refusal_given_as_plan_is_told(small: Small) -> None:
    refusal = make_plan(read_architecture("Llama-3.1-70B"), parse_gpus("2x24GB"), Precision.BF16, Workload())
    assert isinstance(refusal, AnswerRefusal)
    with pytest.raises(ModelDoesNotFit, match="lacks") as problem:
        load_model(str(small("llama")), plan=refusal)
    assert problem.value.refusal is refusal


def test_offloading_is_a_choice_and_told(small: Small, caplog: pytest.LogCaptureFixture) -> None:
    small_gpu, reserve = "1x600MB", Reserve(context=0, fixed=629_000_000, share=0.0)
    with pytest.raises(ModelDoesNotFit, match="lacks"):
        load_model(str(small("llama")), gpus=small_gpu, reserve=reserve, workload=Workload(1, 1, 1))
    report = load_model(
        str(small("llama")), gpus=small_gpu, reserve=reserve, workload=Workload(1, 1, 1), allow_offload="cpu"
    ).report
    assert set(report.device_map.values()) == {0, "cpu"}
    assert any("offloaded to cpu" in note for note in report.notes)


def test_disk_is_used_where_it_is_allowed_and_the_answer_is_the_same(small: Small) -> None:
    device_map = {"": "cpu", "model.layers.2": "disk", "model.layers.3": "disk"}
    loaded = load_model(str(small("llama")), device_map=device_map, allow_offload="disk")
    on_disk = [each for each in loaded.report.devices if each.device == "disk"]
    assert on_disk[0].real is None and on_disk[0].blocks == "layers 2-3"
    assert loaded.report.devices[0].within
    whole = load_model(str(small("llama")), device_map="cpu")
    assert torch.equal(forward(loaded).logits, forward(whole).logits)


# ---- damaged and hostile ---------------------------------------------------------------------------------------------


def test_weights_that_are_missing_are_no_random_numbers(small: Small, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "holed"
    shutil.copytree(small("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadModel, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load_model(str(folder), device_map="cpu")


def test_weights_of_another_shape_are_named(small: Small, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(small("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 192}))
    with pytest.raises(BadModel, match=r"mlp\.\w+_proj\.weight"):
        load_model(str(folder), device_map="cpu")


def test_a_missing_shard_is_named(small: Small, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    shutil.copytree(small("llama", shards="100KB"), folder)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert load_model(str(folder), device_map="cpu").report.within
    shards[1].unlink()
    with pytest.raises(MissingModel, match=shards[1].name):
        load_model(str(folder), device_map="cpu")


class Dangerous:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_a_pickle_with_code_is_refused_and_not_run(small: Small, tmp_path: Path) -> None:
    folder, mark = tmp_path / "pickled", tmp_path / "mark"
    folder.mkdir()
    shutil.copy(small("llama") / "config.json", folder)
    torch.save({"model.norm.weight": Dangerous(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(BadModel):
        load_model(str(folder), device_map="cpu")
    assert not mark.exists()


def test_plain_pickles_are_loaded(small: Small, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    shutil.copy(small("llama") / "config.json", folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(small("llama"), dtype=torch.bfloat16)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert load_model(str(folder), device_map="cpu").report.within


@pytest.mark.parametrize("name", ["../outside/of/it", "org/../../etc", "-rf", "", "a\nb"])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(BadModel):
        load_model(name, device_map="cpu")


def test_a_single_safetensors_file_is_a_model(small: Small, tmp_path: Path) -> None:
    shutil.copy(small("llama") / "config.json", tmp_path)
    shutil.copy(small("llama") / "model.safetensors", tmp_path / "mine.safetensors")
    (tmp_path / "other.safetensors").write_bytes(b"no model")
    assert load_model(str(tmp_path / "mine.safetensors"), device_map="cpu").report.within


def test_what_is_only_planned_or_only_analysed(small: Small, tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    for name in (tmp_path, tmp_path / "model-q4.gguf"):
        with pytest.raises(BadModel, match="is a GGUF file"):
            load_model(str(name), device_map="cpu")
    shutil.copy(small("llama") / "config.json", tmp_path)
    (tmp_path / "model-q4.gguf").unlink()
    with pytest.raises(MissingModel, match="no weights to load"):
        load_model(str(tmp_path), device_map="cpu")


@pytest.mark.parametrize("name", ["llama-3.1-8b-instruct", "Llama-3.1-8B-Chat"])
def test_the_shapes_of_a_variant_are_not_its_weights(name: str) -> None:
    with pytest.raises(BadModel, match="give its own id"):
        load_model(name, device_map="cpu")


def test_there_may_be_no_tokenizer(small: Small) -> None:
    loaded = load_model(str(small("llama")), device_map="cpu")
    with pytest.raises(MissingModel, match="no tokenizer"):
        _ = loaded.tokenizer


def test_the_tokenizer_comes_when_asked_for(small: Small, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / "spoken"
    shutil.copytree(small("llama"), folder)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    assert load_model(str(folder), device_map="cpu").tokenizer("hello world")["input_ids"] == [1, 2]


def test_where_it_lies_is_in_the_log(small: Small, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gpuherd"):
        load_model(str(small("llama")), gpus="2x24GB", parallel="layers")
    text = caplog.text
    assert "embedding, layers 0-1 -> GPU 0" in text and "layers 2-3, norm, head -> GPU 1" in text
    assert "LlamaForCausalLM in bf16" in text and "pretended" in text
