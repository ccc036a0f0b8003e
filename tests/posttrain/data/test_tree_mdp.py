"""The tree MDP: guided policies of a real model and classifier are the closed forms, and those are the optimum."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.posttrain.data.tree_models import write_classifier, write_reference

from gpuherd.errors import UsageError
from gpuherd.lm.backend import Decoding, PromptTokens
from gpuherd.lm.guidance.guide import Guide, Kind, Mode
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.data.tree_mdp import Settings, TreePolicy, controlled, optimum, reference
from gpuherd.posttrain.types import Split

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

START, LEFT, RIGHT, WIN = 2, 3, 4, 5
ETAS = (0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 10.0, math.inf)
FORMS = {Mode.DISTRIBUTIONAL: optimum, Mode.EXPECTATION: controlled}

PROBABILITIES = st.floats(0.01, 0.99)


@settings(max_examples=60)
@given(PROBABILITIES, PROBABILITIES, st.floats(0.02, 10), PROBABILITIES, PROBABILITIES)
def test_no_policy_is_better_than_the_optimum(p_left: float, p_win: float, eta: float, left: float, win: float) -> None:
    tree = Settings(p_left=p_left, p_win=p_win)
    base = reference(tree)

    def worth(policy: TreePolicy) -> float:
        return policy.reward - eta * policy.kl(base)

    best = optimum(tree, eta)
    assert worth(best) >= worth(TreePolicy(left, win)) - 1e-9
    assert worth(best) >= worth(controlled(tree, eta)) - 1e-9
    # Its worth is eta ln E[exp(r/eta)] under the reference.
    total = math.log(p_left * math.exp(0.1 / eta) + (1 - p_left) * (p_win * math.exp(1 / eta) + 1 - p_win))
    assert worth(best) == pytest.approx(eta * total, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("p_left", [0.05, 0.5, 0.95])
def test_theorem_4_2(p_left: float) -> None:
    """As eta falls CD earns 0.1 and the optimum 1, at the divergences of the paper; the second is that of the first
    choice alone: a whole answer's has the branch behind it too."""
    tree = Settings(p_left=p_left)
    base, eta = reference(tree), 0.002
    assert controlled(tree, eta).reward == pytest.approx(0.1, abs=1e-6)
    assert optimum(tree, eta).reward == pytest.approx(1, abs=1e-6)
    assert controlled(tree, eta).kl(base) == pytest.approx(math.log(1 / p_left), abs=1e-6)
    assert optimum(tree, eta).first_kl(base) == pytest.approx(math.log(1 / (1 - p_left)), abs=1e-6)
    assert optimum(tree, eta).kl(base) == pytest.approx(math.log(1 / (0.05 * (1 - p_left))), abs=1e-6)


def test_with_infinite_eta_all_are_the_reference() -> None:
    tree = Settings(p_left=0.3)
    for form in FORMS.values():
        policy = form(tree, math.inf)
        assert (policy.left, policy.win) == pytest.approx((0.3, 0.05))
        assert policy.kl(reference(tree)) == pytest.approx(0, abs=1e-12)


def guided(policy: Any, classifier: Any, mode: Mode, eta: float) -> tuple[TreePolicy, float, float]:
    """The guided policy of a model, and the divergences of its two choices as they are recorded."""
    from gpuherd.lm.guidance.guidance import Guidance

    with torch.inference_mode():
        guiding = Guidance(classifier, Guide("tree", eta, mode)).begin([[START]])
        first = guiding.distribution(policy(torch.tensor([[START]])).logits[:, -1])
        guiding.take([RIGHT])
        second = guiding.distribution(policy(torch.tensor([[START, RIGHT]])).logits[:, -1])
    left, win = (law.of(torch.tensor([token])).exp().item() for law, token in ((first, LEFT), (second, WIN)))
    return TreePolicy(left, win), first.kl.item(), second.kl.item()


@pytest.fixture(params=[0.1, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.01, 0.5, 0.9))])
def tree(request: pytest.FixtureRequest) -> Settings:
    return Settings(p_left=request.param)


@pytest.mark.parametrize("kind", Kind)
def test_guided_policies_are_the_closed_forms(tree: Settings, kind: Kind, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from gpuherd.lm.guidance.classifier import load_classifier

    policy = AutoModelForCausalLM.from_pretrained(write_reference(tmp_path / "reference", tree)).eval()
    write_classifier(tmp_path / "classifier", tree, kind)
    classifier = load_classifier(tmp_path / "classifier")
    base = reference(tree)
    for mode, form in FORMS.items():
        for eta in ETAS:
            found, first_kl, second_kl = guided(policy, classifier, mode, eta)
            exact = form(tree, eta)
            assert (found.left, found.win) == pytest.approx((exact.left, exact.win), abs=1e-6), (mode, eta)
            assert first_kl == pytest.approx(exact.first_kl(base), abs=1e-6)
            assert first_kl + (1 - found.left) * second_kl == pytest.approx(exact.kl(base), abs=2e-6)
    assert guided(policy, classifier, Mode.EXPECTATION, 0.002)[0].reward == pytest.approx(0.1, abs=1e-4)
    assert guided(policy, classifier, Mode.DISTRIBUTIONAL, 0.01)[0].reward == pytest.approx(1, abs=1e-6)


def test_decoded_answers_are_of_the_guided_policies(tmp_path: Path) -> None:
    """By our decoder and by transformers' ``generate``: as often left, and won, as the closed forms say."""
    from scipy.stats import binomtest
    from transformers import AutoModelForCausalLM, LogitsProcessorList

    from gpuherd.lm.guidance.guidance import Guidance, GuidedLogitsProcessor
    from gpuherd.lm.model import LanguageModel

    tree, eta = Settings(p_left=0.7), 0.35
    module = AutoModelForCausalLM.from_pretrained(write_reference(tmp_path / "reference", tree)).eval()
    classifier = write_classifier(tmp_path / "classifier", tree)
    task = make_task("tree_mdp", TaskOptions(settings={"p_left": 0.7, "test": 600}))
    problems = task.problems(Split.TEST, None, 0)
    guide = Guide("tree", eta, Mode.DISTRIBUTIONAL)
    exact = optimum(tree, eta)
    assert 0.3 < exact.left < 0.7 and 0.3 < exact.win < 0.7

    lm = LanguageModel(module, classifier.tokenizer, guidance=Guidance(classifier, guide))
    asked = [PromptTokens(each.id, (START,)) for each in problems]
    how = Decoding(greedy=False, samples=1, max_new_tokens=4, end_ids=(0,))
    ours = [each.samples[0].text for each in lm.decode(asked, how)]
    batch = torch.full((600, 1), START)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        generated = module.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=4, do_sample=True, pad_token_id=1,
            logits_processor=LogitsProcessorList([GuidedLogitsProcessor(classifier, guide)]),
        )  # fmt: skip
    theirs = classifier.tokenizer.batch_decode(generated[:, 1:], skip_special_tokens=True)
    for texts in (ours, theirs):
        lefts, wins = texts.count("L"), texts.count("RW")
        assert lefts + wins + texts.count("RX") == 600
        assert binomtest(lefts, 600, exact.left).pvalue > 1e-3
        assert binomtest(wins, 600 - lefts, exact.win).pvalue > 1e-3
        assert math.fsum(each.value for each in task.rewards(problems, texts)) == pytest.approx(0.1 * lefts + wins)


def test_the_task() -> None:
    task = make_task("tree_mdp")
    train, test = (task.problems(split, None, 0) for split in (Split.TRAIN, Split.TEST))
    assert len({each.id for each in (*train, *test)}) == len(train) + len(test) == 2000
    assert task.problems(Split.TRAIN, 5, 1) == task.problems(Split.TRAIN, 9, 1)[:5] != train[:5]
    told = task.rewards([train[0]] * 6, ["L", "RW", "RX", "", "LL", "</s>"])
    assert [each.value for each in told] == [0.1, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [each.note is None for each in told] == [True, True, True, False, False, False]
    with pytest.raises(UsageError, match="1001 problems"):
        task.problems(Split.TRAIN, 1001, 0)
    for wrong in ({"p_left": 0.0}, {"p_win": 1.0}, {"train": 0}, {"p_lefts": 0.5}):
        with pytest.raises(UsageError):
            make_task("tree_mdp", TaskOptions(settings=wrong))
