"""Classifiers: made, saved and loaded; what is damaged or of another kind is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.lm.guidance.conftest import MakeClassifier
from tests.posttrain import tiny

from gpuherd.errors import BadModel, MissingModel, UsageError
from gpuherd.lm.guidance.guide import HEAD_FILE, ClassifierForm, Head, Kind, read_form

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpuherd.lm.guidance.classifier import load_classifier, new_classifier  # noqa: E402

IDS = torch.tensor([[10, 20, 30, 40], [11, 12, 13, 14]])
HEADS = [("v", ()), ("v", (0.0, 0.5, 1.0)), ("q", ()), ("q", (0.0, 1.0))]


@pytest.mark.parametrize(("kind", "atoms"), HEADS)
def test_a_new_one_knows_nothing(value_model: Path, kind: str, atoms: tuple[float, ...]) -> None:
    classifier = new_classifier(value_model, Kind(kind), Head.ATOMS if atoms else Head.BERNOULLI, atoms)
    values = classifier.values(IDS)
    assert values.shape == ((2, 4, len(atoms)) if atoms else (2, 4)) and values.dtype == torch.float32
    assert not values.any()


@pytest.mark.parametrize(
    ("kind", "atoms"), [HEADS[0], HEADS[3], *(pytest.param(*each, marks=pytest.mark.slow) for each in HEADS[1:3])]
)
def test_one_that_is_loaded_says_the_same(
    make: MakeClassifier, tmp_path: Path, kind: str, atoms: tuple[float, ...]
) -> None:
    classifier = make(kind, atoms)
    values = classifier.values(IDS)
    classifier.save(tmp_path / "c", loss="bce", trained={"epochs": 2})
    classifier.save(tmp_path / "c", loss="mle", trained={"epochs": 3})  # replaces it
    again = load_classifier(tmp_path / "c")
    assert torch.equal(again.values(IDS), values)
    assert (again.form.loss, again.form.trained, again.form.made_from) == ("mle", {"epochs": 3}, classifier.name)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    half = load_classifier(tmp_path / "c", dtype="bf16")
    assert half.module.head.weight.dtype == torch.bfloat16
    assert half.values(IDS).dtype == torch.float32
    assert torch.allclose(half.values(IDS), values, atol=0.5)
    assert not torch.equal(half.values(IDS), values)


@pytest.mark.parametrize("kind", ["v", "q"])
def test_padding_changes_no_value(make: MakeClassifier, kind: str) -> None:
    classifier = make(kind)
    alone = classifier.values(IDS)
    for left, right in ((3, 0), (0, 2)):
        wide = torch.nn.functional.pad(IDS, (left, right), value=7)
        mask = torch.nn.functional.pad(torch.ones_like(IDS), (left, right))
        padded = classifier.values(wide, mask)[:, left : left + 4]
        assert torch.allclose(padded, alone, atol=1e-5)


def test_kind_q_says_of_a_token_what_it_said_before_it(make: MakeClassifier) -> None:
    """The value of the same token behind the same prefix, whatever follows."""
    classifier = make("q", (0.0, 0.5, 1.0))
    values = classifier.values(IDS)
    states = classifier.module.states(IDS, torch.ones_like(IDS), torch.arange(4).expand(2, -1))
    everything = states.float() @ classifier.module.head.weight.float().T + classifier.module.head.bias.float()
    told = everything.view(2, 4, -1, 3)
    for row in range(2):
        for place in range(1, 4):
            assert torch.allclose(values[row, place], told[row, place - 1, IDS[row, place]], atol=1e-5)
    assert not values[:, 0].any()


def test_all_of_it_learns(make: MakeClassifier) -> None:
    for kind, atoms in HEADS:
        classifier = make(kind, atoms)
        classifier.module.train()
        classifier.values(IDS).square().sum().backward()
        grads = {name: each.grad for name, each in classifier.module.named_parameters()}
        assert all(grad is not None and grad.abs().sum() > 0 for grad in grads.values()), kind


def test_weights_that_were_gathered_are_saved(make: MakeClassifier, tmp_path: Path) -> None:
    classifier = make()
    state = {name: each + 1 for name, each in classifier.module.state_dict().items()}
    classifier.save(tmp_path / "c", state=state)
    saved = load_classifier(tmp_path / "c").module.state_dict()
    assert all(torch.equal(saved[name], each) for name, each in state.items())


def test_a_save_that_fails_leaves_what_was_there(make: MakeClassifier, tmp_path: Path) -> None:
    classifier = make()
    classifier.save(tmp_path / "c")
    before = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    with pytest.raises(TypeError):
        classifier.save(tmp_path / "c", trained={"no JSON": object()})
    assert {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()} == before
    # What a killed save left is removed by the next.
    (tmp_path / ".c.tmp" / "body").mkdir(parents=True)
    (tmp_path / ".c.old").mkdir()
    classifier.save(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_tokenizer_of_several_templates_is_saved_with_all_of_them(make: MakeClassifier, tmp_path: Path) -> None:
    """Transformers writes the others into a folder of their own."""
    classifier = make()
    classifier.tokenizer = type(classifier.tokenizer).from_pretrained(classifier.name)
    classifier.tokenizer.chat_template = {"default": "one", "tool_use": "two"}
    classifier.save(tmp_path / "c")
    assert load_classifier(tmp_path / "c").tokenizer.chat_template == {"default": "one", "tool_use": "two"}


@pytest.fixture
def saved(make: MakeClassifier, tmp_path: Path) -> Path:
    make("v", (0.0, 1.0)).save(tmp_path / "c")
    return tmp_path / "c"


def test_what_is_no_classifier_is_told_as_that(value_model: Path, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingModel, match="is no classifier"):
        load_classifier(value_model)
    with pytest.raises(MissingModel, match="is no classifier"):
        load_classifier(tmp_path / "nowhere")
    form = json.loads((saved / "classifier.json").read_bytes())
    for wrong in (
        "[]", "{", json.dumps(form | {"format": 99}), json.dumps(form | {"kind": "x"}),
        json.dumps(form | {"atoms": [0.0]}), json.dumps(form | {"head": "bernoulli"}),
        json.dumps(form | {"atoms": [0, 10**400]}), json.dumps(form | {"atoms": "01"}), "[" * 100_000,
        json.dumps(form | {"trained": [1]}), json.dumps(form | {"loss": 5}), json.dumps(form | {"made_from": None}),
    ):  # fmt: skip
        (saved / "classifier.json").write_text(wrong)
        with pytest.raises(BadModel, match=r"classifier\.json"):
            read_form(saved)


def test_a_head_of_another_width_is_refused(saved: Path) -> None:
    form = json.loads((saved / "classifier.json").read_bytes())
    (saved / "classifier.json").write_text(json.dumps(form | {"atoms": [0.0, 0.5, 1.0]}))
    with pytest.raises(BadModel, match=HEAD_FILE):
        load_classifier(saved)
    (saved / HEAD_FILE).write_bytes(b"no tensors")
    with pytest.raises(BadModel, match=HEAD_FILE):
        load_classifier(saved)


def test_weights_that_are_missing_are_named(saved: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(saved / "model.safetensors")
    del weights["layers.1.mlp.up_proj.weight"]
    save_file(weights, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadModel, match=r"lacks weights: layers\.1\.mlp\.up_proj\.weight"):
        load_classifier(saved)


def test_another_tokenizer_in_its_folder_is_refused(saved: Path) -> None:
    tiny.character_tokenizer(saved, characters="abc")
    with pytest.raises(BadModel, match="not the one that it was trained with"):
        load_classifier(saved)


def test_models_that_see_what_follows_are_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel, T5Config

    tokenizer = tiny.character_tokenizer(tmp_path)
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=16, initializer_range=0.5)  # fmt: skip
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(BadModel, match="reads what follows"):
        new_classifier(tmp_path)
    T5Config(vocab_size=len(tokenizer), d_model=16).save_pretrained(tmp_path)
    with pytest.raises(BadModel, match="an encoder and a decoder"):
        new_classifier(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"head": Head.ATOMS, "atoms": (1.0,)},
        {"head": Head.ATOMS, "atoms": (0.0, float("nan"))},
        {"head": Head.BERNOULLI, "atoms": (0.0, 1.0)},
    ],
)
def test_a_form_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ClassifierForm(Kind.V, tokenizer_sha256="", made_from="", **wrong)


def test_a_dtype_that_is_none_is_refused(value_model: Path) -> None:
    for word in ("int8", "float31"):
        with pytest.raises(UsageError):
            new_classifier(value_model, dtype=word)
