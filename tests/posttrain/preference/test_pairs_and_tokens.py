"""What is compared, what is imitated, and as which tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.posttrain.preference.vowels import episodes
from tests.qa import small_models
from tests.qa.conftest import made_once

from gpuherd.errors import UsageError
from gpuherd.posttrain.preference.data import Preference, best_and_worst, by_problem, compared
from gpuherd.posttrain.preference.tokens import Writing, load_tokenizer
from gpuherd.posttrain.types import Problem, Reward, Rollout

ANY = episodes(1)[0]


def rollout(reward: float, sample: int, ids: tuple[int, ...] | None = None) -> Rollout:
    return replace(ANY, reward=reward, sample=sample, ids=ids or (sample, 0), by_policy=(True, True), text=f"t{sample}")


def test_the_best_and_the_worst() -> None:
    found = best_and_worst([rollout(0.5, 0), rollout(1.0, 1), rollout(0.0, 2), rollout(1.0, 3), rollout(0.0, 4)])
    assert found is not None
    assert (found.chosen, found.rejected) == ("t1", "t2")
    assert (found.chosen_ids, found.rejected_ids) == ((1, 0), (2, 0))
    assert (found.chosen_reward, found.rejected_reward) == (1.0, 0.0)
    assert found.prompt_ids == ANY.prompt_ids


def test_nothing_to_compare() -> None:
    assert best_and_worst([]) is None
    assert best_and_worst([rollout(1.0, 0), rollout(1.0, 1)]) is None
    assert best_and_worst([rollout(1.0, 0, (7, 0)), rollout(0.0, 1, (7, 0))]) is None
    assert compared(rollout(1.0, 0, (7, 0)), rollout(0.0, 1, (7, 0))) is None


@settings(max_examples=25)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=6))
def test_order_does_not_matter(rewards: list[float]) -> None:
    rollouts = [rollout(reward, sample) for sample, reward in enumerate(rewards)]
    assert best_and_worst(rollouts) == best_and_worst(rollouts[::-1])


def test_groups_are_of_one_problem_and_prompt() -> None:
    one, other = rollout(0, 0), replace(rollout(0, 1), problem="q")
    third = replace(rollout(0, 2), prompt_ids=(1,))
    assert by_problem([one, other, third, one]) == [[one, one], [other], [third]]


@pytest.fixture(scope="session")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose tokenizer has a chat template. Read only."""
    return made_once(
        tmp_path_factory, "chatting", lambda folder: small_models.random_llama(folder, chat=small_models.CHAT_TEMPLATE)
    )


@pytest.fixture(scope="module")
def writing(policy_model: Path) -> Writing:
    return Writing(load_tokenizer(str(policy_model)), chat=False)


def test_prompt_and_completion_are_tokenised_apart(writing: Writing, policy_model: Path) -> None:
    tokenizer = load_tokenizer(str(policy_model))
    found = writing.comparison(Preference("x", "ab", "cd", ""))
    assert list(found.prompt_ids) == tokenizer("ab")["input_ids"]
    assert list(found.chosen_ids) == [*tokenizer("cd")["input_ids"], tokenizer.eos_token_id]
    assert found.rejected_ids == (tokenizer.eos_token_id,)  # an empty completion is one, and ends
    assert (found.context_ids, found.chosen_reward) == ((), None)


def test_a_written_out_end_token_ends_nothing(writing: Writing, policy_model: Path) -> None:
    end = load_tokenizer(str(policy_model)).eos_token_id
    assert writing.completion("a</s>b").count(end) == 1


def test_demonstrations(writing: Writing) -> None:
    found = writing.demonstration(Problem("p", "q", ("right", "also")), Reward(1.0, True))
    assert found.text == "right"
    assert len(found.ids) == 6
    assert found.log_probs == (None,) * 6
    assert found.turn_rewards == ((5, 1.0),)
    with pytest.raises(UsageError, match="problem p has no answer that could be imitated"):
        writing.demonstration(Problem("p", "q"), Reward(0.0))


def test_conversations_need_a_template(writing: Writing, policy_model: Path, chatting: Path) -> None:
    talk = Preference("x", (("user", "hello"),), "a", "b")
    with pytest.raises(UsageError, match="chat template"):
        writing.comparison(talk)
    with pytest.raises(UsageError, match="no chat template"):
        Writing(load_tokenizer(str(policy_model)), chat=True)
    chat = Writing(load_tokenizer(str(chatting)), chat=True)
    # As gemma: the template ends a turn by a token that is not the tokenizer's end of a text.
    tokenizer = load_tokenizer(str(chatting))
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert chat.completion("right")[-1] == end != tokenizer.eos_token_id
    assert Writing(tokenizer, chat=False).completion("right")[-1] == tokenizer.eos_token_id
    assert chat.comparison(talk).prompt_ids == chat.comparison(replace(talk, prompt="hello")).prompt_ids
