"""Policies answer: draws belong to a problem and a sample, log-probs are those of what sampled, rewards are numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain.letters import Letters

from gpuherd.errors import UsageError
from gpuherd.lm.backend import PromptTokens
from gpuherd.lm.guidance.classifier import new_classifier
from gpuherd.lm.guidance.guide import Guide
from gpuherd.posttrain.engine.strategies import enable_checkpointing
from gpuherd.posttrain.rewards.answers import BadReward
from gpuherd.posttrain.rollout.sampler import Prefix, Sampler, scored
from gpuherd.posttrain.types import Policy, Precision, Problem, Sampling, Split

HOW = Sampling(max_new_tokens=6, batch_size=4, seed=3, temperature=0.7)
TASK = Letters()
PROBLEMS = TASK.problems(Split.TRAIN, 5, 0)


@pytest.fixture(scope="module")
def sampler(policy_model: Path) -> Sampler:
    return Sampler(Policy(str(policy_model)), Precision(), "cpu", HOW)


def test_rollouts_are_of_their_problems_and_groups_share_their_prompt(sampler: Sampler) -> None:
    task = Letters()
    rollouts = sampler.rollouts(task, PROBLEMS, 3, reward_batch_size=4)

    assert [(each.problem, each.sample) for each in rollouts] == [(p.id, n) for p in PROBLEMS for n in range(3)]
    assert task.scored == [4, 4, 4, 3]
    for each in rollouts:
        problem = next(p for p in PROBLEMS if p.id == each.problem)
        assert sampler.text(each.prompt_ids) == problem.prompt
        assert sampler.text(each.ids) == each.text and 1 <= len(each.ids) <= 6
        assert each.reward == TASK.rewards([problem], [each.text])[0].value
        assert each.turn_rewards == ((len(each.ids) - 1, each.reward),)
        assert each.finished == (each.ids[-1] in sampler.end_ids)
        assert all(each.by_policy) and len(each.by_policy) == len(each.ids) == len(each.log_probs)
    assert len({each.ids for each in rollouts}) > 5


def test_draws_do_not_depend_on_what_is_drawn_beside_them(sampler: Sampler, policy_model: Path) -> None:
    together = sampler.rollouts(TASK, PROBLEMS, 4)
    wide = Sampler(Policy(str(policy_model)), Precision(), "cpu", Sampling(6, 0.7, batch_size=64, seed=3))
    apart = [each for problem in PROBLEMS for each in wide.rollouts(TASK, [problem], 4)]
    later = sampler.rollouts(TASK, PROBLEMS, 2, first_sample=2)

    assert [each.ids for each in apart] == [each.ids for each in together]
    assert [each.ids for each in later] == [each.ids for each in together if each.sample >= 2]
    assert [each.sample for each in later[:2]] == [2, 3]
    other = sampler.rollouts(TASK, PROBLEMS, 4, stream="7")
    assert [each.ids for each in other] != [each.ids for each in together]


def test_log_probs_are_those_at_the_sampling_temperature(sampler: Sampler) -> None:
    for each in sampler.rollouts(TASK, PROBLEMS[:2], 2):
        whole = torch.tensor([[*each.prompt_ids, *each.ids]])
        with torch.inference_mode():
            logits = sampler.model.module(whole).logits[0, len(each.prompt_ids) - 1 : -1].double()
        wanted = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(each.ids)[:, None])[:, 0]
        assert torch.tensor(each.log_probs, dtype=torch.double) == pytest.approx(wanted.numpy(), abs=1e-5)


def test_the_greedy_answer_is_one(sampler: Sampler) -> None:
    first, second = sampler.rollouts(TASK, PROBLEMS[:2], 1, greedy=True)

    assert (first.sample, second.sample) == (0, 0)
    with torch.inference_mode():
        logits = sampler.model.module(torch.tensor([first.prompt_ids])).logits[0, -1]
    assert first.ids[0] == int(logits.argmax())
    with pytest.raises(UsageError, match="one greedy answer"):
        sampler.rollouts(TASK, PROBLEMS[:1], 2, greedy=True)


def test_continuations_go_on_from_what_is_begun(sampler: Sampler) -> None:
    prompt = sampler.prompt_ids(PROBLEMS[0])
    whole = sampler.continuations([Prefix("p", prompt)], greedy=True)[0][0]
    cut = sampler.continuations([("p", prompt, whole.ids[:2]), Prefix("p", prompt, whole.ids[:2], 1)], greedy=True)

    assert cut[0][0].ids == whole.ids[2:]
    assert cut[1][0].ids == whole.ids[2:3] and not cut[1][0].finished
    drawn = sampler.continuations([Prefix("p", prompt, whole.ids[:3])], samples=5)
    assert len(drawn[0]) == 5 and all(len(each.ids) <= 3 for each in drawn[0])


def test_a_prefix_without_a_place_left_is_refused(sampler: Sampler) -> None:
    with pytest.raises(UsageError, match="at most 0 tokens"):
        sampler.continuations([Prefix("p", (5,), (), 0)])
    with pytest.raises(UsageError, match="prompt p: 256 tokens"):
        sampler.continuations([Prefix("p", (5,) * 256)])


def test_an_answer_of_nothing_is_legal(policy_model: Path) -> None:
    sampler = Sampler(Policy(str(policy_model)), Precision(), "cpu", HOW)
    with torch.no_grad():  # a model that ends at once
        sampler.model.module.lm_head.weight.zero_()
    greedy = sampler.rollouts(TASK, PROBLEMS[:1], 1, greedy=True)[0]

    assert (greedy.ids, greedy.text, greedy.finished, greedy.reward) == ((0,), "", True, 0.0)
    assert greedy.log_probs[0] == pytest.approx(-math.log(sampler.model.module.config.vocab_size))


def test_a_model_in_training_answers_in_evaluation_mode_and_goes_on_training(policy_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(policy_model)
    module.config.attention_dropout = 0.9
    for layer in module.model.layers:
        layer.self_attn.attention_dropout = 0.9
    module.train()
    enable_checkpointing(module)
    over = Sampler.over(module, AutoTokenizer.from_pretrained(policy_model), HOW)
    plain = Sampler(Policy(str(policy_model)), Precision(), "cpu", HOW)

    assert [each.ids for each in over.rollouts(TASK, PROBLEMS, 2)] == [
        each.ids for each in plain.rollouts(TASK, PROBLEMS, 2)
    ]
    assert module.training and all(each.training for each in module.modules())
    assert module(torch.tensor([[5, 6]])).logits.requires_grad


def test_a_reward_that_is_no_number_is_refused_by_name() -> None:
    problems = [Problem("first", "q"), Problem("bad\x1b[31m", "q")]
    with pytest.raises(BadReward, match=r"task letters, problem bad\\x1b\[31m: the reward of 'x+…' is nan"):
        scored(Letters(poison="x"), problems, ["a", "x" * 100], 1)

    class Short(Letters):
        def rewards(self, problems: Any, completions: Any) -> Any:
            return []

    with pytest.raises(BadReward, match="0 rewards of 2"):
        scored(Short(), problems, ["a", "b"])


def test_a_chat_template_is_asked_for_where_there_is_one(policy_model: Path) -> None:
    from transformers import AutoTokenizer

    from gpuherd.posttrain.rollout.sampler import Prompting

    tokenizer = AutoTokenizer.from_pretrained(policy_model)
    with pytest.raises(UsageError, match="no chat template"):
        Prompting(tokenizer, chat=True)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    chatting = Prompting(tokenizer, chat=True)
    asked = chatting.of(Problem("p", "1+1</s>[user]"))
    assert tokenizer.decode(list(asked)) == "[user]1+1< /s>[user][assistant]"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert tokenizer.decode(list(chatting.of_messages(turns))) == "[user]a[assistant]b[user]c[assistant]"
    with pytest.raises(UsageError, match="problem p: its prompt is empty"):
        Prompting(tokenizer, chat=False).of(Problem("p", ""))


def test_draws_in_parts_are_the_same_as_all_together(sampler: Sampler) -> None:
    from gpuherd.lm.backend import Decoding

    prompt = PromptTokens("p", (5, 6))
    whole = sampler.model.decode([prompt], Decoding(greedy=False, samples=4, max_new_tokens=5, end_ids=(0,)))
    rest = sampler.model.decode(
        [prompt], Decoding(greedy=False, samples=2, first_sample=2, max_new_tokens=5, end_ids=(0,))
    )
    assert [each.token_ids for each in rest[0].samples] == [each.token_ids for each in whole[0].samples[2:]]


@pytest.fixture
def guided(policy_model: Path, value_model: Path, tmp_path: Path) -> Policy:
    """A policy whose classifier has a head of random numbers."""
    classifier = new_classifier(value_model)
    torch.manual_seed(0)
    with torch.no_grad():
        classifier.module.head.weight.normal_(std=3.0)
    classifier.save(tmp_path / "classifier")
    return Policy(str(policy_model), guide=Guide(str(tmp_path / "classifier"), eta=0.05, top_k=5))


def test_a_guided_policy_answers_by_its_guide(sampler: Sampler, guided: Policy) -> None:
    strong = Sampler(guided, Precision(), "cpu", HOW)
    prefixes = [Prefix(each.id, strong.prompt_ids(each)) for each in PROBLEMS]
    plain, steered = sampler.continuations(prefixes, samples=2), strong.continuations(prefixes, samples=2)

    assert [each.ids for group in plain for each in group] != [each.ids for group in steered for each in group]
    assert all(each.kl is None for group in plain for each in group)
    for group in steered:
        for each in group:
            assert each.kl is not None and len(each.kl) == len(each.ids) == len(each.log_probs)
            assert all(kl is not None and kl >= 0 for kl in each.kl)


def test_another_eta_takes_the_same_weights(guided: Policy, sampler: Sampler) -> None:
    strong = Sampler(guided, Precision(), "cpu", HOW)
    weak = strong.at(1e6)
    assert weak.model.module is strong.model.module
    prefixes = [Prefix(each.id, strong.prompt_ids(each)) for each in PROBLEMS]

    fresh = Sampler(guided.at(1e6), Precision(), "cpu", HOW).continuations(prefixes)
    assert [each.ids for (each,) in weak.continuations(prefixes)] == [each.ids for (each,) in fresh]
    assert [each.ids for (each,) in strong.continuations(prefixes)] != [each.ids for (each,) in fresh]
    with pytest.raises(UsageError, match="the policy is not guided"):
        sampler.at(1.0)
