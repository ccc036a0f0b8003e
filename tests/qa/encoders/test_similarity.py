"""Similarities of a real bi-encoder and of small random cross-encoders: equal to plain transformers, one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.qa.encoders.small_encoders import change_config, minilm, random_bert

from gpuherd.errors import BadModel, MissingModel
from gpuherd.qa.encoders.files import EncoderKind, digest_of, encoder_files
from gpuherd.qa.encoders.models import BiEncoder, CrossEncoder, self_similarity, similarity_model
from gpuherd.qa.statistics.similarity import Pieces, relevances

ONE = {0: "LABEL_0"}
HAPPY = "That is a happy person"


@pytest.fixture(scope="module")
def encoder() -> BiEncoder:
    return BiEncoder(encoder_files(str(minilm())))


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_bert(tmp_path_factory.mktemp("cross"), ONE)


def test_the_similarities_of_the_model_card(encoder: BiEncoder) -> None:
    others = ["That is a happy dog", "That is a very happy person", "Today is a sunny day"]
    found = encoder.of_pairs([(HAPPY, other) for other in others])
    assert found == pytest.approx([0.6946, 0.9429, 0.2569], abs=1e-4)


def test_a_bi_encoder_is_symmetric_in_0_and_1_and_finds_a_text_itself(encoder: BiEncoder) -> None:
    texts = [HAPPY, "", "x", "Berlin", "quantum chromodynamics", "Nein!"]
    pairs = [(a, b) for a in texts for b in texts]
    found = dict(zip(pairs, encoder.of_pairs(pairs), strict=True))
    for (a, b), value in found.items():
        assert value is not None and 0 <= value <= 1
        assert value == found[b, a]
    assert self_similarity(encoder, texts) == 1


def test_batches_change_nothing(encoder: BiEncoder) -> None:
    texts = ["a", "the capital of France " * 20, HAPPY, "sunny " * 7]
    pairs = [(HAPPY, text) for text in texts]
    alone = [encoder.of_pairs([pair])[0] for pair in pairs]
    assert encoder.of_pairs(pairs) == pytest.approx(alone, abs=1e-6)


def test_a_text_that_does_not_fit_is_not_compared_unless_it_may_be_cut(encoder: BiEncoder) -> None:
    long = "word " * 300
    assert encoder.of_pairs([(HAPPY, long), (HAPPY, HAPPY)]) == [None, 1.0]
    assert encoder.vectors([]) == []
    cutting = similarity_model(encoder_files(str(minilm())), cut=True)
    cut = cutting.of_pairs([(HAPPY, long), (long, "word " * 400)])
    assert cut[0] is not None and cut[1] == pytest.approx(1, abs=1e-6)


def test_a_cross_encoder_is_the_sigmoid_of_its_logit(cross: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(cross).eval()
    tokenizer = AutoTokenizer.from_pretrained(cross)
    pairs = [("What is the capital", "of France"), ("one", "two plus three"), ("one", "two plus three"), ("", "x")]
    found = similarity_model(encoder_files(str(cross))).of_pairs(pairs)
    for pair, value in zip(pairs, found, strict=True):
        with torch.no_grad():
            logit = model(**tokenizer(*pair, return_tensors="pt")).logits[0, 0].item()
        assert value == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-6)
    assert found[0] != pytest.approx(found[1], abs=1e-3), (
        "this model can't tell texts apart, so that nothing was tested"
    )


def test_a_pair_that_is_too_long_for_a_cross_encoder_is_none(cross: Path) -> None:
    model = CrossEncoder(encoder_files(str(cross)))
    assert model.of_pairs([("plus " * 70, "plus " * 70)]) == [None]
    short, long = model.of_pairs([("plus " * 30, "plus " * 30), ("plus " * 70, "plus " * 70)])
    assert short is not None and long is None
    assert self_similarity(model, ["plus " * 200]) is None


def test_the_kind_that_was_asked_for_must_fit(cross: Path, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="no head"):
        similarity_model(encoder_files(str(minilm())), EncoderKind.CROSS)
    with pytest.raises(BadModel, match="3 labels"):
        similarity_model(encoder_files(str(random_bert(tmp_path / "three", {0: "a", 1: "b", 2: "c"}))))
    # An encoder without head, said to have one: transformers would make the head's weights up.
    bare = random_bert(tmp_path / "bare", None)
    change_config(
        bare, architectures=["BertForSequenceClassification"], id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}
    )
    with pytest.raises(BadModel, match="lacks weights"):
        similarity_model(encoder_files(str(bare)))


def test_models_that_are_not_whole(tmp_path: Path) -> None:
    with pytest.raises(MissingModel):
        encoder_files(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingModel, match=r"no config\.json"):
        encoder_files(str(tmp_path / "empty"))
    (tmp_path / "empty" / "config.json").write_text("[1")
    with pytest.raises(BadModel, match="can't read"):
        encoder_files(str(tmp_path / "empty"))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = random_bert(tmp_path / "nan", ONE)
    weights = load_file(folder / "model.safetensors")
    weights["classifier.bias"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadModel, match="not finite"):
        CrossEncoder(encoder_files(str(folder))).of_pairs([("a", "b")])


def test_the_digest_changes_with_every_file_that_is_read_and_with_no_other(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"w")
    before = digest_of(tmp_path)
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / "pytorch_model.bin").write_bytes(b"another form of the same weights")
    assert digest_of(tmp_path) == before
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    pooled = digest_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"v")
    assert len({before, pooled, digest_of(tmp_path)}) == 3


def test_relevance_takes_out_one_position_and_is_never_rescaled(encoder: BiEncoder) -> None:
    answer = Pieces("Who wrote Emma?", (" Jane", " Austen", " wrote", "", " Emma"))
    (found,) = relevances(encoder, [answer])
    assert found is not None
    whole = "Who wrote Emma? Jane Austen wrote Emma"
    without = [
        "Austen wrote Emma",
        "Jane wrote Emma",
        "Jane Austen Emma",
        "Jane Austen wrote Emma",
        "Jane Austen wrote",
    ]
    for value, rest in zip(found, without, strict=True):
        (similarity,) = encoder.of_pairs([(whole, f"Who wrote Emma? {rest}")])
        assert similarity is not None
        assert value == pytest.approx(1 - similarity, abs=1e-6)
    assert found[3] == 0, "a piece without characters takes nothing away"
    assert found[0] + found[1] > 2 * found[4], "the name matters more than a word of the question"


def test_relevance_by_a_cross_encoder_as_plain_transformers_have_it(cross: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(cross).eval()
    tokenizer = AutoTokenizer.from_pretrained(cross)
    pieces = (" The", " capital", "", " is", " Paris", ".", "\n")
    (found,) = relevances(CrossEncoder(encoder_files(str(cross))), [Pieces(" Which one? ", pieces)])
    rests = [
        "Which one? capital is Paris.",
        "Which one? The is Paris.",
        None,
        "Which one? The capital Paris.",
        "Which one? The capital is.",
        "Which one? The capital is Paris",
        None,
    ]
    assert found is not None
    for value, rest in zip(found, rests, strict=True):
        if rest is None:
            assert value == 0, "nothing was taken away, whatever the model says of a text and itself"
            continue
        with torch.no_grad():
            logit = model(**tokenizer("Which one? The capital is Paris.", rest, return_tensors="pt")).logits[0, 0]
        assert value == pytest.approx(1 - 1 / (1 + math.exp(-float(logit))), abs=1e-6)


class Counted:
    """A similarity by length, of texts that are not too long; and how much was compared."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.calls: list[tuple[int, int]] = []

    def of_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[float | None]:
        self.calls.append((len(pairs), sum(len(rest) for _, rest in pairs)))
        return [None if len(one) > self.longest else len(other) / len(one) for one, other in pairs]


def test_long_answers_do_not_fill_the_memory() -> None:
    long = Pieces("q", tuple(f" w{number}" for number in range(500)))
    refusing = Counted(longest=1000)
    assert relevances(refusing, [long] * 16) == [None] * 16
    assert sum(pairs for pairs, _ in refusing.calls) == 16, "one text each says that they are too long"
    taking = Counted(longest=10_000)
    found = relevances(taking, [long] * 16)
    assert max(characters for _, characters in taking.calls) < 1 << 23 < sum(size for _, size in taking.calls)
    assert found[0] == found[15] and found[0] is not None and len(found[0]) == 500
    short = Counted(longest=10_000)
    relevances(short, [Pieces("q", (" a", " b"))] * 3)
    assert [pairs for pairs, _ in short.calls if pairs] == [6], "short ones together, and none of their texts twice"


def test_relevances_of_many_answers_are_those_of_each(encoder: BiEncoder) -> None:
    answers = [
        Pieces("q one", (" a", " banana")),
        Pieces("q two", ()),
        Pieces("q one", (" a", " banana")),
        Pieces("q", ("word " * 300, "x")),
    ]
    together = relevances(encoder, answers)
    assert together[0] == together[2] and together[1] == () and together[3] is None
    alone = relevances(encoder, answers[:1])[0]
    assert alone is not None and together[0] == pytest.approx(alone, abs=1e-6)


def test_a_batch_that_does_not_fit_is_halved(cross: Path) -> None:
    import torch

    from gpuherd.qa.encoders.models import Input, Network

    network = Network(encoder_files(str(cross)), head=True, rows=8)
    inputs = [Input(tuple(range(5, 8 + number)), (0,) * (3 + number)) for number in range(5)]
    rows: list[int] = []

    def read(output: Any, mask: Any) -> Any:
        rows.append(mask.shape[0])
        if mask.shape[0] > 2:
            raise torch.OutOfMemoryError("out of memory")
        return output.logits

    halved = network.run(inputs, read)
    assert rows == [5, 3, 2, 1, 2]
    alone = [network.run([each], lambda output, mask: output.logits)[0, 0] for each in inputs]
    assert halved[:, 0] == pytest.approx(alone, abs=1e-6)

    def never(output: Any, mask: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        network.run(inputs[:2], never)
