"""A plan in the names of the class that a checkpoint was saved by; small heads of its own; other models told apart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.models.load.conftest import LLAMA, Small, slow

from gpuherd.errors import BadModel
from gpuherd.models.describe.description import Architecture, Block, Tensor
from gpuherd.models.load.placement import Built, fitted, from_device_map

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gpuherd.models.load.loading import load_model  # noqa: E402

BERT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320,
    "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    "saved",
    [
        transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, num_labels=3)),
        slow(transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**BERT, num_labels=1))),
        slow(transformers.DebertaV2ForSequenceClassification(transformers.DebertaV2Config(**BERT, num_labels=3))),
        slow(transformers.BertForMaskedLM(transformers.BertConfig(**BERT))),
        transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**LLAMA, num_labels=1)),
        transformers.LlamaModel(transformers.LlamaConfig(**LLAMA)),
        transformers.GPT2Model(transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=320)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_whatever_class_saved_it_loads_it(saved: Any, tmp_path: Path) -> None:
    saved.eval().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), gpus="2x24GB", parallel="layers")
    assert loaded.report.within
    ids = torch.arange(2, 20).reshape(2, 9)
    words = {"pad_token_id": 0} if "Llama" in type(saved).__name__ else {}
    saved.config.update(words)
    loaded.model.config.update(words)
    with torch.inference_mode():
        ours, theirs = loaded.model(input_ids=ids), saved(input_ids=ids)
    for name in ("logits", "last_hidden_state"):
        if hasattr(ours, name) and hasattr(theirs, name):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=1e-6, rtol=1e-5)
            return
    assert type(saved) is transformers.GPT2Model and torch.isfinite(ours.logits).all()


def test_a_head_that_is_in_no_checkpoint_is_not_made_up(tmp_path: Path) -> None:
    """transformers would fill a classifier that was never trained with random numbers."""
    saved = transformers.BertModel(transformers.BertConfig(**BERT))
    saved.config.architectures = ["BertForSequenceClassification"]
    saved.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"BertModel"', '"BertForSequenceClassification"'))
    assert "BertForSequenceClassification" in config.read_text()
    assert load_model(str(tmp_path), device_map="cpu").report.class_name == "BertModel"


def architecture(*blocks: Block) -> Architecture:
    return Architecture("m", "toy", None, blocks, 2, 2, 2, 1)


BODY = architecture(
    Block("embed", "embedding", (Tensor("embed.weight", (4, 2)),)),
    Block("layers.0", "layer", (Tensor("layers.0.w", (2, 2)),)),
)


def test_a_prefix_is_put_before_every_name_and_the_head_lies_with_the_last_block() -> None:
    placement = from_device_map(BODY, {"": 0, "layers.0": 1}, visible=2)
    shapes = {"toy.embed.weight": (4, 2), "toy.layers.0.w": (2, 2), "score.weight": (1, 2), "toy.layers.0.own": (3,)}
    found = fitted(BODY, placement, Built(shapes, {}, prefix="toy"), stored=shapes)
    assert not isinstance(found, str)
    base, placed = found
    assert placed.by_block == {"toy.embed": 0, "toy.layers.0": 1, "score": 1}
    assert {tensor.name: tensor.shape for tensor in base.tensors()} == shapes


def test_what_differs_is_named() -> None:
    placement = from_device_map(BODY, {"": "cpu"}, visible=0)
    built = Built({"embed.weight": (4, 2), "layers.0.w": (2, 3)}, {}, prefix="toy")
    assert fitted(BODY, placement, built, stored=()) == "'layers.0.w' of shape (2, 3), planned of shape (2, 2)"
    own = Built({"embed.weight": (4, 2), "layers.0.w": (2, 2), "score.weight": (1, 2)}, {})
    assert fitted(BODY, placement, own, stored=()) == "'score.weight', which is not in the checkpoint"
    tied = Built(
        {"embed.weight": (4, 2), "layers.0.w": (2, 2), "head.weight": (4, 2)}, {}, {"head.weight": "embed.weight"}
    )
    split = from_device_map(BODY, {"embed": 0, "layers": 1}, visible=2)
    beside = fitted(BODY, split, tied, stored=())
    assert not isinstance(beside, str) and beside[1].by_block["head"] == 0


def test_a_config_of_another_width_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    saved = transformers.DebertaV2ForSequenceClassification(transformers.DebertaV2Config(**BERT))
    saved.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 128', '"intermediate_size": 96'))
    with pytest.raises(BadModel, match=r"another model than was planned .*intermediate\.dense"):
        load_model(str(tmp_path), device_map="cpu")


@pytest.mark.parametrize("named", [["PreTrainedModel"], ["GPT2LMHeadModel", 3], ["MistralForCausalLM"]])
def test_a_class_for_other_configs_is_not_taken(small: Small, tmp_path: Path, named: object) -> None:
    shutil.copytree(small("llama"), tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": named}))
    assert load_model(str(tmp_path / "m"), device_map="cpu").report.class_name == "LlamaForCausalLM"
