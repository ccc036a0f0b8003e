"""Our decoder under a classifier: against a loop that reads everything anew, in float64 where it adds."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.lm.guidance.conftest import MakeClassifier
from tests.posttrain import tiny

from gpuherd.errors import BadModel, UsageError
from gpuherd.lm.backend import Decoded, Decoding, Generation, PromptTokens
from gpuherd.lm.guidance.guide import Guide, Mode

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpuherd.lm.guidance.guidance import Guidance  # noqa: E402
from gpuherd.lm.guidance.guide import offsets  # noqa: E402
from gpuherd.lm.model import LanguageModel  # noqa: E402

TEXTS = ("To be, or not to be", "2+2=", "A", "what is the answer to all of this?", "xyz")
GUIDE = Guide("random", eta=0.3, top_k=6)
HOW = Decoding(greedy=True, samples=2, max_new_tokens=8, end_ids=(0,), seed=3)
SHORT = replace(HOW, max_new_tokens=5)


def slow(*values: Any) -> Any:
    """A case of a test that takes too long for every run."""
    return pytest.param(*values, marks=pytest.mark.slow)


def prompts(tokenizer: Any) -> list[PromptTokens]:
    return [PromptTokens(text, tuple(tokenizer(text)["input_ids"])) for text in TEXTS]


def laws(policy: Any, guidance: Guidance, ids: list[int]) -> tuple[Any, Any, Any]:
    """The reference's log-probs of the next token, the guided law's over the vocabulary, and its KL: all read anew."""
    guide, classifier = guidance.guide, guidance.classifier
    reference = policy(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
    candidates = reference.topk(guide.top_k).indices
    values = classifier.values(torch.tensor([[*ids, token] for token in candidates.tolist()]))[:, -1]
    weights = torch.full_like(reference, -torch.inf)
    weights[candidates] = reference[candidates] + offsets(values, guide.mode, guide.eta, classifier.form.atoms)
    guided = weights.log_softmax(-1)
    kl = (guided[candidates].exp() * (guided - reference)[candidates]).sum()
    return reference, guided, kl


def ids_of(tokens: Generation) -> list[int]:
    return [*tokens.token_ids, *([] if tokens.end_id is None else [tokens.end_id])]


def check(policy: Any, guidance: Guidance, prompt: PromptTokens, tokens: Generation, *, greedy: bool) -> None:
    """An answer and all that is recorded of it is what the loop says of its tokens."""
    assert tokens.guided is not None
    ended = tokens.end_id is not None
    raw = [*tokens.log_probs, *([tokens.end_log_prob] if ended else [])]
    log_probs = [*tokens.guided.log_probs, *([tokens.guided.end_log_prob] if ended else [])]
    divergences = [*tokens.guided.kl, *([tokens.guided.end_kl] if ended else [])]
    before = list(prompt.token_ids)
    for place, token in enumerate(ids_of(tokens)):
        reference, guided, kl = laws(policy, guidance, before)
        if greedy:
            assert guided[token].item() == pytest.approx(guided.max().item(), abs=1e-5)
        assert raw[place] == pytest.approx(reference[token].item(), abs=1e-4)
        assert log_probs[place] == pytest.approx(guided[token].item(), abs=1e-4)
        assert divergences[place] == pytest.approx(kl.item(), abs=1e-4)
        before.append(token)


@pytest.mark.parametrize(
    ("kind", "atoms", "mode"),
    [
        ("v", (), Mode.BERNOULLI),
        ("q", (0.0, 0.5, 1.0), Mode.DISTRIBUTIONAL),
        slow("v", (0.0, 0.5, 1.0), Mode.EXPECTATION),
        slow("q", (), Mode.EXPECTATION),
    ],
)
def test_answers_are_of_the_guided_law_and_say_so(
    policy: Any, tokenizer: Any, make: MakeClassifier, kind: str, atoms: tuple[float, ...], mode: Mode
) -> None:
    guidance = Guidance(make(kind, atoms), replace(GUIDE, mode=mode))
    lm = LanguageModel(policy, tokenizer, guidance=guidance)
    asked = prompts(tokenizer)[:2]
    with torch.inference_mode():
        for prompt, decoded in zip(asked, lm.decode(asked, HOW), strict=True):
            assert decoded.greedy is not None
            check(policy, guidance, prompt, decoded.greedy, greedy=True)
            check(policy, guidance, prompt, decoded.samples[1], greedy=False)


@pytest.mark.parametrize("kind", ["v", slow("q")])
def test_answers_depend_on_no_other_answer(policy: Any, tokenizer: Any, make: MakeClassifier, kind: str) -> None:
    """Alone, in a batch, one by one (``exact``), or behind a beginning that all share."""
    guidance = Guidance(make(kind), GUIDE)
    lm = LanguageModel(policy, tokenizer, guidance=guidance)
    asked = prompts(tokenizer)[:3]
    together = lm.decode(asked, SHORT)
    same(together, [lm.decode([each], SHORT)[0] for each in asked])
    same(together, LanguageModel(policy, tokenizer, guidance=guidance, exact=True).decode(asked, SHORT))
    begin = asked[0].token_ids * 4
    shared = [PromptTokens(each.id, (*begin, *each.token_ids)) for each in asked]
    same(lm.decode(shared, SHORT), [lm.decode([each], SHORT)[0] for each in shared])


def same(some: list[Decoded], others: list[Decoded]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.greedy is not None and other.greedy is not None
        for mine, theirs in zip((one.greedy, *one.samples), (other.greedy, *other.samples), strict=True):
            assert ids_of(mine) == ids_of(theirs)
            assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
            assert mine.guided is not None and theirs.guided is not None
            assert mine.guided.log_probs == pytest.approx(theirs.guided.log_probs, abs=1e-4)
            assert mine.guided.kl == pytest.approx(theirs.guided.kl, abs=1e-4)


def test_draws_are_of_the_guided_law_at_their_temperature(policy: Any, tokenizer: Any, make: MakeClassifier) -> None:
    from scipy.stats import chisquare

    guidance = Guidance(make(), GUIDE)
    prompt = prompts(tokenizer)[0]
    how = Decoding(greedy=False, samples=300, temperature=0.7, max_new_tokens=1)
    drawn = LanguageModel(policy, tokenizer, guidance=guidance).decode([prompt], how)[0].samples
    with torch.inference_mode():
        guided = laws(policy, guidance, list(prompt.token_ids))[1]
    expected = (guided / 0.7).softmax(-1) * 300
    counts = torch.tensor([each.token_ids[0] for each in drawn]).bincount(minlength=len(expected)).double()
    often = expected > 5
    assert 3 <= int(often.sum()) <= GUIDE.top_k and not counts[guided.isneginf()].any()
    found = torch.cat([counts[often], counts[~often].sum()[None]])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]])
    kept = wanted > 0
    assert chisquare(found[kept].numpy(), wanted[kept].numpy(), sum_check=False).pvalue > 1e-4


def test_with_infinite_eta_it_is_the_reference_among_its_most_probable(
    policy: Any, tokenizer: Any, make: MakeClassifier
) -> None:
    guidance = Guidance(make(), replace(GUIDE, eta=math.inf))
    asked = prompts(tokenizer)
    guided = LanguageModel(policy, tokenizer, guidance=guidance).decode(asked, HOW)
    plain = LanguageModel(policy, tokenizer).decode(asked, replace(HOW, top_k=GUIDE.top_k))
    for one, other in zip(guided, plain, strict=True):
        assert one.greedy is not None and other.greedy is not None
        assert ids_of(one.greedy) == ids_of(other.greedy)
        assert [ids_of(each) for each in one.samples] == [ids_of(each) for each in other.samples]
        guided_tokens = one.samples[0].guided
        assert guided_tokens is not None and all(kl is not None and kl > 0 for kl in guided_tokens.kl)


def test_an_answer_that_nothing_guides_says_so(policy: Any, tokenizer: Any) -> None:
    decoded = LanguageModel(policy, tokenizer).decode(prompts(tokenizer)[:1], HOW)[0]
    assert decoded.greedy is not None and decoded.greedy.guided is None


def test_another_tokenizer_is_refused_before_anything_is_read(
    policy: Any, make: MakeClassifier, tmp_path: Path
) -> None:
    other = tiny.character_tokenizer(tmp_path, characters="abc")
    with pytest.raises(UsageError, match="other tokenizers: id 3 is 'a' to the policy and '0' to the classifier"):
        LanguageModel(policy, other, guidance=Guidance(make(), GUIDE))


def test_a_mode_that_is_not_of_the_head_is_refused(make: MakeClassifier) -> None:
    with pytest.raises(UsageError, match="use bernoulli"):
        Guidance(make(), replace(GUIDE, mode=Mode.DISTRIBUTIONAL))


def test_nan_names_the_classifier(policy: Any, tokenizer: Any, make: MakeClassifier) -> None:
    classifier = make()
    with torch.no_grad():
        classifier.module.head.bias.fill_(math.nan)
    lm = LanguageModel(policy, tokenizer, guidance=Guidance(classifier, GUIDE))
    with pytest.raises(BadModel, match=r"classifier .*: its value of a token is no number"):
        lm.decode(prompts(tokenizer), HOW)


def test_answers_end_where_the_classifier_has_no_more_places(tokenizer: Any, policy: Any, tmp_path: Path) -> None:
    from gpuherd.lm.guidance.classifier import new_classifier

    tiny.tiny_llama(tmp_path, seed=2, width=16, positions=24)
    guidance = Guidance(new_classifier(tmp_path), GUIDE)
    lm = LanguageModel(policy, tokenizer, guidance=guidance)
    asked = prompts(tokenizer)[:2]
    for prompt, decoded in zip(asked, lm.decode(asked, replace(HOW, max_new_tokens=40, end_ids=())), strict=True):
        assert decoded.greedy is not None
        assert len(prompt.token_ids) + len(decoded.greedy.token_ids) == 24
    long = PromptTokens("long", (5,) * 24)
    with pytest.raises(UsageError, match="prompt long: 24 tokens, and the classifier has 24 places"):
        lm.decode([long], HOW)
    assert len(lm.log_probs([long], [(5, 6)])[0]) == 2  # what is not guided is not bound by it


def test_memory_that_runs_out_changes_no_answer(
    policy: Any, tokenizer: Any, make: MakeClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    guidance = Guidance(make(), GUIDE)
    lm = LanguageModel(policy, tokenizer, guidance=guidance)
    asked = prompts(tokenizer)[:2]
    expected = lm.decode(asked, SHORT)
    forward = type(policy).forward

    def little_memory(self: Any, input_ids: Any, *args: Any, **how: Any) -> Any:
        if len(input_ids) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, input_ids, *args, **how)

    little_memory.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(type(policy), "forward", little_memory)
    found = lm.decode(asked, SHORT)
    assert lm.most_rows is not None and lm.most_rows <= 4
    same(found, expected)
