"""Tasks that score by a reward model, with real small ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.posttrain import tiny
from tests.qa.small_models import seeded

from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.envs.interface import EnvironmentOptions
from gpuherd.posttrain.envs.registry import make_environments
from gpuherd.posttrain.types import Split


@pytest.fixture
def sentiment_model(tmp_path: Path) -> str:
    """A small llama with the outputs NEGATIVE and POSITIVE."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path / "sentiment"
    tokenizer = tiny.character_tokenizer(folder)
    with seeded(3):
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=256,
            initializer_range=0.3,
            id2label={0: "NEGATIVE", 1: "POSITIVE"},
            label2id={"NEGATIVE": 0, "POSITIVE": 1},
            pad_token_id=tokenizer.pad_token_id,
        )
        LlamaForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def test_reviews_earn_the_logit_of_their_label(sentiment_model: str, tmp_path: Path) -> None:
    from gpuherd.posttrain.rewards.reward_model import RewardModel

    path = tmp_path / "reviews.jsonl"
    path.write_text("".join(f"{json.dumps({'text': f'film number {n} that nobody saw'})}\n" for n in range(9)))
    settings = {"words": 3, "data": str(path), "test_data": str(path)}
    task = make_task("imdb", TaskOptions(settings, reward_model=sentiment_model, reward_batch_size=2))
    problems = task.problems(Split.TEST, 3, 0)
    said = [" was good", "", " was bad"]
    rewards = task.rewards(problems, said)
    for label, sign in (("POSITIVE", 1), ("NEGATIVE", -1)):
        model = RewardModel(sentiment_model, label=label)
        expected = model.scores([each.prompt for each in problems], said)
        near = [abs(each.value - score) < 1e-5 for each, score in zip(rewards, expected, strict=True)]
        assert all(near) if sign > 0 else not any(near)
    assert {each.correct for each in rewards} == {None}
    task.close()
    assert task.rewards(problems, said) == rewards  # loaded again


def test_debates_are_judged_by_a_model_that_is_named(sentiment_model: str) -> None:
    options = EnvironmentOptions(
        "debate",
        problems=({"topic": "tests"},),
        only=Split.TRAIN,
        max_attempts=2,
        settings={"label": "POSITIVE"},
        task=TaskOptions(reward_model=sentiment_model),
    )
    debates = make_environments(options)
    environment = debates.make()
    environment.reset(debates.problems(Split.TRAIN, 1, 0)[0], 0)
    first, last = environment.step("They help."), environment.step("They do.")
    assert first.info["judge"] == sentiment_model
    assert last.done
    assert abs(last.reward - (float(first.info["score"]) + float(last.info["score"])) / 2) < 1e-9
    debates.close()
