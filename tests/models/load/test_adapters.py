"""Adapters on loaded models: PEFT's modules on the devices of their blocks, merged weights, and other bases refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.load.conftest import Small

from gpuherd.errors import BadModel, MissingModel, UsageError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

from tests.models.peft_adapters import save_adapter  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

from gpuherd.models.load.loading import load_model  # noqa: E402
from gpuherd.models.load.options import LoadRequest  # noqa: E402
from gpuherd.models.load.prepare import prepare  # noqa: E402

IDS = torch.arange(18).reshape(2, 9) + 3


def base_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@pytest.fixture
def adapter(small: Small, tmp_path: Path) -> Path:
    torch.manual_seed(5)
    save_adapter(base_of(small("llama")), tmp_path / "adapter", target_modules=["q_proj", "v_proj", "down_proj"])
    return tmp_path / "adapter"


def logits(model: Any) -> Any:
    with torch.inference_mode():
        return model(input_ids=IDS).logits


def test_beside_the_weights_it_is_pefts_own_model(small: Small, adapter: Path) -> None:
    loaded = load_model(str(small("llama")), adapter=str(adapter), gpus="2x24GB", parallel="layers")
    expected = peft.PeftModel.from_pretrained(base_of(small("llama")), str(adapter)).eval()
    assert isinstance(loaded.model, peft.PeftModel)
    assert torch.equal(logits(loaded.model), logits(expected))
    assert not torch.equal(logits(loaded.model), logits(base_of(small("llama"))))
    assert loaded.report.within and all(each.predicted == each.real for each in loaded.report.devices)
    assert loaded.report.class_name == "LlamaForCausalLM"
    assert "beside the weights" in str(loaded.report.adapter)


def test_merged_it_is_a_plain_model_with_pefts_own_sums(small: Small, adapter: Path) -> None:
    loaded = load_model(str(small("llama")), adapter=str(adapter), merge_adapter=True, device_map="cpu")
    expected = peft.PeftModel.from_pretrained(base_of(small("llama")), str(adapter)).merge_and_unload()
    assert type(loaded.model).__name__ == "LlamaForCausalLM" and loaded.report.within
    for (name, ours), (_, theirs) in zip(loaded.model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_an_adapters_folder_is_a_model_by_itself(small: Small, adapter: Path) -> None:
    config = adapter / "adapter_config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "base_model_name_or_path": str(small("llama"))}))
    loaded = load_model(str(adapter), device_map="cpu")
    expected = peft.PeftModel.from_pretrained(base_of(small("llama")), str(adapter)).eval()
    assert torch.equal(logits(loaded.model), logits(expected))


def test_the_tokenizer_that_an_adapter_was_trained_with_is_taken(small: Small, adapter: Path) -> None:
    assert prepare(LoadRequest(str(small("llama")), adapter=str(adapter))).tokenizer_folder == small("llama")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 5}, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(adapter)
    loaded = load_model(str(small("llama")), adapter=str(adapter), device_map="cpu")
    assert loaded.tokenizer("hello")["input_ids"] == [5] and loaded.folder == small("llama")


def test_on_quantised_weights_it_stays_beside_them(small: Small, adapter: Path) -> None:
    pytest.importorskip("bitsandbytes")
    loaded = load_model(str(small("llama")), adapter=str(adapter), quantization="nf4", device_map="cpu")
    assert torch.isfinite(logits(loaded.model)).all()
    assert loaded.report.within
    with pytest.raises(UsageError, match="can't be merged into weights in nf4"):
        load_model(str(small("llama")), adapter=str(adapter), quantization="nf4", merge_adapter=True, device_map="cpu")


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_for_another_base_is_refused_by_its_module(small: Small, adapter: Path, merge: bool) -> None:
    with pytest.raises(BadModel, match=r"q_proj|v_proj|down_proj"):
        load_model(str(small("gpt2")), adapter=str(adapter), merge_adapter=merge, device_map="cpu")


def test_what_is_no_adapter(small: Small, adapter: Path) -> None:
    with pytest.raises(BadModel, match="has no adapter_config"):
        load_model(str(small("llama")), adapter=str(small("gpt2")), device_map="cpu")
    with pytest.raises(MissingModel, match="no such folder"):
        load_model(str(small("llama")), adapter="./not/there", device_map="cpu")
    with pytest.raises(UsageError, match="is an adapter itself"):
        load_model(str(adapter), adapter=str(adapter), device_map="cpu")


def test_a_model_with_an_adapter_is_not_offloaded(small: Small, adapter: Path) -> None:
    with pytest.raises(UsageError, match="a model with an adapter can't be offloaded"):
        load_model(
            str(small("llama")), adapter=str(adapter), device_map={"": "cpu", "lm_head": "disk"}, allow_offload="disk"
        )
