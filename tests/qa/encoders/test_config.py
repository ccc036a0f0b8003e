"""What settings files of an encoder mean."""

from __future__ import annotations

from typing import Any

import pytest

from gpuherd.errors import BadModel
from gpuherd.models.checkpoints.hub import choose_files
from gpuherd.models.names import parse_model
from gpuherd.qa.encoders.files import (
    EncoderKind,
    Pooling,
    check_bi_encoder,
    check_cross_encoder,
    embedding_of,
    kind_of,
    longest_input,
    nli_labels,
)

ONE_LABEL = {"architectures": ["RobertaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def test_the_kind_is_told_by_the_architecture_and_not_by_the_name() -> None:
    assert kind_of({"architectures": ["BertModel"], "_name_or_path": "cross-encoder/x"}) is EncoderKind.BI
    assert kind_of(ONE_LABEL) is EncoderKind.CROSS
    assert kind_of({}) is EncoderKind.BI


def test_a_cross_encoder_has_one_label_and_a_sigmoid() -> None:
    check_cross_encoder("m", ONE_LABEL)
    check_cross_encoder(
        "m", ONE_LABEL | {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}
    )
    with pytest.raises(BadModel, match="2 labels"):
        check_cross_encoder("m", {"architectures": ["XForSequenceClassification"]})
    with pytest.raises(BadModel, match="no head"):
        check_cross_encoder("m", {"architectures": ["BertModel"]})


@pytest.mark.parametrize(
    "named",
    [
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.0"}},
    ],
)
def test_a_model_for_ranking_is_no_similarity(named: dict[str, Any]) -> None:
    with pytest.raises(BadModel, match="Identity"):
        check_cross_encoder("cross-encoder/ms-marco", ONE_LABEL | named)


def test_a_language_model_is_no_encoder_unless_its_files_say_so() -> None:
    with pytest.raises(BadModel, match="language model"):
        check_bi_encoder("m", {"architectures": ["LlamaForCausalLM"]}, None)
    check_bi_encoder("m", {"architectures": ["LlamaForCausalLM"]}, [{"type": "s.Transformer"}])
    check_bi_encoder("m", {"architectures": ["BertForMaskedLM"]}, None)


@pytest.mark.parametrize(
    "order", [("ENTAILMENT", "NEUTRAL", "CONTRADICTION"), ("contradiction", "entailment", "neutral")]
)
def test_nli_labels_are_found_by_their_names(order: tuple[str, ...]) -> None:
    labels = nli_labels("m", {"id2label": dict(enumerate(order))})
    assert order[labels.entailment].lower() == "entailment"
    assert order[labels.neutral].lower() == "neutral"
    assert order[labels.contradiction].lower() == "contradiction"


@pytest.mark.parametrize(
    "labels",
    [
        {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
        {"0": "entailment", "1": "not_entailment"},
        {"x": "entailment"},
        3,
    ],
)
def test_unnamed_nli_labels_are_refused(labels: Any) -> None:
    with pytest.raises(BadModel):
        nli_labels("m", {"id2label": labels})


def test_the_longest_input_is_the_smallest_limit() -> None:
    assert longest_input({"max_position_embeddings": 512}, int(1e30), {"max_seq_length": 256}) == 256
    assert longest_input({"max_position_embeddings": 512}, 128) == 128
    assert longest_input({"max_position_embeddings": 514, "model_type": "xlm-roberta"}, None) == 512
    assert longest_input({}, int(1e30)) is None


def test_pooling_is_as_the_files_say() -> None:
    modules = [{"path": "", "type": "s.Transformer"}, {"path": "1_Pooling", "type": "s.Pooling"}]
    flags = {"word_embedding_dimension": 8, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    found = embedding_of("m", modules, {"1_Pooling": flags}, {"do_lower_case": True}, prompts)
    assert (found.pooling, found.prefix, found.lower_case) == (Pooling.CLS, "query: ", True)
    assert embedding_of("m", modules, {"1_Pooling": {"pooling_mode": "mean"}}, None, None).pooling is Pooling.MEAN
    assert embedding_of("m", None, {}, None, None).pooling is Pooling.MEAN


@pytest.mark.parametrize(
    ("modules", "poolings"),
    [
        ([{"path": "2_Dense", "type": "s.Dense"}], {}),
        ([{"path": "1_Pooling", "type": "s.Pooling"}], {}),
        ([{"path": "1_Pooling", "type": "s.Pooling"}], {"1_Pooling": {"pooling_mode": "lasttoken"}}),
    ],
)
def test_what_would_be_computed_in_another_way_is_refused(modules: Any, poolings: Any) -> None:
    with pytest.raises(BadModel):
        embedding_of("m", modules, poolings, None, None)


def test_the_settings_of_the_pooling_are_fetched_with_a_model() -> None:
    names = ["1_Pooling/config.json", "modules.json", "model.safetensors", "config.json", "onnx/config.json"]
    chosen = choose_files(names, parse_model("an-org/a-model"), for_loading=True)
    assert chosen == ["1_Pooling/config.json", "config.json", "model.safetensors", "modules.json"]
