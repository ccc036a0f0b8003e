"""Words that are given: their log-probs behind a prompt, those of a given answer, and the states behind a prompt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.qa.small_models import INSTRUCTION, facts, plain_prompt

from gpuherd.errors import UsageError
from gpuherd.lm.backend import PromptTokens
from gpuherd.lm.tokens import spellings, without_longer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gpuherd.lm import model  # noqa: E402
from gpuherd.lm.forward import causal_model  # noqa: E402
from gpuherd.lm.model import LanguageModel  # noqa: E402

CONTINUATIONS = [(327,), (40, 41), (40,), (50, 60, 70, 80), (40, 42)]


@pytest.fixture(scope="module")
def module(trained: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(trained).eval()


@pytest.fixture(scope="module")
def lm(trained: Path, module: Any) -> LanguageModel:
    return LanguageModel(module, transformers.AutoTokenizer.from_pretrained(trained))


@pytest.fixture(scope="module")
def asked(lm: LanguageModel) -> list[PromptTokens]:
    return [
        PromptTokens(question, tuple(lm.tokenizer(INSTRUCTION * (number % 3) + plain_prompt(question))["input_ids"]))
        for number, (question, _) in enumerate(facts()[:9])
    ]


def whole_pass(module: Any, prompt: PromptTokens, answer: tuple[int, ...]) -> list[float]:
    """One unbatched forward pass over all, as the definition has it."""
    with torch.inference_mode():
        logits = module(torch.tensor([[*prompt.token_ids, *answer]])).logits[0].double().log_softmax(-1)
    start = len(prompt.token_ids) - 1
    return [float(logits[start + place, token]) for place, token in enumerate(answer)]


def test_continuations_of_one_token_and_of_several(lm: LanguageModel, module: Any, asked: list[PromptTokens]) -> None:
    for prompt, found in zip(asked, lm.weigh(asked, CONTINUATIONS), strict=True):
        expected = [sum(whole_pass(module, prompt, each)) for each in CONTINUATIONS]
        assert found == pytest.approx(expected, abs=2e-5)


def test_all_tokens_together_have_the_mass_1(lm: LanguageModel, asked: list[PromptTokens]) -> None:
    for found in lm.weigh(asked, [(token,) for token in range(512)]):
        assert math.fsum(math.exp(each) for each in found if each is not None) == pytest.approx(1, abs=1e-5)


def test_single_tokens_take_one_pass(module: Any, lm: LanguageModel, asked: list[PromptTokens]) -> None:
    passes: list[int] = []
    hook = module.register_forward_pre_hook(lambda *_: passes.append(1))
    lm.weigh(asked, [(5,), (6,), (7,)])
    assert len(passes) == 1
    lm.weigh(asked, CONTINUATIONS)
    assert len(passes) == 3
    hook.remove()


def test_a_continuation_has_a_token(lm: LanguageModel, asked: list[PromptTokens]) -> None:
    with pytest.raises(UsageError):
        lm.weigh(asked, [()])
    assert lm.weigh(asked[:2], []) == [(), ()]


def test_given_answers_of_unlike_lengths(lm: LanguageModel, module: Any, asked: list[PromptTokens]) -> None:
    answers = [tuple(range(20, 20 + 3 * number)) for number in range(len(asked))]  # the first is empty
    for prompt, answer, found in zip(asked, answers, lm.log_probs(asked, answers), strict=True):
        assert found == pytest.approx(whole_pass(module, prompt, answer), abs=1e-5)


def test_long_answers_are_read_in_parts(module: Any, asked: list[PromptTokens]) -> None:
    """As with a vocabulary of 100,000, where the logits of 2,000 places are gigabytes."""
    widths: list[int] = []
    hook = module.register_forward_hook(lambda _module, _args, output: widths.append(output.logits.shape[1]))
    answers = [tuple(range(20, 20 + 5 * number)) for number in range(len(asked))]
    rows = [each.token_ids for each in asked]
    with torch.inference_mode():
        found = model.log_probs(causal_model(module), rows, answers, most_numbers=512 * len(asked) * 7)
    hook.remove()
    assert widths == [7, 7, 7, 7, 7, 5]
    for prompt, answer, each in zip(asked, answers, found, strict=True):
        assert each == pytest.approx(whole_pass(module, prompt, answer), abs=1e-5)


def test_states_are_those_behind_the_last_token(lm: LanguageModel, module: Any, asked: list[PromptTokens]) -> None:
    states = lm.hidden(asked)
    assert states.shape == (9, 64)
    assert str(states.dtype) == "float32"
    for prompt, state in zip(asked, states, strict=True):
        with torch.inference_mode():
            whole = module(torch.tensor([prompt.token_ids]), output_hidden_states=True).hidden_states[-1][0, -1]
        assert state == pytest.approx(whole.numpy(), abs=1e-5)


def test_prompts_beyond_the_models_positions_are_refused(lm: LanguageModel) -> None:
    long = [PromptTokens("long", tuple([40] * 512))]
    for ask in (lambda: lm.weigh(long, [(5,)]), lambda: lm.hidden(long), lambda: lm.log_probs(long, [(5,)])):
        with pytest.raises(UsageError, match="prompt long: 512 tokens"):
            ask()
    assert len(lm.log_probs([PromptTokens("fits", tuple([40] * 511))], [(5,)])[0]) == 1


def test_spellings_of_a_word_exclude_each_other(lm: LanguageModel) -> None:
    found = spellings(lm.tokenizer, "yes")
    texts = {lm.tokenizer.decode(each) for each in found}
    assert texts <= {" yes", "yes", " Yes", "Yes", " YES", "YES"}
    assert len(texts) >= 4
    assert without_longer(found) == found


def test_a_spelling_that_another_begins_is_left_out() -> None:
    assert without_longer([(1, 2), (1,), (3, 4), (3, 5), (1,)]) == ((1,), (3, 4), (3, 5))
