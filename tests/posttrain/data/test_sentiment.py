"""The synthetic language of likes and dislikes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.data.sentiment import NEGATIVE, NEUTRAL, POSITIVE, Sentiment, Settings, make_tokenizer
from gpuherd.posttrain.types import Split

SMALL = {"train": 200, "heldout": 30, "test": 40}


def test_the_language_has_as_many_words_as_it_says() -> None:
    assert (len(POSITIVE), len(NEGATIVE), len(NEUTRAL)) == (20, 20, 60)
    assert len({*POSITIVE, *NEGATIVE, *NEUTRAL}) == 100


def test_sentences_are_fixed_by_the_seed_and_in_one_split_each() -> None:
    one, same, other = (Sentiment(Settings(**SMALL, seed=seed)) for seed in (0, 0, 1))
    parts = {split: one.problems(split, None, 0) for split in Split}
    prompts = [each.prompt for part in parts.values() for each in part]
    assert len(set(prompts)) == len(prompts) == 270
    assert one.problems(Split.TEST, None, 3) == same.problems(Split.TEST, None, 3)
    assert set(prompts) != {each.prompt for split in Split for each in other.problems(split, None, 0)}
    for problem in parts[Split.TRAIN]:
        whole = (problem.prompt + problem.answers[0]).split()
        assert 8 <= len(whole) <= 16
        assert set(whole) <= {*POSITIVE, *NEGATIVE, *NEUTRAL}


def test_the_reward_is_the_share_of_positive_words() -> None:
    task = make_task("sentiment", TaskOptions(SMALL))
    problem = task.problems(Split.TRAIN, 1, 0)[0]
    said = ["good great", "good bad", "the film", "", "dull nonsense"]
    rewards = task.rewards([problem] * 5, said)
    assert [each.value for each in rewards] == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert [each.parts["negative"] for each in rewards] == [0.0, 0.5, 0.0, 0.0, 0.5]
    assert {each.correct for each in rewards} == {None}
    assert not task.verifiable


def test_each_word_is_a_token(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    problem = Sentiment(Settings(**SMALL)).problems(Split.TRAIN, 1, 0)[0]
    ids = tokenizer(problem.prompt + problem.answers[0])["input_ids"]
    assert len(ids) == len((problem.prompt + problem.answers[0]).split())
    assert tokenizer.decode(ids) == problem.prompt + problem.answers[0]


def test_settings_that_make_no_sense_are_refused() -> None:
    for settings in ({"shortest": 4}, {"longest": 5}, {"train": -1}):
        with pytest.raises(UsageError, match=next(iter(settings))):
            make_task("sentiment", TaskOptions(settings))
