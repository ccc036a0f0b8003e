"""The logits processor in transformers' ``generate``: against one that reads every candidate anew at each step."""

from __future__ import annotations

from typing import Any

import pytest
from tests.lm.guidance.conftest import MakeClassifier
from tests.qa.small_models import seeded

from gpuherd.errors import UsageError
from gpuherd.lm.backend import Decoding, PromptTokens
from gpuherd.lm.guidance.guide import Guide

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gpuherd.lm.guidance.guidance import Guidance, GuidedLogitsProcessor  # noqa: E402
from gpuherd.lm.guidance.guide import offsets  # noqa: E402
from gpuherd.lm.model import LanguageModel  # noqa: E402

TEXTS = ["To be, or not", "2+2=", "what?"]
GUIDE = Guide("random", eta=0.3, top_k=6)


class Naive:
    """Each candidate with all that stands before it, no cache and no padding."""

    def __init__(self, classifier: Any, mask: Any):
        self.classifier, self.mask = classifier, mask

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        mask = self.mask.repeat_interleave(len(input_ids) // len(self.mask), dim=0)
        reference = scores.double().log_softmax(-1)
        guided = torch.full_like(reference, -torch.inf)
        for row, ids in enumerate(input_ids.tolist()):
            begun = ids[int((mask[row] == 0).sum()) :]
            candidates = reference[row].topk(GUIDE.top_k).indices
            texts = torch.tensor([[*begun, token] for token in candidates.tolist()])
            added = offsets(self.classifier.values(texts)[:, -1], GUIDE.mode, GUIDE.eta)
            guided[row, candidates] = reference[row, candidates] + added
        return guided.log_softmax(-1).to(scores.dtype)


@pytest.fixture
def batch(tokenizer: Any) -> Any:
    return tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)


def generated(policy: Any, batch: Any, processor: Any, **how: Any) -> Any:
    with seeded(7):
        return policy.generate(
            **batch, max_new_tokens=6, eos_token_id=how.pop("eos_token_id", 0), pad_token_id=1,
            logits_processor=transformers.LogitsProcessorList([processor]), return_dict_in_generate=True,
            output_scores=True, **how,
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["v", pytest.param("q", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"do_sample": False}, marks=pytest.mark.slow),  # test_it_gives_what_our_decoder_gives is greedy
        {"do_sample": True, "num_return_sequences": 2, "temperature": 0.8},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "eos_token_id": [0, *range(20, 60)]},  # some rows end early, and are padded
    ],
    ids=["greedy", "drawn", "beams", "ending"],
)
def test_generate_gives_what_reading_all_anew_gives(
    policy: Any, batch: Any, make: MakeClassifier, kind: str, how: dict[str, Any]
) -> None:
    classifier = make(kind)
    ours = generated(
        policy, batch, GuidedLogitsProcessor(classifier, GUIDE, attention_mask=batch["attention_mask"]), **how
    )
    theirs = generated(policy, batch, Naive(classifier, batch["attention_mask"]), **how)
    assert torch.equal(ours.sequences, theirs.sequences)
    for one, other in zip(ours.scores, theirs.scores, strict=True):
        assert torch.allclose(one.exp(), other.exp(), atol=1e-5)


def test_it_gives_what_our_decoder_gives(policy: Any, tokenizer: Any, batch: Any, make: MakeClassifier) -> None:
    classifier = make()
    processor = GuidedLogitsProcessor(classifier, GUIDE, attention_mask=batch["attention_mask"])
    theirs = generated(policy, batch, processor, do_sample=False).sequences[:, batch["input_ids"].shape[1] :]
    lm = LanguageModel(policy, tokenizer, guidance=Guidance(classifier, GUIDE))
    asked = [PromptTokens(text, tuple(tokenizer(text)["input_ids"])) for text in TEXTS]
    for decoded, tokens in zip(
        lm.decode(asked, Decoding(max_new_tokens=6, end_ids=(0,))), theirs.tolist(), strict=True
    ):
        assert decoded.greedy is not None
        assert list(decoded.greedy.token_ids) == tokens[: len(decoded.greedy.token_ids)]


def test_one_processor_serves_one_generate_after_another(policy: Any, batch: Any, make: MakeClassifier) -> None:
    processor = GuidedLogitsProcessor(make(), GUIDE, attention_mask=batch["attention_mask"])
    first = generated(policy, batch, processor, do_sample=False).sequences
    assert torch.equal(generated(policy, batch, processor, do_sample=False).sequences, first)


def test_a_mask_of_other_prompts_is_refused(policy: Any, batch: Any, make: MakeClassifier) -> None:
    processor = GuidedLogitsProcessor(make(), GUIDE, attention_mask=torch.ones(2, 30, dtype=torch.long))
    with pytest.raises(UsageError, match="2 prompts of 30 tokens, and generates from 3 rows"):
        generated(policy, batch, processor, do_sample=False)


def test_padding_may_be_a_token_that_the_classifier_does_not_know(make: MakeClassifier) -> None:
    """Before a prompt, and behind a row that has ended: it changes nothing. In a prompt it is refused."""
    classifier, scores = make(), torch.zeros(2, 400)
    told = []
    for padding in (1, 300):
        mask = torch.tensor([[0, 1], [1, 1]])
        processor = GuidedLogitsProcessor(classifier, GUIDE, attention_mask=mask)
        processor(torch.tensor([[padding, 5], [6, 7]]), scores)
        chosen = processor(torch.tensor([[padding, 5, padding], [6, 7, 8]]), scores)[1]
        told += [chosen, processor(torch.tensor([[padding, 5, padding, padding], [6, 7, 8, 9]]), scores)[1]]
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(told[:2], told[2:], strict=True))
    with pytest.raises(UsageError, match="has embeddings of 103 tokens, and a row has the token 300"):
        GuidedLogitsProcessor(classifier, GUIDE)(torch.tensor([[300, 5]]), scores[:1])


def test_rows_that_grow_longer_than_the_classifier_are_refused(make: MakeClassifier) -> None:
    processor = GuidedLogitsProcessor(make(), GUIDE)
    with pytest.raises(UsageError, match="256 places for prompt and answer together, and a row has 257 tokens"):
        processor(torch.full((1, 256), 5), torch.zeros(1, 103))
